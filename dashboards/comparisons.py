"""Comparisons for pages: computed in the background, one after the other, so that no other page waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from dashboards.plots.step_drawing import StepDrawing, draw_pairs
from dashboards.recording import RecordingCache, Snapshot
from overlapscope.compare.comparison import Comparison, compare
from overlapscope.compare.side import STEP, ComparisonSide, StepChoice, plans_to_compare
from overlapscope.compare.text import describe_outcomes
from overlapscope.errors import OverlapScopeError
from overlapscope.text import capitalize
from overlapscope.trace.recording import NEIGHBOR_STEPS
from overlapscope.trace.table_file import step_range_of_slice, with_neighbors

_FIRST_WAIT_S: Final = 0.3
"""Seconds for which the first request of a comparison waits for it; after that, the browser polls."""
_MAX_CACHED: Final = 4
_MAX_OUTLINES: Final = 100
JUDGED_PARTS: Final = (STEP,)
"""Quantities that pages judge."""
FAIL_ABOVE: Final = 0.0
"""Default threshold, the same as that of the command."""
T = TypeVar("T")


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


@dataclass(frozen=True, kw_only=True)
class ComparisonOutline:
    """A comparison in a sentence, as a table of several shows it."""

    headline: str
    """Outcome of the comparison, or why the two can't be compared."""
    is_slower: bool = False


@dataclass(kw_only=True)
class _Request(Generic[T]):
    result: Future[T]
    state: tuple[str, ...]
    """State of both recordings when the comparison was requested."""
    is_shown: bool = False
    """True if a page has shown the result."""
    before: T | None = None
    """Result for an earlier state of the recordings."""

    @property
    def latest(self) -> T | None:
        """Return the latest result so far."""
        return self.result.result() if self.result.done() else self.before


_Requests = dict[tuple[SideRequest, SideRequest], _Request[T]]


class ComparisonCache:
    """Background computation of comparisons, with a cache of the latest.

    Args:
        recording: function that returns the recording in a folder.
    """

    def __init__(self, recording: Callable[[Path], RecordingCache]) -> None:
        self._recording = recording
        self._requests: _Requests[ComparisonResult] = {}
        self._outlines: _Requests[ComparisonOutline] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compare")

    def soon(self, base: SideRequest, new: SideRequest) -> ComparisonResult | None:
        """Return the comparison if it is ready within a short wait; None while it is being computed.

        A result is returned once even if a recording has grown meanwhile: for a live one, none would ever be current.

        Raises:
            OverlapScopeError: a recording can't be read.
        """
        request, is_new = self._request(self._requests, self._compare, base, new)
        try:
            request.result.exception(_FIRST_WAIT_S if is_new else 0)
        except TimeoutError:
            return None
        request.is_shown = True
        _evict(self._requests, _MAX_CACHED)
        return request.result.result()

    def outline(self, base: SideRequest, new: SideRequest) -> ComparisonOutline | None:
        """Return the comparison in a sentence, without waiting; None while the first is being computed.

        Raises:
            OverlapScopeError: a recording can't be read.
        """
        request, _ = self._request(self._outlines, self._outline, base, new)
        request.is_shown |= request.result.done()
        _evict(self._outlines, _MAX_OUTLINES)
        return request.latest

    def _request(
        self,
        requests: _Requests[T],
        compute: Callable[[SideRequest, SideRequest], T],
        base: SideRequest,
        new: SideRequest,
    ) -> tuple[_Request[T], bool]:
        """Return the request for two sides, and whether it is new: none was made yet, or for an earlier state."""
        state = tuple(self._recording(side.path).state() for side in (base, new))
        known = requests.pop((base, new), None)
        is_new = known is None or (known.is_shown and known.state != state)
        if known is None or is_new:
            before = None if known is None else known.latest
            known = _Request(result=self._thread.submit(compute, base, new), state=state, before=before)
        requests[base, new] = known  # the last one is the latest request
        return known, is_new

    def close(self) -> None:
        """Cancel the comparisons that have not begun."""
        self._thread.shutdown(cancel_futures=True)

    def _outline(self, base: SideRequest, new: SideRequest) -> ComparisonOutline:
        result = self._compare(base, new)
        if result.found is None:
            return ComparisonOutline(headline=f"{capitalize(result.why_not)}.")
        return ComparisonOutline(
            headline=" ".join(describe_outcomes(result.found, JUDGED_PARTS, FAIL_ABOVE)),
            is_slower=any(result.found.outcome(part, FAIL_ABOVE) == "slower" for part in JUDGED_PARTS),
        )

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


def _evict(requests: _Requests[T], most: int) -> None:
    shown = [key for key, request in requests.items() if request.is_shown]
    for key in shown[:-most]:
        del requests[key]


def _middle(snapshot: Snapshot) -> int | None:
    steps = snapshot.trace.steps["step"]
    return int(steps.median()) if len(steps) else None
