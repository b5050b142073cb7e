"""Vertical layout of the lanes of the timeline, in pixels from the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from overlapscope.analysis.lanes import LANE_NAMES

_LANE_UNITS: Final = {"phases": 2, "gradients": 1, "buckets": 2, "communication": 3}
_GAP_UNITS: Final = 1
_WINDOW_PX: Final = 620
_ALL_LABELLED_UNIT_PX: Final = 8
_RANK_UNITS: Final = sum(_LANE_UNITS.values()) + _GAP_UNITS


@dataclass(frozen=True, kw_only=True)
class LaneLayout:
    """Lanes of equal units of height, rank below rank, a unit of space between ranks.

    Whole units let one image with a row of pixels per unit cover all lanes.
    """

    ranks: int
    unit_px: int

    @property
    def units(self) -> int:
        """Height of all lanes together, in units."""
        return self.ranks * _RANK_UNITS

    @property
    def height_px(self) -> int:
        """Height of all lanes together."""
        return self.units * self.unit_px

    @property
    def rank_height_px(self) -> int:
        """Height of the lanes of one rank and of the space below them."""
        return _RANK_UNITS * self.unit_px

    @property
    def labeled_lanes(self) -> tuple[str, ...]:
        """The lanes of a rank whose names are readable beside each other."""
        return LANE_NAMES if self.unit_px >= _ALL_LABELLED_UNIT_PX else ("phases", "communication")

    def lane_units(self, lane: int) -> tuple[int, int]:
        """Return the first unit of a lane and the unit after its last.

        A rank has 9 units: phases 2, gradients 1, buckets 2, communication 3, space 1. Lane 5, the gradients of the
        second rank, begins at 9 + 2: ``lane_units(5) == (11, 12)``.
        """
        rank, index = divmod(lane, len(LANE_NAMES))
        heights = [_LANE_UNITS[name] for name in LANE_NAMES]
        top = rank * _RANK_UNITS + sum(heights[:index])
        return top, top + heights[index]

    def lane_px(self, lane: int) -> tuple[int, int]:
        """Return top and bottom of a lane."""
        top, bottom = self.lane_units(lane)
        return top * self.unit_px, bottom * self.unit_px


def layout_lanes(ranks: int) -> LaneLayout:
    """Return a layout that fits a window if possible: few ranks are not stretched, many stay distinguishable."""
    fitting_px = _WINDOW_PX // (max(1, ranks) * _RANK_UNITS)
    return LaneLayout(ranks=ranks, unit_px=min(max(fitting_px, 4), 18))
