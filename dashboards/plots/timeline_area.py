"""Area of the timeline: the time between two moments on some ranks, framed, and a table of what is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
from bokeh.models import ColumnDataSource

from dashboards.plots.browser_rpc import BrowserRpc, RequestColumns
from dashboards.plots.lane_layout import ShownLanes
from dashboards.plots.wide_figure import EDGES, Columns, make_empty_columns, update_source
from dashboards.theme import paint
from overlapscope.breakdown.area import tabulate_area
from overlapscope.breakdown.breakdown import Breakdown
from overlapscope.text import format_ranks, parse_ranks
from overlapscope.trace.recording import Trace

AREA_COLUMNS: Final = ("id", "from_ns", "to_ns", "ranks", "note")
"""Columns of the response on an area, which has no length if there is none; ``ranks`` as in the address."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Area:
    """An area of the timeline. Times are nanoseconds from the beginning of the timeline."""

    from_ns: int
    to_ns: int
    ranks: tuple[int, ...]
    """Ranks in it that are shown, from top to bottom."""
    asked: str
    """Ranks in it, also those that are not shown, as text; empty for all that are shown."""


class TimelineArea:
    """The area that was dragged over, and the sources that show it.

    Args:
        rpc: messages of the timeline.
        trace: the recording.
        breakdown: its step-time breakdown.
        shown: the lanes.
    """

    def __init__(self, rpc: BrowserRpc, trace: Trace, breakdown: Breakdown, shown: ShownLanes) -> None:
        """Create the sources without an area."""
        self._trace, self._breakdown, self._shown = trace, breakdown, shown
        self.area: Area | None = None
        self._responses = 0
        self.frames = ColumnDataSource(name="frames", data=make_empty_columns(*EDGES))
        self.asked = rpc.request("asked_area", ("id", "from_ns", "to_ns", "ranks"), self._on_asked)
        """Request for an area; without rows it is removed."""
        self.response = rpc.response("area", AREA_COLUMNS)

    def draw(self, plot: Any) -> None:
        """Add the frames to the figure of the lanes."""
        frames = plot.quad(**EDGES, source=self.frames, fill_alpha=0.1, line_width=1.5, level="overlay")
        paint(frames.glyph, fill_color="accent", line_color="accent")

    def select(self, from_ns: int, to_ns: int, asked: str) -> None:
        """Select an area, as far as something was recorded in it and its ranks are shown.

        Args:
            from_ns: its start.
            to_ns: its end.
            asked: its ranks, such as ``0-7, 12``; empty for all.
        """
        timeline = self._shown.timeline
        from_ns, to_ns = (min(max(0, edge), timeline.length_ns) for edge in (from_ns, to_ns))
        wanted = frozenset(parse_ranks(asked, timeline.ranks)[0] if asked else timeline.ranks)
        ranks = tuple(rank for rank in timeline.ranks if rank in wanted)
        if from_ns >= to_ns or not ranks:
            self.clear()
            self._respond(0, 0, "", "" if ranks else "No rank of the area is among those shown.")
            return
        in_job = parse_ranks(asked, self._trace.ranks["rank"].tolist())[0]
        asked = format_ranks(sorted(in_job)).replace(" ", "")
        self.area = Area(from_ns=from_ns, to_ns=to_ns, ranks=ranks, asked=asked)
        self.frames.data = build_frame_columns(self.area, self._shown)
        self._respond(from_ns, to_ns, asked)

    def _respond(self, from_ns: int, to_ns: int, ranks: str, note: str = "") -> None:
        self._responses += 1
        values = (self._responses, from_ns, to_ns, ranks, note)
        self.response.data = {name: [value] for name, value in zip(AREA_COLUMNS, values, strict=True)}

    def tabulate(self) -> pd.DataFrame:
        """Return what each rank does in the area, from ``tabulate_area``."""
        assert self.area is not None
        begin_ns = self._shown.timeline.begin_ns
        edges_ns = self.area.from_ns + begin_ns, self.area.to_ns + begin_ns
        return tabulate_area(self._trace, self._breakdown, *edges_ns, self.area.ranks)

    def renew(self) -> None:
        """Select the same area again, among other ranks or in another layout."""
        if self.area is not None:
            self.select(self.area.from_ns, self.area.to_ns, self.area.asked)

    def clear(self) -> None:
        """Remove the area."""
        self.area = None
        update_source(self.frames, make_empty_columns(*EDGES))

    def _on_asked(self, asked: RequestColumns) -> None:
        if not len(asked["id"]):
            self.clear()
            return
        from_ns, to_ns = sorted(int(asked[name][0]) for name in ("from_ns", "to_ns"))
        self.select(from_ns, to_ns, str(asked["ranks"][0]))


def build_frame_columns(area: Area, shown: ShownLanes) -> Columns:
    """Return a rectangle around each group of ranks that are below each other: of ranks 0, 1 and 3 two."""
    columns = make_empty_columns(*EDGES)
    in_area = frozenset(area.ranks)
    for position, rank in enumerate(shown.timeline.ranks):
        if rank not in in_area:
            continue
        top, bottom = shown.layout.rank_px(position)
        if columns["bottom"] and columns["bottom"][-1] == top:
            columns["bottom"][-1] = bottom
            continue
        for name, value in (("left", area.from_ns), ("right", area.to_ns), ("top", top), ("bottom", bottom)):
            columns[name].append(value)
    return columns


def parse_area(text: str) -> tuple[int, int] | None:
    """Parse start and end of an area as the address has them, ``20000000-30000000``; None if it is neither."""
    found = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", text)
    return None if found is None else (int(found[1]), int(found[2]))
