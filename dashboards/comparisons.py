"""Comparisons for pages: computed in the background, one after the other, so that no other page waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dashboards.plots.step_drawing import StepDrawing, draw_pairs
from dashboards.recording import RecordingCache, Snapshot
from overlapscope.compare.comparison import Comparison, compare
from overlapscope.compare.side import ComparisonSide, StepChoice, plans_to_compare
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import NEIGHBOR_STEPS
from overlapscope.trace.table_file import step_range_of_slice, with_neighbors

_FIRST_WAIT_S: Final = 0.3
"""Seconds for which the first request of a comparison waits for it; after that, the browser polls."""
_MAX_CACHED: Final = 4


@dataclass(frozen=True, kw_only=True)
class SideRequest:
    """One side of a comparison that a page requests."""

    recording: str
    """Display name of the recording."""
    path: Path
    choice: StepChoice


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparisonResult:
    """Result of comparing two sides."""

    plans: tuple[tuple[int, ...], tuple[int, ...]]
    """Epochs of the bucket plans that can be compared, for both recordings."""
    middle: int | None
    """Median step of the recording, if both sides are the same steps."""
    found: Comparison | None
    """The comparison; None if the sides can't be compared."""
    why_not: str
    """Why the sides can't be compared; empty if they can."""
    drawings: tuple[tuple[StepDrawing, ...], ...] = ()
    """Drawings of both sides for each of the steps that differ most; empty for a step that can't be drawn."""


@dataclass(kw_only=True)
class _Request:
    result: Future[ComparisonResult]
    state: tuple[str, ...]
    """State of both recordings when the comparison was requested."""
    is_shown: bool = False
    """True if a page has shown the result."""


class ComparisonCache:
    """Background computation of comparisons, with a cache of the latest.

    Args:
        recording: function that returns the recording in a folder.
    """

    def __init__(self, recording: Callable[[Path], RecordingCache]) -> None:
        self._recording = recording
        self._requests: dict[tuple[SideRequest, SideRequest], _Request] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compare")

    def soon(self, base: SideRequest, new: SideRequest) -> ComparisonResult | None:
        """Return the comparison if it is ready within a short wait; None while it is being computed.

        A result is returned once even if a recording has grown meanwhile: for a live one, none would ever be current.

        Raises:
            OverlapScopeError: a recording can't be read.
        """
        state = tuple(self._recording(side.path).state() for side in (base, new))
        request = self._requests.pop((base, new), None)
        is_new = request is None or (request.is_shown and request.state != state)
        if request is None or is_new:
            request = _Request(result=self._thread.submit(self._compare, base, new), state=state)
        self._requests[base, new] = request  # the last one is the latest request
        try:
            request.result.exception(_FIRST_WAIT_S if is_new else 0)
        except TimeoutError:
            return None
        request.is_shown = True
        self._evict()
        return request.result.result()

    def close(self) -> None:
        """Cancel the comparisons that have not begun."""
        self._thread.shutdown(cancel_futures=True)

    def _evict(self) -> None:
        shown = [key for key, request in self._requests.items() if request.is_shown]
        for key in shown[:-_MAX_CACHED]:
            del self._requests[key]

    def _compare(self, base: SideRequest, new: SideRequest) -> ComparisonResult:
        before, after = self._snapshot(base), self._snapshot(new)
        plans = plans_to_compare(before.trace), plans_to_compare(after.trace)
        if (base.path, base.choice) == (new.path, new.choice):
            why_not = f"Both sides are the same steps of {base.recording}"
            return ComparisonResult(plans=plans, middle=_middle(before), found=None, why_not=why_not)
        try:
            found = compare(
                ComparisonSide.of(before, base.choice, base.recording),
                ComparisonSide.of(after, new.choice, new.recording),
            )
        except OverlapScopeError as error:
            return ComparisonResult(plans=plans, middle=None, found=None, why_not=str(error))
        return ComparisonResult(plans=plans, middle=None, found=found, why_not="", drawings=tuple(draw_pairs(found)))

    def _snapshot(self, side: SideRequest) -> Snapshot:
        """Return a snapshot of all steps, or of the compared ones and their neighbors if all don't fit into memory."""
        recording, steps = self._recording(side.path), step_range_of_slice(side.choice.first, side.choice.end)
        return recording.latest(which="all" if recording.fits else with_neighbors(steps, NEIGHBOR_STEPS))


def _middle(snapshot: Snapshot) -> int | None:
    steps = snapshot.trace.steps["step"]
    return int(steps.median()) if len(steps) else None
