"""Buckets in another order than that in which gradients were seen to come, to show what the order is worth.

``reverse_order`` is the module's backwards, as torch has it before it has watched a backward: nearly right, as a rule.
With ``forward_order`` the bucket that is launched first is the one that is ready last, so nothing can be hidden if a
module registers its layers in the order in which it uses them (section 3.2.3 of the DDP paper).
"""

from __future__ import annotations

from instrumented_ddp.strategies.strategy import Strategy

REVERSE = Strategy(name="reverse_order", order=lambda observed: sorted(observed, reverse=True))
FORWARD = Strategy(name="forward_order", order=sorted)
