"""Ranks of several hosts are mapped to one clock, as far as pings or all-reduces determine it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace import load
from overlapscope.trace.clock_alignment import (
    CollectiveBounds,
    compute_fixes,
    compute_offset_bounds,
    find_worst_violation,
    group_all_reduces_by_clock,
    merge_by_clock,
    tighten_map,
)
from overlapscope.trace.clocks import MAX_DRIFT, ClockMap
from overlapscope.trace.json_files import write_json
from overlapscope.trace.recording import open_recording, read_trace
from overlapscope.trace.schema import CLOCK_FILE, RANK_FILE, RUN_FILE, TABLES_FOLDER, rank_folder
from overlapscope.trace.table_file import ALL_STEPS
from overlapscope.trace.tables import TABLES
from tests.synthetic import make_rank, write_recording

US = 1_000
BEGIN_NS = 10**15


def table(arrivals_ns: np.ndarray, ends_ns: np.ndarray, buckets: int = 1) -> pd.DataFrame:
    """One rank's all-reduces, ``buckets`` a step."""
    number = np.arange(len(arrivals_ns))
    return pd.DataFrame(
        {
            "model": 0,
            "group": 0,
            "step": number // buckets,
            "bucket": number % buckets,
            "op": "all_reduce",
            "ready_ns": pd.Series(arrivals_ns - 5 * US, dtype="Int64"),
            "launch_ns": arrivals_ns,
            "start_ns": pd.Series(arrivals_ns, dtype="Int64"),
            "end_ns": pd.Series(ends_ns, dtype="Int64"),
        }
    )


def seen_by(*tables: pd.DataFrame, peers: tuple[str, ...] = ()) -> CollectiveBounds | None:
    """The first table is of the reference; the others are of ranks that share another clock."""
    names = dict(enumerate(["reference", *["other"] * (len(tables) - 1)]))
    trains_with = dict(enumerate(peers or [""] * len(tables)))
    rows = pd.concat([one.assign(rank=rank) for rank, one in enumerate(tables)], ignore_index=True)
    whole = group_all_reduces_by_clock(rows, names, trains_with)
    parts = [group_all_reduces_by_clock(part, names, trains_with) for _, part in rows.groupby("rank")]
    for name, joined in merge_by_clock(parts).items():  # however ranks are read, it is the same
        keys = ["peers", "model", "step", "bucket", "occurrence"]
        in_order = [each.sort_values(keys, ignore_index=True)[list(joined)] for each in (joined, whole[name])]
        pd.testing.assert_frame_equal(*in_order)
    return compute_offset_bounds(whole, "other", "reference")


def training(
    steps: int, *, shift_ns: int = 0, drift: float = 0.0, transfer_us: int = 200, seed: int = 0
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two ranks that arrive up to 1 ms apart every 100 ms. The clock of the second is ahead by ``shift_ns``."""
    chance = np.random.default_rng(seed)
    begin_ns = BEGIN_NS + np.arange(steps) * 100_000 * US
    arrivals_ns = begin_ns + chance.integers(0, 1000, (2, steps)) * US
    ends_ns = arrivals_ns.max(axis=0) + transfer_us * US + chance.integers(0, 100, (2, steps)) * US

    def shown(ns: np.ndarray) -> np.ndarray:
        return ns + shift_ns + np.rint((ns - BEGIN_NS) * drift).astype(np.int64)

    return table(arrivals_ns[0], ends_ns[0]), table(shown(arrivals_ns[1]), shown(ends_ns[1]))


def test_an_all_reduce_bounds_the_offset_from_both_sides() -> None:
    seen = seen_by(table(np.array([100]), np.array([150])), table(np.array([1120]), np.array([1145])))
    assert seen is not None
    bounds = seen.bounds
    # The reference arrives before we end, at 1145; we arrive, at 1120, before the reference ends.
    assert (bounds.low_at_ns[0], bounds.low_ns[0]) == (1145, 100 - 1145)
    assert (bounds.high_at_ns[0], bounds.high_ns[0]) == (1120, 150 - 1120)


def test_of_several_ranks_on_a_clock_the_last_to_arrive_and_the_first_to_end_count() -> None:
    reference = table(np.array([100]), np.array([150]))
    seen = seen_by(reference, table(np.array([90]), np.array([148])), table(np.array([110]), np.array([160])))
    assert seen is not None
    assert (seen.bounds.low_ns[0], seen.bounds.high_ns[0]) == (100 - 148, 150 - 110)


def test_all_reduces_that_only_one_clock_has_say_nothing() -> None:
    one, other = table(np.array([100]), np.array([150])), table(np.array([100]), np.array([150]))
    assert seen_by(one, other.assign(step=7)) is None
    assert seen_by(one, other.assign(op="broadcast")) is None
    assert seen_by(one, other.assign(group=1)) is None
    assert seen_by(one, other.assign(end_ns=pd.Series([pd.NA], dtype="Int64"))) is None
    assert seen_by(one, other, peers=("[0, 1]", "[2, 3]")) is None, "replicas that do not train together"


def test_a_bucket_that_is_reduced_twice_in_a_step_is_matched_turn_by_turn() -> None:
    twice = table(np.array([100, 300]), np.array([150, 350])).assign(step=0)
    seen = seen_by(twice, twice)
    assert seen is not None
    assert seen.bounds.low_ns.tolist() == [-50, -50]


@given(
    st.integers(-(10**13), 10**13),
    st.floats(-MAX_DRIFT / 2, MAX_DRIFT / 2),
    st.integers(1, 300),
    st.integers(1, 3000),
    st.integers(0, 100),
)
def test_without_pings_the_true_offset_lies_within_the_error(
    shift_ns: int, drift: float, steps: int, transfer_us: int, seed: int
) -> None:
    reference, other = training(steps, shift_ns=shift_ns, drift=drift, transfer_us=transfer_us, seed=seed)
    seen = seen_by(reference, other)
    assert seen is not None
    clock = ClockMap.from_fixes(compute_fixes(seen))
    for column in ("launch_ns", "end_ns"):
        own_ns = other[column].to_numpy(dtype=np.int64)
        true_ns = BEGIN_NS + np.rint((own_ns - shift_ns - BEGIN_NS) / (1 + drift))
        assert (np.abs(clock(own_ns) - true_ns) <= clock.error_at(own_ns) + 1).all()


def test_all_reduces_of_which_ranks_have_numbered_the_steps_differently_align_nothing() -> None:
    reference, other = training(50)
    skewed = other.assign(step=np.where(other["step"] < 25, other["step"], other["step"] + 1))
    seen = seen_by(reference, skewed)
    assert seen is not None
    assert compute_fixes(seen) == []


def test_an_error_that_is_wider_than_the_all_reduces_is_held_within_them() -> None:
    reference, other = training(100, transfer_us=50)
    seen = seen_by(reference, other)
    assert seen is not None
    slow_network = ClockMap.constant(3000 * US, 5000.0 * US)
    assert find_worst_violation(slow_network, seen) is None
    clock = tighten_map(slow_network, compute_fixes(seen))
    own_ns = other["launch_ns"].to_numpy()
    assert clock.error_at(own_ns).max() < 1000 * US
    assert (np.abs(clock.offset_at(own_ns)) <= clock.error_at(own_ns)).all(), "the true offset is 0"


def test_all_reduces_that_are_wider_than_the_error_change_nothing() -> None:
    reference, other = training(100)
    seen = seen_by(reference, other)
    assert seen is not None
    clock = tighten_map(ClockMap.constant(3 * US, 10.0 * US), compute_fixes(seen))
    own_ns = other["launch_ns"].to_numpy()
    assert set(clock.offset_at(own_ns)) == {3 * US}
    assert set(clock.error_at(own_ns)) == {10.0 * US}


def test_the_worst_contradiction_is_named() -> None:
    reference, other = training(20, transfer_us=100)
    seen = seen_by(reference, other)
    assert seen is not None
    found = find_worst_violation(ClockMap.constant(5000 * US, 100.0 * US), seen)
    assert found is not None
    latest_ns = int((other["launch_ns"] + 5000 * US - 100 * US - reference["end_ns"]).max())
    assert found.early_ns == pytest.approx(latest_ns, abs=1)
    row = (other["launch_ns"] - reference["end_ns"]).argmax()
    assert (found.step, found.bucket) == (row, 0)


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


def test_ranks_that_nothing_aligns_are_named_and_drawn_by_the_wall_clock(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    for rank in range(4):
        make_rank(tmp_path, rank, world_size=4).close()
    for rank in (2, 3):
        on_another_host(tmp_path, rank, shift_ns=700)
    trace = read_trace(tmp_path)
    (problem,) = trace.problems
    assert problem.severity == "note"
    golden("recording/unaligned", str(problem))
    assert trace.ranks["clock"].tolist() == ["same boot", "same boot", "none", "none"]
    assert trace.ranks["offset_ns"].tolist() == [0, 0, 700, 700]
    assert trace.ranks["error_ns"].isna().tolist() == [False, False, True, True]
    assert trace.aligned_ranks == (0, 1)
    assert trace.clock_error_ns == 0


def test_pings_that_all_reduces_contradict_are_not_believed(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    write_recording(tmp_path, ranks=2, steps=3)
    on_another_host(tmp_path, 1, shift_ns=700)
    # By these, rank 1 is 5 ms behind: its ready buckets would come after rank 0 has seen their all-reduces end.
    write_pings(tmp_path, 1, [[1_000_000_000, 1_005_010_000, 1_000_020_000]])
    trace = read_trace(tmp_path)
    (problem,) = trace.errors
    golden("recording/contradicting_pings", str(problem))
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
