"""Ranks of several hosts are read onto one clock, as far as something aligns them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from overlapscope.trace import load
from overlapscope.trace.recording import open_recording, read_trace
from overlapscope.trace.schema import CLOCK_FILE, RANK_FILE, RUN_FILE, TABLES_FOLDER, rank_folder, write_json
from overlapscope.trace.table_file import ALL_STEPS
from overlapscope.trace.tables import TABLES
from tests.synthetic import make_rank, write_recording


def edit_json(path: Path, **changes: object) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def on_another_host(folder: Path, rank: int, *, shift_ns: int, **changes: object) -> None:
    """Have a rank's host be booted later, so that its monotonic clock shows less at the same time of day."""
    sample = {"monotonic_ns": 1_000_000_000 - shift_ns, "unix_ns": 1_700_000_000_000_000_000}
    edit_json(rank_folder(folder, rank) / RANK_FILE, boot_id="another", clock_samples=[sample], **changes)


def write_pings(folder: Path, rank: int, pings: list[list[int]]) -> None:
    line = {"reason": "start", "reference": "synthetic", "pings": 100, "best": pings}
    with (rank_folder(folder, rank) / CLOCK_FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_ranks_of_other_hosts_are_brought_onto_the_clock_of_the_first_by_pings(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=2, steps=1)
    before = read_trace(tmp_path).steps["start_ns"].tolist()
    on_another_host(tmp_path, 1, shift_ns=0)
    write_pings(tmp_path, 1, [[1_000_000_000, 1_000_010_700, 1_000_020_000]])
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    assert trace.ranks[["clock", "offset_ns"]].to_numpy().tolist() == [["same boot", 0], ["pings", 700]]
    assert trace.aligned_ranks == (0, 1)
    assert 10_000 <= trace.clock_error_ns < 20_000
    assert trace.steps["start_ns"].tolist() == [before[0], before[1] + 700]
    for table in (trace.phases, trace.copies, trace.collectives):
        assert table.loc[table["rank"] == 1, "start_ns"].min() >= before[1] + 700


def test_ranks_of_one_boot_share_the_pings_of_the_one_that_reports(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=3, steps=1)
    for rank in (1, 2):
        on_another_host(tmp_path, rank, shift_ns=0)
    write_pings(tmp_path, 2, [[1_000_000_000, 1_000_010_700, 1_000_020_000]])
    assert read_trace(tmp_path).ranks["offset_ns"].tolist() == [0, 700, 700]


def test_without_the_folder_of_rank_0_the_lowest_rank_is_the_reference(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=3, steps=1)
    for rank, offset_ns in ((1, 300), (2, 700)):
        edit_json(rank_folder(tmp_path, rank) / RANK_FILE, boot_id=f"host {rank}")
        write_pings(tmp_path, rank, [[1_000_000_000, 1_000_010_000 + offset_ns, 1_000_020_000]])
    shutil.rmtree(rank_folder(tmp_path, 0))
    ranks = read_trace(tmp_path).ranks
    assert ranks[["rank", "clock", "offset_ns"]].to_numpy().tolist() == [[1, "same boot", 0], [2, "pings", 400]]
    assert ranks["error_ns"].tolist()[1] >= 20_000, "of both ways"


def test_without_pings_all_reduces_align_the_clocks(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=2, steps=1)
    on_another_host(tmp_path, 1, shift_ns=700)
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    assert trace.ranks["clock"].tolist() == ["same boot", "collectives"]
    assert abs(trace.ranks["offset_ns"][1]) <= trace.clock_error_ns


def test_what_a_communication_hook_reduces_aligns_nothing(tmp_path: Path) -> None:
    """It may reduce within a host only, or not at all."""
    write_recording(tmp_path, ranks=2, steps=1)
    on_another_host(tmp_path, 1, shift_ns=700)
    for rank in range(2):
        edit_json(
            rank_folder(tmp_path, rank) / RUN_FILE, models=[{"model": 0, "class": "GPT", "comm_hook": "noop_hook"}]
        )
    assert read_trace(tmp_path).ranks["clock"].tolist() == ["same boot", "none"]


def test_ranks_that_nothing_aligns_are_named_and_drawn_by_the_wall_clock(tmp_path: Path) -> None:
    for rank in range(4):
        make_rank(tmp_path, rank, world_size=4).close()
    for rank in (2, 3):
        on_another_host(tmp_path, rank, shift_ns=700)
    trace = read_trace(tmp_path)
    assert [(problem.severity, str(problem)) for problem in trace.problems] == [
        (
            "note",
            "ranks 2, 3 can't be aligned with rank 0: no pings, and all-reduces leave the offset open; "
            "numbers that compare ranks leave them out",
        )
    ]
    assert trace.ranks["clock"].tolist() == ["same boot", "same boot", "none", "none"]
    assert trace.ranks["offset_ns"].tolist() == [0, 0, 700, 700]
    assert trace.ranks["error_ns"].isna().tolist() == [False, False, True, True]
    assert trace.aligned_ranks == (0, 1)
    assert trace.clock_error_ns == 0


def test_pings_that_all_reduces_contradict_are_not_believed(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=2, steps=3)
    on_another_host(tmp_path, 1, shift_ns=700)
    # By these, rank 1 is 5 ms behind: its ready buckets would come after rank 0 has seen their all-reduces end.
    write_pings(tmp_path, 1, [[1_000_000_000, 1_005_010_000, 1_000_020_000]])
    trace = read_trace(tmp_path)
    (problem,) = trace.errors
    assert str(problem).startswith("rank 1 can't be aligned with rank 0: by its pings the all-reduce of step ")
    assert str(problem).endswith(" µs before its last arrival; numbers that compare ranks leave it out")
    assert trace.aligned_ranks == (0,)
    assert trace.ranks["offset_ns"].tolist() == [0, 700]


def test_a_rank_whose_clock_is_not_known_says_so(tmp_path: Path) -> None:
    for rank in range(2):
        make_rank(tmp_path, rank, world_size=2).close()
    edit_json(rank_folder(tmp_path, 1) / RANK_FILE, boot_id=None, clock_samples=[])
    ranks = read_trace(tmp_path).ranks
    assert ranks["clock"].tolist() == ["same boot", "none"]
    assert ranks["boot"].isna().tolist() == [False, True]


def test_a_damaged_line_of_pings_is_named_and_the_others_are_used(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=2, steps=1)
    on_another_host(tmp_path, 1, shift_ns=0)
    path = rank_folder(tmp_path, 1) / CLOCK_FILE
    path.write_text('{"reference": "synthetic", "best": [[1, 2]]}\n')
    write_pings(tmp_path, 1, [[1_000_000_000, 1_000_010_700, 1_000_020_000]])
    trace = read_trace(tmp_path)
    assert [str(problem) for problem in trace.errors] == [f"{path}: line 1 is damaged and skipped"]
    assert trace.ranks["offset_ns"].tolist() == [0, 700]


@pytest.mark.parametrize("pinged", [True, False])
def test_some_steps_are_those_of_the_whole_however_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinged: bool
) -> None:
    write_recording(tmp_path, ranks=4, steps=12)
    for rank in (2, 3):
        on_another_host(tmp_path, rank, shift_ns=700)
        if pinged:
            write_pings(tmp_path, rank, [[1_000_000_000, 1_000_010_700, 1_000_020_000]])
    whole = read_trace(tmp_path)
    shutil.rmtree(tmp_path / TABLES_FOLDER)
    for name in ("_RECORDS_PER_SHARD", "_RECORDS_PER_RANGE"):
        monkeypatch.setattr(load, name, 150)
    recording = open_recording(tmp_path)
    assert len(list((tmp_path / TABLES_FOLDER / "steps").iterdir())) > 1
    assert len(recording.ranges) > 2
    pd.testing.assert_frame_equal(recording.steps(), whole.steps)
    for first, end in [ALL_STEPS, (3, 5), (0, 1), (11, 40), (4, 4), *recording.ranges]:
        some = recording.trace((first, end))
        assert (some.run, some.problems) == (whole.run, whole.problems)
        for name in (*TABLES, "ranks", "plans", "call_sites", "links"):
            expected = getattr(whole, name)
            if name in TABLES:
                expected = expected[(expected["step"] >= first) & (expected["step"] < end)].reset_index(drop=True)
            pd.testing.assert_frame_equal(getattr(some, name), expected, obj=name)
