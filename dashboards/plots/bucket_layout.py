"""Vertical layout of the lanes of two steps on the Buckets page, in pixels from the top."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LANE_PX: Final = {"backward": 16, "ready": 8, "communication": 26}
"""Heights of the lanes of a rank, from top to bottom."""
RANK_PX: Final = sum(LANE_PX.values()) + 6
HEAD_PX: Final = 22
"""Height of the heading above the ranks of a step."""


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Layout of two steps, one below the other, of the same number of ranks."""

    ranks: int

    @property
    def step_px(self) -> int:
        """The height of one step."""
        return HEAD_PX + self.ranks * RANK_PX

    @property
    def height_px(self) -> int:
        """The height of both steps."""
        return 2 * self.step_px

    def lane_px(self, step: int, rank: int, lane: str) -> tuple[int, int]:
        """Return top and bottom of a lane.

        Args:
            step: 0 for the recorded step, 1 for the one below it.
            rank: index among the ranks shown.
            lane: name of the lane, a key of ``LANE_PX``.
        """
        names = list(LANE_PX)
        above = sum(LANE_PX[name] for name in names[: names.index(lane)])
        top = step * self.step_px + HEAD_PX + rank * RANK_PX + above
        return top, top + LANE_PX[lane]
