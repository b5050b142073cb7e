"""The clocks of a recording in a few words."""

from __future__ import annotations

import json
from pathlib import Path

from overlapscope.trace.description import describe_clocks
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import CLOCK_FILE, RANK_FILE, rank_folder, write_json
from tests.synthetic import make_rank


def write_ranks(folder: Path, boots: list[str]) -> None:
    for rank, boot in enumerate(boots):
        make_rank(folder, rank, world_size=len(boots)).close()
        path = rank_folder(folder, rank) / RANK_FILE
        write_json(path, json.loads(path.read_text()) | {"boot_id": boot})


def test_ranks_of_one_boot_share_a_clock(tmp_path: Path) -> None:
    write_ranks(tmp_path, ["a", "a"])
    assert describe_clocks(read_trace(tmp_path)) == "one shared clock"


def test_ranks_that_are_aligned_are_so_to_within_an_error(tmp_path: Path) -> None:
    write_ranks(tmp_path, ["a", "b"])
    burst = {"reference": "a", "best": [[0, 11_500, 23_000]]}
    (rank_folder(tmp_path, 1) / CLOCK_FILE).write_text(json.dumps(burst) + "\n")
    assert describe_clocks(read_trace(tmp_path)) == "aligned to ±12 µs"


def test_ranks_that_are_not_aligned_are_counted(tmp_path: Path) -> None:
    write_ranks(tmp_path, ["a", "a", "b"])
    assert describe_clocks(read_trace(tmp_path)) == "1 of 3 ranks not aligned"
