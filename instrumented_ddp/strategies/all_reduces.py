"""All-reduces that are made of messages between ranks, and the strategies that use them or their halves.

Rings need many rounds and little traffic, trees and direct exchanges few rounds, for small buffers and few ranks;
``Hierarchical`` sends little between hosts.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence

import torch

from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire


def ring_all_reduce(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire, in place, with two neighbors each: ``2 (N - 1) / N`` buffers a rank.

    In N - 1 rounds the parts of the buffer travel around the ring and are summed (reduce-scatter); in as many more the
    sums do (all-gather). Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    2009.
    """
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


def tree_all_reduce(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire, in place: sums are sent up to rank 0, and the result down again.

    A leaf sends the buffer once, an inner rank up to three times; over all ranks it is ``2 (N - 1)`` buffers, as with a
    ring, in ``2 log2 N`` rounds in place of ``2 (N - 1)``. Rank 1 has parent 0 and children 3 and 4.
    """
    parent = (wire.rank - 1) // 2
    children = [child for child in (2 * wire.rank + 1, 2 * wire.rank + 2) if child < wire.size]
    receive_buffers = [torch.empty_like(buffer) for _ in children]
    with wire.phase("up the tree"):
        wire.exchange(receives=list(zip(receive_buffers, children, strict=True)))
        for arrived in receive_buffers:
            buffer += arrived
        if parent >= 0:
            wire.exchange(sends=[(buffer, parent)])
    with wire.phase("down the tree"):
        if parent >= 0:
            wire.exchange(receives=[(buffer, parent)])
        wire.exchange(sends=[(buffer, child) for child in children])


def double_tree_all_reduce(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer by two trees, each for half of it: a leaf of one is an inner rank of the other.

    So each rank sends and receives about as much, and both directions of its link are in use. Sanders, Speck and Träff,
    "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL's ``src/graph/trees.cc``.
    """
    first, second = buffer.tensor_split(2)
    ranks = range(wire.size)
    wire.together(
        lambda wire: tree_all_reduce(first, wire.among(ranks, "of the first half")),
        lambda wire: tree_all_reduce(second, wire.among(ranks[::-1], "of the second half")),
    )


def one_shot(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer in one round: each rank sends its buffer to all others, and all compute the same sum."""
    _sum_directly([buffer] * wire.size, wire, "one shot")


def two_shot(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer in two rounds: each rank sums one part for all and sends it to all.

    That is ``2 (N - 1) / N`` buffers a rank, as with a ring.
    """
    parts = buffer.tensor_split(wire.size)
    _sum_directly(parts, wire, "reduce-scatter")
    others = [rank for rank in range(wire.size) if rank != wire.rank]
    with wire.phase("all-gather", rounds=1):
        wire.exchange(
            sends=[(parts[wire.rank], other) for other in others], receives=[(parts[other], other) for other in others]
        )


def _sum_directly(parts: Sequence[torch.Tensor], wire: Wire, phase: str) -> None:
    """Send each rank its part, and sum this rank's in the order of ranks, so that all ranks would get the same bits."""
    own = parts[wire.rank]
    others = [rank for rank in range(wire.size) if rank != wire.rank]
    of_rank = {rank: own if rank == wire.rank else torch.empty_like(own) for rank in range(wire.size)}
    with wire.phase(phase, rounds=1):
        wire.exchange(
            sends=[(parts[other], other) for other in others], receives=[(of_rank[other], other) for other in others]
        )
    total = of_rank[0].clone()
    for rank in range(1, wire.size):
        total += of_rank[rank]
    own.copy_(total)


class Hierarchical:
    """All-reduce by rings within each host, then between hosts, as Horovod's hierarchical one.

    Each rank of a host sums one part of the buffer for the host, sums it with the ranks of other hosts that have the
    same part, and sends it to its neighbors: so it sends only ``1 / ranks per host`` of the buffer between hosts. Which
    ranks share a host is found out at the first bucket.

    Args:
        host: returns the name of the host of this process.
    """

    def __init__(self, host: Callable[[], str] = socket.gethostname) -> None:
        self._host = host
        self._by_host: list[list[int]] | None = None

    def __call__(self, buffer: torch.Tensor, wire: Wire) -> None:
        """Sum a flat buffer over the ranks of a wire, in place; by one ring if hosts' rank counts differ."""
        if self._by_host is None:
            self._by_host = self._group_by_host(wire, buffer.device)
        if len({len(ranks) for ranks in self._by_host}) > 1:
            ring_all_reduce(buffer, wire)
            return
        of_host = next(ranks for ranks in self._by_host if wire.rank in ranks)
        inside = wire.among(of_host, "in the host")
        between = wire.among([ranks[inside.rank] for ranks in self._by_host], "between hosts")
        parts = buffer.tensor_split(inside.size)
        reduce_scatter(parts, inside)
        ring_all_reduce(parts[inside.rank], between)
        all_gather(parts, inside)

    def _group_by_host(self, wire: Wire, device: torch.device) -> list[list[int]]:
        """Return the ranks of each host, in the same order on all ranks."""
        digest = hashlib.sha256(self._host().encode()).digest()
        parts = torch.zeros(wire.size, dtype=torch.int64, device=device).split(1)
        parts[wire.rank].fill_(int.from_bytes(digest[:7], "little"))
        all_gather(parts, wire.among(range(wire.size), "of host names"))
        ranks: dict[int, list[int]] = {}
        for rank, part in enumerate(parts):
            ranks.setdefault(int(part.item()), []).append(rank)
        return list(ranks.values())


RING = Strategy(name="ring", all_reduce=ring_all_reduce)

DECOUPLED = Strategy(name="decoupled", all_reduce=scatter_sum, then=gather_sum)
"""The two halves of a ring separately: reduce-scatter during the backward, all-gather during the next forward.

Zhang et al., "DeAR: Accelerating distributed deep learning with fine-grained all-reduce pipelining", 2023
(arXiv 2302.12445). The second half is only hidden if updates are deferred, see ``DistributedDataParallel.defer``.
"""

PRIORITY = Strategy(name="priority", all_reduce=ring_all_reduce, slice_bytes=1 << 20)
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

TREE = Strategy(name="tree", all_reduce=tree_all_reduce)
DOUBLE_TREE = Strategy(name="double_tree", all_reduce=double_tree_all_reduce)
ONE_SHOT = Strategy(name="direct", all_reduce=one_shot)
TWO_SHOT = Strategy(name="direct_two_shot", all_reduce=two_shot)
