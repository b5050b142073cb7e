"""Which parameters have no part in the loss: on this rank, by a walk through the graph; on all, by a bitmap.

A rank that leaves a parameter out must still take part in the all-reduce of its bucket, with zeros. And where no
rank has used a parameter, its gradient must be left as it is, because momentum and weight decay would move it.
(Li et al., VLDB 2020, section 3.2.3.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from instrumented_ddp.lane import Lane
from instrumented_ddp.records import BucketRecords

Node = Any
"""A function in the autograd graph."""


def find_unused(outputs: Iterable[torch.Tensor], accumulators: Sequence[Node]) -> list[int]:
    """Walk the graph from the outputs to its leaves.

    Args:
        outputs: of the forward.
        accumulators: the leaf that accumulates each parameter's gradient.

    Returns:
        The numbers of the parameters whose leaf can't be reached.
    """
    with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):  # the name in torch's profiles
        seen = _reachable(outputs)
    return [index for index, accumulator in enumerate(accumulators) if accumulator not in seen]


def _reachable(outputs: Iterable[torch.Tensor]) -> set[Node]:
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen


class UsageMap:
    """Which parameters have had a part in a loss since gradients were last reduced.

    Args:
        parameters: how many there are.
        device: where the bitmap is reduced.
        lane: on which it is reduced.
        records: of its all-reduce, if anything is recorded.
    """

    def __init__(self, parameters: int, device: torch.device, lane: Lane, records: BucketRecords | None) -> None:
        self._lane = lane
        self._records = records
        self._used_here = bytearray(parameters)
        self._used_anywhere: list[int] | None = None
        self.reduced = torch.zeros(parameters, dtype=torch.int32, device=device)
        """How many ranks have used each parameter, as of the newest reduction."""

    def note(self, index: int) -> None:
        """A parameter got a gradient; also under ``no_sync()``, for the reduction that follows."""
        self._used_here[index] = 1

    def all_reduce(self) -> None:
        """Launch the sum over all ranks. Every rank does so after its last bucket."""
        self.reduced.copy_(torch.tensor(list(self._used_here), dtype=torch.int32))
        self._collective = self._lane.all_reduce(self.reduced, self._records)
        self._used_anywhere = None

    def is_used_anywhere(self, index: int) -> bool:
        """Whether any rank has used a parameter. The ranks are waited for only if this one has not."""
        if self._used_here[index]:
            return True
        if self._used_anywhere is None:
            self._lane.wait(self._collective)
            self._used_anywhere = self.reduced.tolist()
        return self._used_anywhere[index] > 0

    def settle(self) -> None:
        """The reduction is over on this rank too: the buffer may be used again."""
        if self._used_anywhere is None:
            self._lane.wait(self._collective)

    def clear(self) -> None:
        """Nothing has been used yet."""
        self._used_here = bytearray(len(self._used_here))
