"""A binary tree: sums are sent up to rank 0, and the result is sent down again.

A leaf sends the buffer once, an inner rank up to three times; over all ranks it is ``2 (N - 1)`` buffers, as with a
ring, in ``2 log2 N`` rounds in place of ``2 (N - 1)``.
"""

from __future__ import annotations

import torch

from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire


def all_reduce(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire, in place.

    Rank 1 has parent 0 and children 3 and 4.
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


def double_all_reduce(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire, in place."""
    first, second = buffer.tensor_split(2)
    ranks = range(wire.size)
    wire.together(
        lambda wire: all_reduce(first, wire.among(ranks, "of the first half")),
        lambda wire: all_reduce(second, wire.among(ranks[::-1], "of the second half")),
    )


TREE = Strategy(name="tree", all_reduce=all_reduce)
DOUBLE_TREE = Strategy(name="double_tree", all_reduce=double_all_reduce)
"""Two binary trees, each for half of the buffer: a leaf of one is an inner rank of the other.

So each rank sends and receives about as much, and both directions of its link are in use. Sanders, Speck and Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL's ``src/graph/trees.cc``.
"""
