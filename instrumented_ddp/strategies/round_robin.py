"""Round robin: several process groups of the same ranks take turns with the buckets, so that several are in flight.

Section 5.4 of the DDP paper (figure 12): it helps where one group can't saturate the link. Torch had it until 2.6.
"""

from __future__ import annotations

from instrumented_ddp.strategies.strategy import Strategy

STRATEGY = Strategy(name="round_robin", groups=3)
"""Three groups, the maximum in the paper."""
