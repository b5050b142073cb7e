"""Direct exchange: every rank sends to every other. At most two rounds of latency, for small buffers and few ranks.

In one shot each rank sends its whole buffer to all others, ``N - 1`` buffers, and all compute the same sum. In two
shots each rank receives one part of the buffer from all, sums it and sends the sum to all: ``2 (N - 1) / N`` buffers,
as with a ring.
"""

from __future__ import annotations

import torch

from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire


def one_shot(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire, in place."""
    others = [rank for rank in range(wire.size) if rank != wire.rank]
    of_rank = {rank: buffer if rank == wire.rank else torch.empty_like(buffer) for rank in range(wire.size)}
    with wire.phase("one shot", rounds=1):
        wire.exchange(
            sends=[(buffer, other) for other in others], receives=[(of_rank[other], other) for other in others]
        )
    buffer.copy_(_sum([of_rank[rank] for rank in range(wire.size)]))


def two_shot(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire, in place."""
    parts = buffer.tensor_split(wire.size)
    own = parts[wire.rank]
    others = [rank for rank in range(wire.size) if rank != wire.rank]
    of_rank = {rank: own if rank == wire.rank else torch.empty_like(own) for rank in range(wire.size)}
    with wire.phase("reduce-scatter", rounds=1):
        wire.exchange(
            sends=[(parts[other], other) for other in others], receives=[(of_rank[other], other) for other in others]
        )
    own.copy_(_sum([of_rank[rank] for rank in range(wire.size)]))
    with wire.phase("all-gather", rounds=1):
        wire.exchange(sends=[(own, other) for other in others], receives=[(parts[other], other) for other in others])


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum in the order of ranks, so that all ranks get the same bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


ONE_SHOT = Strategy(name="direct", all_reduce=one_shot)
TWO_SHOT = Strategy(name="direct_two_shot", all_reduce=two_shot)
