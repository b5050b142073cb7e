"""What a rank does in one step with given settings: the order of computing, gathering, waiting and reducing.

This is torch's own order, in ``FSDPState`` and ``FSDPParamGroup``. Before the forward of a unit its parameters are
gathered and waited for, and then the units that it prefetches are gathered; before its backward likewise, where the
default is to prefetch the unit whose forward ended just before. What is gathered already is not gathered again. After
its backward its gradients are reduced. The backward of a unit begins before that of the units within it and ends after.

Example: a root and two units that are freed after their forward, with torch's defaults::

    gather root, wait, compute; gather 1, wait, compute, free 1; gather 2, wait, compute, free 2
    gather 2 (prefetched by the root), compute; wait 2, gather 1, compute, reduce 2; wait 1, compute, reduce 1
    compute, reduce root
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

from overlapscope.sharded_model.model import Settings, ShardedModel, Unit

ROOT: Final = -1
"""Number that stands for the root's unit."""

Pass = Literal["forward", "backward"]
PASSES: Final[tuple[Pass, Pass]] = ("forward", "backward")


class Op(NamedTuple):
    """One thing that a rank does."""

    kind: Literal["compute", "gather", "wait", "free", "reduce", "finish"]
    """``finish``: wait for all gradients."""
    unit: Unit
    """Parts that it is about."""
    during: Pass
    segment: int = 0
    """Number of the segment that is computed, see ``segment_count``."""


def segment_count(model: ShardedModel) -> int:
    """Return the number of segments that the compute of one pass is divided into.

    Segment 0 is the root's before the first inner part in forward, and after the last one in backward; segment 1 + i is
    that of the i-th of I inner parts; segment I + 1 is the root's before the first inner part in backward, and segment
    I + 2 + i that of the i-th part before the first part within it, in backward. What a part does in forward after a
    part within it counts as that part's.
    """
    return 2 * len(model.inner) + 2


def build_program(model: ShardedModel, settings: Settings) -> tuple[Op, ...]:
    """Return what a rank does in a step, in order."""
    return tuple(_Walk(model, settings).walk())


class _Walk:
    def __init__(self, model: ShardedModel, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.gathered: set[int] = set()
        """Units whose parameters are there, or on their way."""
        self.awaited: set[int] = set()
        """Units that are on their way."""
        root: Unit = (0,) if model.has_root else ()
        self.root: Unit = root if settings.units else (*root, *model.inner)
        self.ended: list[int] = []
        """Units in the order in which their forward has ended."""
        self.late: list[int] = []
        """Units that are reduced when the backward is over."""
        unit_of = {part: number for number, unit in enumerate(settings.units) for part in unit}
        self.children: dict[int, list[int]] = {number: [] for number in (ROOT, *range(len(settings.units)))}
        """Units directly within each unit."""
        for number, unit in enumerate(settings.units):
            part = self._parent(unit[0])
            parent = ROOT if part is None else unit_of.get(part, ROOT)
            self.children[ROOT if parent == number else parent].append(number)

    def walk(self) -> Iterator[Op]:
        yield from self._forward(ROOT)
        yield from self._backward(ROOT)
        for number in self.late[::-1]:
            yield Op("reduce", self._unit(number), "backward")
            yield from self._free(number, "backward")
        yield Op("finish", (), "backward")

    def _forward(self, number: int) -> Iterator[Op]:
        settings, is_root = self.settings, number == ROOT
        prefetched = settings.root_forward_prefetch if is_root else settings.forward_prefetch[number]
        yield from self._need(number, "forward", prefetched)
        if is_root:
            yield Op("compute", self.root, "forward", 0)
        yield from self._compute(self._unit(number), "forward")
        for child in self.children[number]:
            yield from self._forward(child)
        if settings.root_reshards if is_root else settings.reshards[number]:
            yield from self._free(number, "forward")
        if self._unit(number):
            self.ended.append(number)

    def _backward(self, number: int) -> Iterator[Op]:
        settings, is_root, unit = self.settings, number == ROOT, self._unit(number)
        prefetched = settings.root_backward_prefetch if is_root else settings.backward_prefetch[number]
        if prefetched is None:
            position = self.ended.index(number) if number in self.ended else 0
            prefetched = tuple(self.ended[max(0, position - 1) : position])
        yield from self._need(number, "backward", prefetched)
        inner = len(self.model.inner)
        if is_root:
            yield Op("compute", self.root, "backward", inner + 1)
        elif self.children[number]:
            yield Op("compute", unit, "backward", inner + 2 + self._inner_number(unit[0]))
        for child in self.children[number][::-1]:
            yield from self._backward(child)
        yield from self._compute(unit, "backward")
        if is_root:
            yield Op("compute", self.root, "backward", 0)
        if any(self.model.parts[part].is_late for part in unit) and not is_root:
            self.late.append(number)
        elif unit:
            yield Op("reduce", unit, "backward")
            yield from self._free(number, "backward")

    def _need(self, number: int, during: Pass, prefetched: Iterable[int]) -> Iterator[Op]:
        yield from self._gather(number, during)
        if number in self.awaited:
            self.awaited.remove(number)
            yield Op("wait", self._unit(number), during)
        for other in prefetched:
            yield from self._gather(other, during)

    def _gather(self, number: int, during: Pass) -> Iterator[Op]:
        unit = self._unit(number)
        if number not in self.gathered and self.model.gather_bytes(unit):
            self.gathered.add(number)
            self.awaited.add(number)
            yield Op("gather", unit, during)

    def _free(self, number: int, during: Pass) -> Iterator[Op]:
        if number in self.gathered:
            self.gathered.remove(number)
            yield Op("free", self._unit(number), during)

    def _compute(self, unit: Unit, during: Pass) -> Iterator[Op]:
        """Yield the compute of a unit's inner parts, in backward also that before parts within them."""
        inner = [part for part in unit if part >= int(self.model.has_root)]
        for part in inner if during == "forward" else inner[::-1]:
            yield Op("compute", (part,), during, 1 + self._inner_number(part))
            if during == "backward" and any(self._parent(other) == part for other in inner):
                yield Op("compute", (part,), during, len(self.model.inner) + 2 + self._inner_number(part))

    def _parent(self, part: int) -> int | None:
        return self.model.parts[part].parent

    def _inner_number(self, part: int) -> int:
        return part - int(self.model.has_root)

    def _unit(self, number: int) -> Unit:
        return self.root if number == ROOT else self.settings.units[number]


def find_peak_bytes(model: ShardedModel, program: Iterable[Op]) -> int:
    """Return how many bytes of gathered parameters a rank holds at most, in the precision that is sent."""
    held = peak = 0
    for op in program:
        if op.kind == "gather":
            held += model.gather_bytes(op.unit)
            peak = max(peak, held)
        elif op.kind == "free":
            held -= model.gather_bytes(op.unit)
    return peak
