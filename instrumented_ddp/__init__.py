"""A drop-in for ``torch.nn.parallel.DistributedDataParallel`` that shows what it does.

Example::

    from instrumented_ddp import DistributedDataParallel

    model = DistributedDataParallel(model)               # records if run under `overlapscope record`
    model = DistributedDataParallel(model, trace="traces")  # records always
"""

from instrumented_ddp.ddp import DistributedDataParallel
from instrumented_ddp.recorder import step

__all__ = ["DistributedDataParallel", "step"]
