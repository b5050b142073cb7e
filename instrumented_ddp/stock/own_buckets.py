"""Which gradients a collective of the user's own reduces: found by memory, or by size.

Pure functions of what was seen between two updates. For example, of parameters with 6, 2, 3 and 1 elements a loop
reduces the gradients in tensors of 4 and 8 elements: the first is the run of the last two, the other the rest.

A plan has to be complete after one update, on devices too, and its worst error is a wrong name of a bucket: here sizes
do. Where it is judged whether an update uses averages, values are compared too (``collectives.user_reductions``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from instrumented_ddp.bucket_plan import Traffic
from instrumented_ddp.collectives.dispatch import Call
from instrumented_ddp.collectives.gradient_memory import Memory, find_in_memory, memory_of

REDUCTIONS: Final = ("all_reduce", "reduce", "reduce_scatter")
"""Operations that can average gradients."""
_MIN_SHARE: Final = 0.5
"""Share of the gradients' elements that have to be found for a loop to be one that reduces by hand."""
_MAX_PADDING: Final = 0.05
"""Share of a flat tensor that may be something else than gradients: padding, a loss, a flag."""
_MAX_PADDED_ELEMENTS: Final = 4096
_MAX_BEGINNINGS: Final = 32
"""Number of reductions that are tried as the first one of the gradients."""


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
    memory = ((index, where) for index, one in enumerate(reductions) for where in one.memory)
    in_place = find_in_memory(memory, gradients)
    found: dict[int, tuple[int, ...]] = {}
    for gradient, (first, *_) in in_place.items():
        found[first] = (*found.get(first, ()), gradient)
    left = [gradient for gradient in range(len(sizes)) if gradient not in in_place]
    if left:
        rest = {index: one.traffic.elements for index, one in enumerate(reductions) if index not in found}
        found |= _assign_by_size(rest, left, sizes)
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
        if total == count and end > begin:
            found[index] = tuple(sorted(order[begin:end]))
            begin = end
    return found
