"""Vertical layout of the timeline: ranks below each other, collapsed to one lane or expanded to all, in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from overlapscope.breakdown.lanes import LANE_NAMES, Timeline
from overlapscope.breakdown.spans import Int64Array

COLLAPSED_PX: Final = 16
"""Height of a collapsed rank: its lane, readable from 12 pixels on, and the space below it."""
COLLAPSED_LANE_PX: Final = 15
WINDOW_PX: Final = 620
"""Height of the lanes in view, as assumed until the browser has told it."""

_LANE_UNITS: Final = {"phases": 2, "gradients": 1, "buckets": 2, "communication": 3}
_GAP_UNITS: Final = 1
RANK_UNITS: Final = sum(_LANE_UNITS.values()) + _GAP_UNITS
"""Height of an expanded rank."""
_ALL_LABELED_UNIT_PX: Final = 8
THINNEST_UNIT_PX: Final = 4
"""Height of a unit in which lanes of different ranks can still be told apart."""
_TALLEST_UNIT_PX: Final = 18
_CHOSEN_UNIT_PX: Final = 12
_MAX_EXPANDED: Final = WINDOW_PX // (RANK_UNITS * _ALL_LABELED_UNIT_PX)
"""Maximum number of ranks that are expanded unless the reader wants more."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LaneLayout:
    """Ranks below each other. Lanes of an expanded one are whole units high, with a unit of space below them."""

    is_expanded: Sequence[bool]
    """Which ranks have all lanes, from top to bottom; the others have only the lane of phases."""
    unit_px: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.is_expanded)

    @cached_property
    def tops_px(self) -> Int64Array:
        """Return the top of each rank, followed by the bottom of the last one."""
        heights = np.where(np.asarray(self.is_expanded, dtype=bool), RANK_UNITS * self.unit_px, COLLAPSED_PX)
        return np.concatenate([[0], np.cumsum(heights)]).astype(np.int64)

    @property
    def height_px(self) -> int:
        """Return the height of all ranks together."""
        return max(1, int(self.tops_px[-1]))

    @property
    def labeled_lanes(self) -> tuple[str, ...]:
        """Return the lanes of an expanded rank whose names are readable beside each other."""
        return LANE_NAMES if self.unit_px >= _ALL_LABELED_UNIT_PX else ("phases", "communication")

    def rank_px(self, position: int) -> tuple[int, int]:
        """Return top and bottom of a rank with the space below it, by its position from the top."""
        return int(self.tops_px[position]), int(self.tops_px[position + 1])

    def lane_px(self, lane: int) -> tuple[int, int]:
        """Return top and bottom of a lane; of a collapsed rank, those of its one lane.

        With units of 10 px an expanded rank has 90 px: phases 20, gradients 10, buckets 20, communication 30, space 10.
        Lane 5, the gradients of the second rank, begins at 90 + 20: ``lane_px(5) == (110, 120)``.
        """
        position, index = divmod(lane, len(LANE_NAMES))
        top = int(self.tops_px[position])
        if not self.is_expanded[position]:
            return top, top + COLLAPSED_LANE_PX
        first, after = lane_units(index)
        return top + first * self.unit_px, top + after * self.unit_px

    def has_lane(self, lane: int) -> bool:
        """Return whether a lane is drawn."""
        position, index = divmod(lane, len(LANE_NAMES))
        return index == 0 or self.is_expanded[position]

    def find_positions(self, top_px: float, bottom_px: float) -> range:
        """Return the positions of the ranks that are at least partly between two heights."""
        first = int(np.searchsorted(self.tops_px[1:], top_px, side="right"))
        after = int(np.searchsorted(self.tops_px[:-1], bottom_px, side="left"))
        return range(min(first, self.ranks), max(first, min(after, self.ranks)))


def lane_units(index: int) -> tuple[int, int]:
    """Return the first unit of a lane of an expanded rank and the unit after its last: (2, 3) for index 1."""
    heights = [_LANE_UNITS[name] for name in LANE_NAMES]
    return sum(heights[:index]), sum(heights[: index + 1])


def layout_lanes(
    ranks: int, expanded: Iterable[int] | None = None, thinnest_px: int = _ALL_LABELED_UNIT_PX
) -> LaneLayout:
    """Return a layout in which ranks are expanded as long as all of them fit a window, and collapsed otherwise.

    Args:
        ranks: number of ranks.
        expanded: positions of the expanded ones instead, if the reader has chosen.
        thinnest_px: minimum height of a unit, also if not all ranks fit then.
    """
    fitting_px = WINDOW_PX // (max(1, ranks) * RANK_UNITS)
    chosen = frozenset(range(ranks) if expanded is None and ranks <= _MAX_EXPANDED else expanded or ())
    if len(chosen) < ranks:
        thinnest_px = _CHOSEN_UNIT_PX  # a few expanded ranks among others have room
    unit_px = min(max(fitting_px, thinnest_px), _TALLEST_UNIT_PX)
    return LaneLayout(is_expanded=tuple(position in chosen for position in range(ranks)), unit_px=unit_px)


@dataclass(eq=False, kw_only=True)
class ShownLanes:
    """What the timeline shows at the moment: shared by all that draw on it."""

    timeline: Timeline
    layout: LaneLayout
    drawn: range
    """Positions of the ranks that are drawn: those in view, and some above and below."""

    @property
    def drawn_lanes(self) -> list[int]:
        """Return the numbers of the lanes that are drawn."""
        return list(self.lanes_of(self.drawn))

    def lanes_of(self, positions: range) -> Iterable[int]:
        """Generate the numbers of the lanes that some ranks have."""
        numbers = range(positions.start * len(LANE_NAMES), positions.stop * len(LANE_NAMES))
        return (number for number in numbers if self.layout.has_lane(number))

    def is_drawn(self, lane: int) -> bool:
        """Return whether a lane is one of those that are drawn."""
        return lane // len(LANE_NAMES) in self.drawn and self.layout.has_lane(lane)


def show_lanes(timeline: Timeline, layout: LaneLayout | None = None) -> ShownLanes:
    """Return what a timeline shows first: its ranks from the top."""
    layout = layout or layout_lanes(len(timeline.ranks))
    return ShownLanes(timeline=timeline, layout=layout, drawn=layout.find_positions(0, 2 * WINDOW_PX))
