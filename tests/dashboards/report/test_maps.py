"""The maps of ranks and steps, as pictures."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

from dashboards.recording import Recording
from dashboards.report.maps import HeatmapImage, build_heatmap_images
from dashboards.theme import LATENESS_SHADES
from tests.synthetic import write_straggling_recording


def maps(folder: Path, ranks: int) -> dict[str, HeatmapImage]:
    """Rank 1 is late in every step after the fourth."""
    write_straggling_recording(folder, late_us=lambda rank, _: 3_000 * (rank == 1), ranks=ranks, steps=30)
    heatmap = Recording(folder).latest().heatmap
    assert heatmap is not None
    return {each.title: each for each in build_heatmap_images(heatmap)}


def shades(picture: HeatmapImage) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(base64.b64decode(picture.shades), dtype=np.uint8).reshape(picture.rows, picture.columns)


def test_the_late_rank_is_dark_where_it_is_late_and_the_others_where_they_wait(tmp_path: Path) -> None:
    found = maps(tmp_path / "traces", ranks=4)
    for title in ("Compute", "Lateness"):
        assert (shades(found[title])[1] == LATENESS_SHADES).all()
        assert (shades(found[title])[[0, 2, 3]] == 0).all()
    assert (shades(found["Wait"])[1] == 0).all()
    assert (shades(found["Wait"])[[0, 2, 3]] > LATENESS_SHADES / 4).all()
    assert found["Lateness"].names == ("rank 0", "rank 1", "rank 2", "rank 3")
    assert (found["Lateness"].first_step, found["Lateness"].last_step) == (4, 29)


def test_of_many_ranks_it_says_which_they_are(tmp_path: Path) -> None:
    late = maps(tmp_path / "traces", ranks=24)["Lateness"]
    assert (late.names, late.note) == ((), "rank 0 to rank 23, from top to bottom")
