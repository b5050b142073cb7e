"""Which gradients the user's own collectives have reduced, as in a loop that averages gradients without DDP.

A gradient that was given to a collective is known by its memory. A copy of several, made flat and written back, is
known by its size, which is that of a run of parameters, and by values that are in proportion to those of their
gradients. Where values are on a device nobody reads them, and the size of several gradients has to do.

A loop does the same in each step, so gradients are only looked at if a step has launched something else than the step
before.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Final, NamedTuple

import torch

from instrumented_ddp.collectives.gradient_memory import Memory, find_in_memory, memory_of
from overlapscope.trace.schema import NO_CALL_SITE

_MAX_LAUNCHES: Final = 4096
"""Maximum number of tensors between two updates; what was reduced is unknown if there are more."""
_LOOKS_AT_A_SIZE: Final = 16
_MAX_LOOKS: Final = 64
"""Number of times that what is reduced in one line, of one size, and in all is compared with gradients."""
_SAMPLES: Final = 5
"""Number of values of a copy that are compared with those of the gradients."""
_RELATIVE_ERROR: Final = 0.02
"""Maximum error of a proportion: copies may be of a lower precision."""


class _Launch(NamedTuple):
    """What a loop does again in each step."""

    call_site: int
    elements: int
    ranks: tuple[int, ...]


class UserReductions:
    """All that the user's own collectives reduce, in order; each reader looks at what came since its latest update."""

    def __init__(self) -> None:
        self._launches: list[_Launch] = []
        self._memory: list[Memory] = []
        self._dropped = 0
        """Number of launches that were dropped from the beginning of these lists."""
        self._readers: weakref.WeakSet[GradientReader] = weakref.WeakSet()
        self.gradients_of: dict[_Launch, int] = {}
        """Reader, by its identity, some of whose gradients each of these launches reduces."""

    def on_reduction(self, tensors: Sequence[torch.Tensor], call_site: int, ranks: tuple[int, ...]) -> None:
        """Note that the user is about to reduce tensors.

        Args:
            tensors: what is reduced.
            call_site: number of the line.
            ranks: members of the group.
        """
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                continue
            launch = _Launch(call_site, tensor.numel(), ranks)
            self._launches.append(launch)
            self._memory.append(memory_of(tensor))
            for reader in list(self._readers):
                reader.look_at(launch, tensor)
        if len(self._launches) > _MAX_LAUNCHES:
            dropped = len(self._launches) - _MAX_LAUNCHES // 2
            del self._launches[:dropped], self._memory[:dropped]
            self._dropped += dropped

    @property
    def begin(self) -> int:
        """Return the number of the first launch that is still known."""
        return self._dropped

    @property
    def end(self) -> int:
        """Return the number of launches so far."""
        return self._dropped + len(self._launches)

    def add_reader(self, reader: GradientReader) -> None:
        """Show a reader all tensors from now on."""
        self._readers.add(reader)

    def since(self, number: int) -> tuple[list[_Launch], list[Memory]] | None:
        """Return what was launched from a number on; None if that is no longer known."""
        first = number - self._dropped
        return None if first < 0 else (self._launches[first:], self._memory[first:])


class GradientReader:
    """Reader of the reductions of some parameters' gradients.

    Args:
        reductions: what the user reduces.
        parameters: the parameters. They are not kept alive.
        within: only groups of these ranks count; None for any.
    """

    def __init__(
        self,
        reductions: UserReductions,
        parameters: Sequence[torch.nn.Parameter],
        within: frozenset[int] | None = None,
    ) -> None:
        self._reductions = reductions
        self._within = within
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._starts = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self._index_of_start = {start: index for index, start in reversed([*enumerate(self._starts)])}
        self._looks: dict[_Launch, int] = {}
        self._runs: dict[_Launch, list[range]] = {}
        """Parameters whose gradients are copied into what is reduced."""
        self._next = reductions.end
        self._usual: list[_Launch] | None = None
        self._usual_covered: frozenset[int] = frozenset()
        self._known_launches = 0
        """Number of launches that were known to be of gradients, when what is usual was found out."""
        self.unknown_elements = 0
        """Elements that were reduced before the latest update, and are of no gradient as far as is known."""
        self.call_site = NO_CALL_SITE
        """Line that reduced the first of these gradients."""
        reductions.add_reader(self)

    def begin_at(self, number: int) -> None:
        """Read what was launched from a number on."""
        self._next = number

    @property
    def has_news(self) -> bool:
        """Return whether anything was reduced since the latest update."""
        return self._reductions.end > self._next

    def elements_of(self, indices: Iterable[int]) -> int:
        """Return the number of elements of some of the parameters."""
        return sum(self._starts[index + 1] - self._starts[index] for index in indices)

    def take(self) -> frozenset[int] | None:
        """Return the indices of the parameters whose gradients were reduced since the latest call; None if unknown."""
        found = self._reductions.since(self._next)
        self._next = self._reductions.end
        if found is None:
            self._usual = None
            return None
        launches, memory = found
        if launches != self._usual or len(self._reductions.gradients_of) != self._known_launches:
            self._usual_covered = self._find_covered(launches, memory)
            self._usual, self._known_launches = launches, len(self._reductions.gradients_of)
        return self._usual_covered

    def is_reduced_by(self, ranks: int) -> bool:
        """Return whether a group of this many ranks reduces gradients, or none is known to."""
        groups = {len(one.ranks) for one, reader in self._reductions.gradients_of.items() if reader == id(self)}
        return not groups or ranks in groups

    def list_with_gradient(self) -> list[int]:
        """Return the indices of the parameters that have a gradient."""
        return [index for index in range(len(self._parameters)) if self._gradient(index) is not None]

    def _gradient(self, index: int) -> torch.Tensor | None:
        parameter = self._parameters[index]()
        return None if parameter is None else parameter.grad

    def _find_covered(self, launches: Sequence[_Launch], memory: Sequence[Memory]) -> frozenset[int]:
        counted = [n for n, one in enumerate(launches) if self._within is None or self._within.issuperset(one.ranks)]
        gradients = map(self._gradient, range(len(self._parameters)))
        found = find_in_memory(((number, memory[number]) for number in counted), gradients)
        covered, of_gradients = set(found), set(chain.from_iterable(found.values()))
        copies = Counter(launches[number] for number in counted if number not in of_gradients)
        for launch, times in copies.items():
            covered.update(chain.from_iterable(self._runs.get(launch, [])[:times]))
        of_gradients.update(number for number in counted if launches[number] in self._runs)
        self._note_unknown([launches[number] for number in counted if number not in of_gradients])
        for number in sorted(of_gradients):
            self._reductions.gradients_of.setdefault(launches[number], id(self))
        self.call_site = launches[min(of_gradients)].call_site if of_gradients else NO_CALL_SITE
        return frozenset(covered)

    def _note_unknown(self, launches: Sequence[_Launch]) -> None:
        """Count what was reduced and is of no gradient that is known, also not of another reader's."""
        known = self._reductions.gradients_of
        self.unknown_elements = sum(one.elements for one in launches if known.get(one, id(self)) == id(self))

    def look_at(self, launch: _Launch, tensor: torch.Tensor) -> None:
        """Find out of which gradients a tensor is a copy, the first few times that one of its size is reduced there."""
        looks = self._looks.get(launch, 0)
        if looks >= _LOOKS_AT_A_SIZE or not launch.elements or sum(self._looks.values()) >= _MAX_LOOKS:
            return
        self._looks[launch] = looks + 1
        storage = tensor.untyped_storage()._cdata
        candidates = []
        for start, first in self._index_of_start.items():
            last = self._index_of_start.get(start + launch.elements, first)
            gradients = [one for index in range(first, last) if (one := self._gradient(index)) is not None]
            if any(one.untyped_storage()._cdata == storage for one in gradients[:1]):
                return  # no copy: it is known by its memory
            if 0 < len(gradients) == last - first:
                candidates.append((range(first, last), gradients))
        known = self._runs.get(launch, [])
        for run, gradients in candidates:
            if run not in known and _is_copy(tensor, gradients):
                self._runs[launch] = [*known, run]
                self._usual = None
                return


def _is_copy(tensor: torch.Tensor, gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether a tensor can be a copy of gradients, perhaps divided by the number of ranks, one after another."""
    if not tensor.is_contiguous() or tensor.is_complex() or not tensor.is_floating_point():
        return False
    if tensor.device.type != "cpu":  # a value would have to be waited for; an activation may be of a weight's size
        return len(gradients) > 1
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        ends = [*accumulate(gradient.numel() for gradient in gradients)]
        factors = []
        for sample in range(_SAMPLES):
            at = sample * (flat.numel() - 1) // (_SAMPLES - 1)
            index = next(index for index, end in enumerate(ends) if at < end)
            value = gradients[index].detach().reshape(-1)[at - ends[index]].item()
            factors.append((flat[at].item(), value))
    return _are_in_proportion(factors)


def _are_in_proportion(pairs: Sequence[tuple[float, float]]) -> bool:
    """Return whether the first numbers are all the same multiple of the second ones."""
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return False
    largest, of = max(pairs, key=lambda pair: abs(pair[1]))
    if not of:
        return all(not a for a, _ in pairs)
    factor = largest / of
    if not 0 < factor <= 1 + _RELATIVE_ERROR:
        return False
    return all(abs(a - factor * b) <= _RELATIVE_ERROR * abs(largest) for a, b in pairs)
