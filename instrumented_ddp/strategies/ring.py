"""Ring all-reduce, and strategies made of it or of its halves.

Each rank communicates with its two neighbors, and sends ``2 (N - 1) / N`` of the buffer in all: in N - 1 rounds the
parts of the buffer travel around the ring and are summed (reduce-scatter); in as many more the sums do (all-gather).
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
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


def scatter_sum(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire: each rank ends with its part of the sum, in place."""
    reduce_scatter(buffer.tensor_split(wire.size), wire)


def gather_sum(buffer: torch.Tensor, wire: Wire) -> None:
    """Fill in the parts of the sum that other ranks have."""
    all_gather(buffer.tensor_split(wire.size), wire)


RING = Strategy(name="ring", all_reduce=all_reduce)

DECOUPLED = Strategy(name="decoupled", all_reduce=scatter_sum, then=gather_sum)
"""The two halves of a ring separately: reduce-scatter during the backward, all-gather during the next forward.

Zhang et al., "DeAR: Accelerating distributed deep learning with fine-grained all-reduce pipelining", 2023
(arXiv 2302.12445). The second half is only hidden if updates are deferred, see ``DistributedDataParallel.defer``.
"""

PRIORITY = Strategy(name="priority", all_reduce=all_reduce, slice_bytes=1 << 20)
"""Priority scheduling: buckets are summed in slices, first those that the next forward needs first.

Gradients come in the order of the backward, which is the wrong one for the next forward. So buckets are cut into
slices, and whenever a slice is summed, rank 0 chooses the most urgent one that is ready and broadcasts the choice,
because all have to sum the same at the same time (``sums.SliceQueue``). Peng et al., "A generic communication scheduler
for distributed DNN training acceleration" (ByteScheduler), 2019; Jayarajan et al., "Priority-based parameter
propagation" (P3), 2019 (arXiv 1905.03960). It pays if updates are deferred, see ``DistributedDataParallel.defer``.
"""

SHARDED = Strategy(name="sharded", all_reduce=scatter_sum, then=gather_sum, keeps_state=True, pads_to=128)
"""Sharded optimizer: reduce-scatter in the backward, all-gather of the updated parameters before the next forward.

As in Megatron's distributed optimizer (``core/distributed/param_and_grad_buffer.py``), and ZeRO's first stage
(Rajbhandari et al., 2020). Both are halves of a ring, so a rank sends ``(N - 1) / N`` of the gradients, and as much of
the parameters. (gloo's own reduce-scatter is an all-reduce whose other parts are discarded: it sends twice as much.)
With ``pads_to=2**16`` buckets are as large as Megatron's ``pad_buckets_for_high_nccl_busbw`` makes them.
"""
