"""Ring all-reduce: each rank communicates with its two neighbors, and sends ``2 (N - 1) / N`` of the buffer in all.

In N - 1 rounds the parts of the buffer travel around the ring and are summed (reduce-scatter); in as many more the
sums do (all-gather). Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import torch

from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire


def all_reduce(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire, in place."""
    parts = buffer.tensor_split(wire.size)
    reduce_scatter(parts, wire)
    all_gather(parts, wire)


def reduce_scatter(parts: tuple[torch.Tensor, ...], wire: Wire) -> None:
    """Sum parts, one for each rank: each rank ends with the sum of its own part; the others hold partial sums.

    With 3 ranks, rank 0 sends part 2 and adds to part 1, then sends part 1 and adds to part 0.
    """
    size, rank = wire.size, wire.rank
    receive_buffer = torch.empty_like(parts[0])  # no part is larger than the first
    with wire.phase("reduce-scatter", rounds=size - 1):
        for turn in range(1, size):
            sent, received = parts[(rank - turn) % size], parts[(rank - turn - 1) % size]
            arrived = receive_buffer[: received.numel()]
            wire.exchange(sends=[(sent, (rank + 1) % size)], receives=[(arrived, (rank - 1) % size)])
            received += arrived


def all_gather(parts: tuple[torch.Tensor, ...], wire: Wire) -> None:
    """Fill in the parts of the other ranks, of which each has its own.

    With 3 ranks, rank 0 sends part 0 and receives part 2, then sends part 2 and receives part 1.
    """
    size, rank = wire.size, wire.rank
    with wire.phase("all-gather", rounds=size - 1):
        for turn in range(size - 1):
            sent, received = parts[(rank - turn) % size], parts[(rank - turn - 1) % size]
            wire.exchange(sends=[(sent, (rank + 1) % size)], receives=[(received, (rank - 1) % size)])


STRATEGY = Strategy(name="ring", all_reduce=all_reduce)
