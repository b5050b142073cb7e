"""Detection of unused parameters: on this rank by a walk through the autograd graph, on all ranks by a bitmap.

A rank that does not use a parameter must still take part in the all-reduce of its bucket, with zeros. And if no rank
has used a parameter, its gradient must be left unchanged, because momentum and weight decay would move it.
(Li et al., VLDB 2020, section 3.2.3.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.reduction import error_messages
from instrumented_ddp.reduction.communicator import Communicator

Node = Any
"""A function in the autograd graph."""

_warned_none_unused = False


def find_unused(outputs: Iterable[torch.Tensor], accumulators: Sequence[Node]) -> list[int]:
    """Walk the graph from the outputs to its leaves.

    Args:
        outputs: outputs of the forward.
        accumulators: the leaf that accumulates each parameter's gradient.

    Returns:
        The indices of the parameters whose leaf can't be reached.
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


class Usage:
    """Usage of each parameter in a backward, where parameters may be unused (``find_unused_parameters``).

    Args:
        accumulators: the leaf of the graph that accumulates each parameter's gradient.
        bitmap: which parameters any rank has used.
    """

    def __init__(self, accumulators: Sequence[Node], bitmap: UsageMap) -> None:
        self._accumulators = accumulators
        self.bitmap = bitmap
        self.unused: list[int] = []
        """Parameters that the latest forward's outputs don't depend on, if they were searched for."""
        self._unused_before: list[int] | None = None
        self._unused_to_mark: list[int] = []
        self.is_static = True
        """True if every forward so far has left the same parameters unused."""

    def begin(self, outputs: Sequence[torch.Tensor]) -> None:
        """Search for unused parameters, at the end of a forward whose backward is to be reduced."""
        global _warned_none_unused
        self.unused = self._unused_to_mark = find_unused(outputs, self._accumulators)
        if not self.unused and (not _warned_none_unused or torch.is_warn_always_enabled()):
            _warned_none_unused = True
            warnings.warn(error_messages.NO_UNUSED_FOUND, stacklevel=4)
        if self._unused_before not in (None, self.unused):
            self.is_static = False
        self._unused_before = self.unused

    def is_complete(self, index: int, *, has_gradient: bool, is_expected: bool) -> bool:
        """Return, in a gradient hook, whether the gradient is complete and to be reduced."""
        if has_gradient:
            self.bitmap.note(index)
        return is_expected

    def take_unused(self) -> Sequence[int]:
        """Return the parameters that are ready without a gradient, once per backward."""
        unused, self._unused_to_mark = self._unused_to_mark, []
        return unused

    def launch_bitmap(self) -> None:
        """Launch the all-reduce of the bitmap, after that of the last bucket."""
        self.bitmap.all_reduce()

    def finish_reduction(self) -> None:
        """Wait for the bitmap, and clear it, at the end of the reduction."""
        self.bitmap.finish_reduction()
        self.bitmap.clear()


class UsageMap:
    """Bitmap of the parameters used since gradients were last reduced.

    Args:
        parameters: number of parameters.
        device: device on which the bitmap is reduced.
        communicator: communicator on which it is reduced.
        records: records of its all-reduce, if recorded.
    """

    def __init__(
        self, parameters: int, device: torch.device, communicator: Communicator, records: BucketRecords | None
    ) -> None:
        self._communicator = communicator
        self._records = records
        self._used_here = bytearray(parameters)
        self._used_anywhere: list[int] | None = None
        self.reduced = torch.zeros(parameters, dtype=torch.int32, device=device)
        """Number of ranks that have used each parameter, as of the latest reduction."""

    def note(self, index: int) -> None:
        """Note that a parameter got a gradient; also under ``no_sync()``, for the next reduction."""
        self._used_here[index] = 1

    def all_reduce(self) -> None:
        """Launch the sum over all ranks. Every rank does so after its last bucket."""
        used = torch.frombuffer(self._used_here, dtype=torch.uint8)
        if self.reduced.device.type == "cuda":
            # From pageable memory the copy would block the host. torch reuses pinned memory only when the copy is done.
            used = torch.empty_like(used, dtype=torch.int32, pin_memory=True).copy_(used)
        self.reduced.copy_(used, non_blocking=True)
        self._collective = self._communicator.all_reduce(self.reduced, self._records)
        self._used_anywhere = None

    def is_used_anywhere(self, index: int) -> bool:
        """Return whether any rank has used a parameter. Waits for the other ranks only if this one has not."""
        if self._used_here[index]:
            return True
        if self._used_anywhere is None:
            self._communicator.wait(self._collective)
            self._used_anywhere = self.reduced.tolist()
        return self._used_anywhere[index] > 0

    def finish_reduction(self) -> None:
        """Note that the reduction is over on this rank too, so that the buffer may be reused."""
        if self._used_anywhere is None:
            self._communicator.wait(self._collective)

    def clear(self) -> None:
        """Reset the parameters that were used."""
        self._used_here = bytearray(len(self._used_here))
