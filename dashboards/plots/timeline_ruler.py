"""Ruler on the timeline: the duration between two times, and how much of it is exposed communication."""

from __future__ import annotations

from typing import Any, Final

from dashboards.plots.dialogue import BrowserRpc, RequestColumns
from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.timeline_content import make_empty_columns
from dashboards.plots.wide_figure import SMALL_TEXT, update_source
from dashboards.theme import paint
from overlapscope.account.blocks import BLOCKS, Breakdown
from overlapscope.analysis.lanes import Timeline
from overlapscope.units import format_ns

RULER_COLUMNS: Final = ("id", "left", "right", "top", "bottom", "x", "y", "label", "text")
_LABELLED_PX: Final = 90
"""Minimum height of a rank's lanes for the full text."""


class TimelineRuler:
    """Two times on the lanes of a rank, and the breakdown between them.

    Args:
        dialogue: messages of the timeline.
        account: step-time breakdown of the recording.
        timeline: lanes of the ranks shown.
        layout: layout of the lanes.
    """

    def __init__(self, rpc: BrowserRpc, account: Breakdown, timeline: Timeline, layout: LaneLayout) -> None:
        """Create the messages of the ruler."""
        self._account, self._timeline, self._layout = account, timeline, layout
        self.asked = rpc.request("measured", ("id", "from_ns", "to_ns", "rank"), self._on_asked)
        """Request to measure; ``rank`` is an index from the top."""
        self.ruler = rpc.response("ruler", RULER_COLUMNS)

    def draw(self, plot: Any) -> None:
        """Add the ruler to the figure of the lanes."""
        edges = {"left": "left", "right": "right", "top": "top", "bottom": "bottom", "source": self.ruler}
        area = plot.quad(**edges, fill_alpha=0.12, line_width=1.5, level="overlay")
        paint(area.glyph, fill_color="ink", line_color="ink")
        text = plot.text(
            x="x", y="y", text="label", text_align="center", source=self.ruler, level="overlay", **SMALL_TEXT
        )
        text.glyph.update(background_fill_alpha=0.92, padding=4)
        paint(text.glyph, text_color="ink", background_fill_color="surface")

    def _on_asked(self, asked: RequestColumns) -> None:
        if not len(asked["id"]):
            update_source(self.ruler, make_empty_columns(*RULER_COLUMNS))
            return
        from_ns, to_ns = sorted(int(asked[name][0]) for name in ("from_ns", "to_ns"))
        index = min(max(0, int(asked["rank"][0])), len(self._timeline.ranks) - 1)
        top = index * self._layout.rank_height_px
        text = self._text(from_ns, to_ns, self._timeline.ranks[index])
        self.ruler.data = {
            "id": asked["id"],
            "left": [from_ns],
            "right": [to_ns],
            "top": [top],
            "bottom": [top + self._layout.rank_height_px],
            "x": [(from_ns + to_ns) / 2],
            "y": [top + self._layout.rank_height_px / 2],
            "label": [text if self._layout.rank_height_px >= _LABELLED_PX else format_ns(to_ns - from_ns)],
            "text": [text],
        }

    def _text(self, from_ns: int, to_ns: int, rank: int) -> str:
        begin_ns = self._timeline.begin_ns
        (ns,) = self._account.timelines[rank].within([from_ns + begin_ns], [to_ns + begin_ns])
        exposed_ns, unknown_ns = (int(ns[BLOCKS.index(name)]) for name in ("exposed", "unknown"))
        exposed = format_ns(exposed_ns) if exposed_ns else "none"
        missing = f", {format_ns(unknown_ns)} not recorded" if unknown_ns else ""
        return f"{format_ns(to_ns - from_ns)} on rank {rank}, {exposed} of it exposed communication{missing}"
