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
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.reduction.communicator import Communicator

_UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
)
"""Like the other messages, that of stock DDP, which people search for (torch/csrc/distributed/c10d/reducer.cpp)."""


def unfinished_reduction(
    names: Sequence[str], indices: Sequence[int], rank: int, *, find_unused_parameters: bool, static_graph: bool
) -> str:
    """Return the message for a previous backward that left gradients out.

    Args:
        names: names of all parameters.
        indices: indices of the parameters without a gradient.
    """
    if static_graph:
        advice = (
            "your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but "
            "then got unused in the second iteration. this is not compatible with static_graph set to True."
        )
    else:
        advice = "your module has parameters that were not used in producing loss. " + (
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs "
            "participate in computing loss. You can fix this by "
            if find_unused_parameters
            else "You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by \n"
        )
        advice += (
            "making sure all `forward` function outputs participate in calculating loss. \nIf you already have done "
            "the above, then the distributed data parallel module wasn't able to locate the output tensors in the "
            "return value of your module's `forward` function. Please include the loss function and the structure of "
            "the return value of `forward` of your module when reporting this issue (e.g. list, dict, iterable)."
        )
    missing = ", ".join(names[index] for index in indices)
    text = (
        f"{_UNFINISHED}{advice}\nParameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(map(str, indices))}\nParameters which did not receive grad for rank {rank}: {missing}"
    )
    if get_debug_level() == DebugLevel.OFF:
        text += (
            "\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to "
            "print out information about which particular parameters did not receive gradient on this rank as part of "
            "this error"
        )
    return text


def marked_twice(name: str, index: int) -> str:
    """Return the message for a gradient that was marked ready twice."""
    return (
        "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
        "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not "
        "shared across multiple concurrent forward-backward passes. or try to use _set_static_graph() as a workaround "
        "if this module graph does not change during training loop.2) Reused parameters in multiple reentrant "
        "backward passes. For example, if you use multiple `checkpoint` functions to wrap the same part of your "
        "model, it would result in the same set of parameters been used by different reentrant backward passes "
        "multiple times, and hence marking a variable ready multiple times. DDP does not support such use cases in "
        "default. You can try to use _set_static_graph() as a workaround if your module graph does not change over "
        f"iterations.\nParameter at index {index} with name {name} has been marked as ready twice. This means that "
        "multiple autograd engine  hooks have fired for this particular parameter during this iteration."
    )


def graph_has_changed(name: str) -> str:
    """Return the message for a parameter that got more gradients than in the first iteration of a static graph."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then "
        "got used in the second iteration. this is not compatible with static_graph set to True. The parameter is "
        f"{name}."
    )


NO_UNUSED_FOUND = (
    "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the "
    "forward pass. This flag results in an extra traversal of the autograd graph every iteration,  which can adversely "
    "affect performance. If your model indeed never has any unused parameters in the forward pass, consider turning "
    "this flag off. Note that this warning may be a false positive if your model has flow control causing later "
    "iterations to have unused parameters."
)
"""Warning that is issued once per process."""


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
            warnings.warn(NO_UNUSED_FOUND, stacklevel=4)
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
