"""Baselines: the steps by which DDP evolved, all with the backend's all-reduce (section 3 of the DDP paper).

``naive`` reduces each parameter when the backward is over, ``per_parameter`` as soon as its gradient is ready,
``bucketed`` reduces buckets when the backward is over, and ``overlapped``, which is the default, when they are full.
"""

from __future__ import annotations

from instrumented_ddp.strategies.strategy import Strategy

NAIVE = Strategy(name="naive", overlaps=False, bucket_cap_mb=0)
PER_PARAMETER = Strategy(name="per_parameter", bucket_cap_mb=0)
BUCKETED = Strategy(name="bucketed", overlaps=False)
OVERLAPPED = Strategy(name="overlapped")
