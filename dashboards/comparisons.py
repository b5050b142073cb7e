"""Comparisons for pages: made in the background, one after the other, so that no other page waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dashboards.plots.step_drawing import StepDrawing, draw_pairs
from dashboards.recording import Recording, Snapshot
from overlapscope.analysis.compare.comparison import Comparison, compare
from overlapscope.analysis.compare.side import Choice, Side, plans_to_compare
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.reader import NEIGHBOURS
from overlapscope.trace.table_file import as_range, with_neighbours

_PATIENCE_S: Final = 0.3
"""How long the page waits that asks first; after that the browser comes back."""
_MOST_KEPT: Final = 4


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One side of a comparison that a page asks for."""

    recording: str
    """What it is called."""
    path: Path
    choice: Choice


@dataclass(frozen=True, eq=False, kw_only=True)
class Compared:
    """What comparing two sides has come to."""

    plans: tuple[tuple[int, ...], tuple[int, ...]]
    """Epochs of the bucket plans of both recordings that can be compared."""
    middle: int | None
    """If both sides are the same steps, the one in the middle of the recording."""
    found: Comparison | None
    why_not: str
    """Why they can't be compared; empty if they can."""
    drawings: tuple[tuple[StepDrawing, ...], ...] = ()
    """Each of the steps that differ most, of both sides; nothing of one that can't be drawn."""


@dataclass(kw_only=True)
class _Asked:
    result: Future[Compared]
    state: tuple[str, ...]
    """Of the recordings when it was asked for."""
    is_shown: bool = False


class Comparisons:
    """Makes comparisons, and keeps the newest for when they are looked at again.

    Args:
        recording: gives the recording in a folder.
    """

    def __init__(self, recording: Callable[[Path], Recording]) -> None:
        self._recording = recording
        self._asked: dict[tuple[Wanted, Wanted], _Asked] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compare")

    def soon(self, base: Wanted, new: Wanted) -> Compared | None:
        """The comparison if it is ready, or nearly; None while it is being made.

        What was made is given out once also if a recording has grown meanwhile: it would never be ready otherwise.

        Raises:
            OverlapScopeError: a recording can't be read.
        """
        state = tuple(self._recording(side.path).state() for side in (base, new))
        asked = self._asked.pop((base, new), None)
        is_new = asked is None or (asked.is_shown and asked.state != state)
        if asked is None or is_new:
            asked = _Asked(result=self._thread.submit(self._compare, base, new), state=state)
        self._asked[base, new] = asked  # the last is the newest
        try:
            asked.result.exception(_PATIENCE_S if is_new else 0)
        except TimeoutError:
            return None
        asked.is_shown = True
        self._forget()
        return asked.result.result()

    def close(self) -> None:
        """Make no further ones than that in hand."""
        self._thread.shutdown(cancel_futures=True)

    def _forget(self) -> None:
        shown = [key for key, asked in self._asked.items() if asked.is_shown]
        for key in shown[:-_MOST_KEPT]:
            del self._asked[key]

    def _compare(self, base: Wanted, new: Wanted) -> Compared:
        before, after = self._snapshot(base), self._snapshot(new)
        plans = plans_to_compare(before.trace), plans_to_compare(after.trace)
        if (base.path, base.choice) == (new.path, new.choice):
            why_not = f"Both sides are the same steps of {base.recording}"
            return Compared(plans=plans, middle=_middle(before), found=None, why_not=why_not)
        try:
            found = compare(Side.of(before, base.choice, base.recording), Side.of(after, new.choice, new.recording))
        except OverlapScopeError as error:
            return Compared(plans=plans, middle=None, found=None, why_not=str(error))
        return Compared(plans=plans, middle=None, found=found, why_not="", drawings=tuple(draw_pairs(found)))

    def _snapshot(self, side: Wanted) -> Snapshot:
        """Of all steps, or, if there is no memory for these, of those that are compared, and what decides them."""
        recording, steps = self._recording(side.path), as_range(side.choice.first, side.choice.end)
        return recording.newest(which="all" if recording.fits else with_neighbours(steps, NEIGHBOURS))


def _middle(snapshot: Snapshot) -> int | None:
    steps = snapshot.trace.steps["step"]
    return int(steps.median()) if len(steps) else None
