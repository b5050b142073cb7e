"""A drop-in for ``torch.nn.parallel.DistributedDataParallel`` that shows what it does.

Example::

    from instrumented_ddp import DistributedDataParallel

    model = DistributedDataParallel(model)               # records if run under `overlapscope record`
    model = DistributedDataParallel(model, trace="traces")  # records always

``attach`` records a process with torch's own DDP, or with none.
"""

from instrumented_ddp.attach import attach
from instrumented_ddp.ddp import DistributedDataParallel
from instrumented_ddp.session import step
from instrumented_ddp.sharded.optimizer import ShardedOptimizer
from instrumented_ddp.watchdog.stopping import IncidentError

__all__ = ["DistributedDataParallel", "IncidentError", "ShardedOptimizer", "attach", "step"]
