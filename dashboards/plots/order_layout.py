"""Vertical layout of the lanes of collectives, in pixels from the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MAX_TALL_LANES: Final = 8
_TALL_PX: Final = 42
_LOW_PX: Final = 26
GAP_PX: Final = 3
"""Gap between two lanes."""


@dataclass(frozen=True, kw_only=True)
class OrderLayout:
    """Lanes of equal height: few have room for two lines of text in a cell, many for one."""

    lanes: int

    @property
    def has_two_lines(self) -> bool:
        """Whether a cell has room for a second line."""
        return self.lanes <= _MAX_TALL_LANES

    @property
    def lane_px(self) -> int:
        """Height of a lane with the gap below it."""
        return _TALL_PX if self.has_two_lines else _LOW_PX

    @property
    def height_px(self) -> int:
        """Height of all lanes."""
        return max(1, self.lanes) * self.lane_px

    def cell_px(self, lane: int) -> tuple[float, float]:
        """Return top and bottom of the cells of a lane."""
        top = lane * self.lane_px
        return top + GAP_PX / 2, top + self.lane_px - GAP_PX / 2
