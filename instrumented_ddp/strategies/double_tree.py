"""Two binary trees, each for half of the buffer: a leaf of one is an inner rank of the other.

So each rank sends and receives about as much, and both directions of its link are in use. Sanders, Speck and Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL's ``src/graph/trees.cc``.
"""

from __future__ import annotations

import torch

from instrumented_ddp.strategies import tree
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire


def all_reduce(buffer: torch.Tensor, wire: Wire) -> None:
    """Sum a flat buffer over the ranks of a wire, in place."""
    first, second = buffer.tensor_split(2)
    ranks = range(wire.size)
    wire.together(
        lambda wire: tree.all_reduce(first, wire.among(ranks, "of the first half")),
        lambda wire: tree.all_reduce(second, wire.among(ranks[::-1], "of the second half")),
    )


STRATEGY = Strategy(name="double_tree", all_reduce=all_reduce)
