"""Drop-in replacement for ``torch.nn.parallel.DistributedDataParallel`` that records what DDP does.

Example::

    from instrumented_ddp import DistributedDataParallel

    model = DistributedDataParallel(model)               # records if run under `overlapscope record`
    model = DistributedDataParallel(model, trace="traces")  # records always

``attach`` records a process that trains with torch's own DDP, or without DDP. ``detach`` ends the recording of one that
lives on.
"""

from instrumented_ddp.attach import attach
from instrumented_ddp.ddp import DistributedDataParallel
from instrumented_ddp.session import detach, step
from instrumented_ddp.strategies.sharded.optimizer import ShardedOptimizer
from instrumented_ddp.watchdog.abort import IncidentError

__all__ = ["DistributedDataParallel", "IncidentError", "ShardedOptimizer", "attach", "detach", "step"]
