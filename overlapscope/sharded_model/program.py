"""What a rank does in one step with given settings: the order of computing, gathering, waiting and reducing.

This is torch's own order, in ``FSDPState`` and ``FSDPParamGroup``. Before the forward of a unit its parameters are
gathered and waited for, and then the units that it prefetches are gathered; before its backward likewise, where the
default is to prefetch the unit whose forward ended just before. What is gathered already is not gathered again. After
its backward its gradients are reduced.

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

    Segment 0 is before the first inner part in forward, and after the last one in backward; segment 1 + i is that of
    the i-th inner part; the last is the root's before the first inner part in *backward*. (In forward, what the root
    does after the last part counts as that part's.)
    """
    return len(model.inner) + 2


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

    def walk(self) -> Iterator[Op]:
        yield from self._forward()
        yield from self._backward()

    def _forward(self) -> Iterator[Op]:
        settings = self.settings
        yield from self._need(ROOT, "forward", settings.root_forward_prefetch)
        yield Op("compute", self.root, "forward", 0)
        if not settings.units:
            yield from self._compute(self.root, "forward")
        for number, unit in enumerate(settings.units):
            yield from self._need(number, "forward", settings.forward_prefetch[number])
            yield from self._compute(unit, "forward")
            if settings.reshards[number]:
                yield from self._free(number, "forward")
        if settings.root_reshards:
            yield from self._free(ROOT, "forward")

    def _backward(self) -> Iterator[Op]:
        model, settings = self.model, self.settings
        last = len(settings.units) - 1
        prefetched = settings.root_backward_prefetch
        if prefetched is None:
            prefetched = (last,) if self.root and last >= 0 else ()
        yield from self._need(ROOT, "backward", prefetched)
        yield Op("compute", self.root, "backward", segment_count(model) - 1)
        if not settings.units:
            yield from self._compute(self.root, "backward")
        late = []
        for number in range(last, -1, -1):
            unit, prefetched = settings.units[number], settings.backward_prefetch[number]
            if prefetched is None:
                prefetched = (number - 1,) if number else ()
            yield from self._need(number, "backward", prefetched)
            yield from self._compute(unit, "backward")
            if any(model.parts[part].is_late for part in unit):
                late.append(number)
                continue
            yield Op("reduce", unit, "backward")
            yield from self._free(number, "backward")
        yield Op("compute", self.root, "backward", 0)
        if self.root:
            yield Op("reduce", self.root, "backward")
        for number in late[::-1]:
            yield Op("reduce", settings.units[number], "backward")
            yield from self._free(number, "backward")
        yield Op("finish", (), "backward")

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
        first = int(self.model.has_root)
        inner = [part for part in unit if part >= first]
        for part in inner if during == "forward" else inner[::-1]:
            yield Op("compute", (part,), during, 1 + part - first)

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
