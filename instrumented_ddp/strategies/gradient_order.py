"""Buckets in another order than the observed order of gradients, to show the effect of the order.

``reverse_order`` is the reverse of the module's order, which torch uses before it has observed a backward: usually
nearly right. With ``forward_order`` the bucket that is launched first is the one that is ready last, so nothing can be
hidden if a module registers its layers in the order in which it uses them (section 3.2.3 of the DDP paper).
"""

from __future__ import annotations

from instrumented_ddp.strategies.strategy import Strategy

REVERSE = Strategy(name="reverse_order", order=lambda observed: sorted(observed, reverse=True))
FORWARD = Strategy(name="forward_order", order=sorted)
