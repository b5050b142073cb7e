"""Which gradients a collective of the user's own reduces: found by memory, or by size.

Pure functions of what was seen between two updates. For example, of parameters with 6, 2, 3 and 1 elements a loop
reduces the gradients in tensors of 4 and 8 elements: the first is the run of the last two, the other the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from instrumented_ddp.bucket_plan import Traffic
from instrumented_ddp.collectives.dispatch import Call

REDUCTIONS: Final = ("all_reduce", "reduce", "reduce_scatter")
"""Operations that can average gradients."""
_MIN_SHARE: Final = 0.5
"""Share of the gradients' elements that have to be found for a loop to be one that reduces by hand."""
_MAX_PADDING: Final = 0.05
"""Share of a flat tensor that may be something else than gradients: padding, a loss, a flag."""
_MAX_PADDED_ELEMENTS: Final = 4096
_MAX_BEGINNINGS: Final = 32
"""Number of reductions that are tried as the first one of the gradients."""


class Memory(NamedTuple):
    """First byte of a tensor, and the first one behind it."""

    begin: int
    end: int


@dataclass(frozen=True)
class UserReduction:
    """A collective of the user's own that may have reduced gradients."""

    traffic: Traffic
    memory: tuple[Memory, ...]


def describe_reduction(call: Call) -> UserReduction | None:
    """Return what is compared with gradients; None for a collective that can't have averaged any."""
    if call.op not in REDUCTIONS or not call.tensors or call.group.size() == 1:
        return None
    first = call.tensors[0]
    if not first.dtype.is_floating_point or first.layout is not torch.strided:
        return None
    elements = sum(tensor.numel() for tensor in call.tensors)
    if call.op == "reduce_scatter":  # its output is one share of what is reduced
        elements *= call.group.size()
    return UserReduction(Traffic(call.op, first.dtype, elements), tuple(map(memory_of, call.tensors)))


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return where a dense tensor lies."""
    begin = tensor.data_ptr()
    return Memory(begin, begin + tensor.numel() * tensor.element_size())


def assign_gradients(
    reductions: Sequence[UserReduction], gradients: Sequence[torch.Tensor]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return which gradients each reduction has reduced.

    Args:
        reductions: collectives in the order of their launch.
        gradients: dense gradients of all parameters, in the optimizer's order.

    Returns:
        Index of a reduction and of its gradients, in the order of the reductions, each gradient once. Empty if these
        are not most of the gradients.
    """
    sizes = [gradient.numel() for gradient in gradients]
    left = dict.fromkeys(range(len(sizes)))
    found = _assign_by_memory(reductions, [memory_of(gradient) for gradient in gradients], left)
    if left:
        rest = {index: one.traffic.elements for index, one in enumerate(reductions) if index not in found}
        found |= _assign_by_size(rest, list(left), sizes)
    reduced = sum(sizes[one] for run in found.values() for one in run)
    return sorted(found.items()) if reduced and reduced >= _MIN_SHARE * sum(sizes) else []


def _assign_by_size(
    elements: Mapping[int, int], left: Sequence[int], sizes: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return runs of neighbors with as many elements as the reductions, by the reduction's index.

    Loops go through parameters from the first to the last or back. What was reduced before the gradients, such as a
    metric, may have as many elements as one of them: the beginning is tried with each of the first reductions.
    """
    pairs = list(elements.items())
    everything = sum(sizes[one] for one in left)
    best: dict[int, tuple[int, ...]] = {}
    most = 0
    for begin in range(min(len(pairs), _MAX_BEGINNINGS)):
        for order in (left, left[::-1]):
            found = _tile(pairs[begin:], order, sizes)
            reduced = sum(sizes[one] for run in found.values() for one in run)
            if reduced > most:
                best, most = found, reduced
        if most == everything:
            return best
    may_be_padding = min(_MAX_PADDED_ELEMENTS, _MAX_PADDING * everything)
    padded = next((index for index, count in pairs if everything < count <= everything + may_be_padding), None)
    return best if padded is None else {padded: tuple(left)}


def _assign_by_memory(
    reductions: Sequence[UserReduction], memory: Sequence[Memory], left: dict[int, None]
) -> dict[int, tuple[int, ...]]:
    """Return the gradients that lie in the tensors of a reduction, and take them from those that are left."""
    found: dict[int, tuple[int, ...]] = {}
    of_begin = {where.begin: index for index, where in enumerate(memory) if where.end > where.begin}
    for index, reduction in enumerate(reductions):
        inside = tuple(
            one
            for tensor in reduction.memory
            for one in (
                [of_begin[tensor.begin]]
                if tensor.begin in of_begin and memory[of_begin[tensor.begin]] == tensor
                else [one for one in left if tensor.begin <= memory[one].begin and memory[one].end <= tensor.end]
            )
            if one in left and memory[one].end > memory[one].begin
        )
        if inside:
            found[index] = inside
            for one in inside:
                del left[one]
    return found


def _tile(
    elements: Sequence[tuple[int, int]], order: Sequence[int], sizes: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return one run after the other, in an order of the gradients; a reduction that does not fit is left out.

    Example: sizes 6, 2, 3, 1 and reductions of 5, 8 and 4 elements give none, (0, 1) and (2, 3).
    """
    found: dict[int, tuple[int, ...]] = {}
    begin = 0
    for index, count in elements:
        end, total = begin, 0
        while end < len(order) and total < count:
            total += sizes[order[end]]
            end += 1
        if total == count:
            found[index] = tuple(sorted(order[begin:end]))
            begin = end
    return found
