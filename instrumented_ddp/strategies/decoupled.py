"""The two halves of a ring separately: reduce-scatter during the backward, all-gather during the next forward.

Zhang et al., "DeAR: Accelerating distributed deep learning with fine-grained all-reduce pipelining", 2023
(arXiv 2302.12445). The second half is only hidden if updates are deferred, see ``DistributedDataParallel.defer``.
"""

from __future__ import annotations

import torch

from instrumented_ddp.strategies import ring
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire


def reduce_scatter(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire: each rank ends with its part of the sum, in place."""
    ring.reduce_scatter(buffer.tensor_split(wire.size), wire)


def all_gather(buffer: torch.Tensor, wire: Wire) -> None:
    """Fill in the parts of the sum that other ranks have."""
    ring.all_gather(buffer.tensor_split(wire.size), wire)


STRATEGY = Strategy(name="decoupled", all_reduce=reduce_scatter, then=all_gather)
