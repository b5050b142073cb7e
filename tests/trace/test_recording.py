"""Folders as users give them, and recordings of which a part is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.steady_steps import find_first_step_after_warm_up
from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace import tables
from overlapscope.trace.json_files import read_json, write_json
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    DEFAULT_LIMIT_BYTES,
    ENDED_FILE,
    EVENTS_FILE,
    HEADER_BYTES,
    JOINING_FILE,
    PLANS_FILE,
    RANK_FILE,
    RECORD_BYTES,
    RUN_FILE,
    Kind,
    pack_body,
    rank_folder,
)
from tests.ordered import make_folder, steps, write_order
from tests.synthetic import PARAMETERS, US, make_rank, write_recording, write_step


def test_ranks_that_wait_for_others_to_join_are_there_without_anything_being_unreadable(tmp_path: Path) -> None:
    for rank in (0, 2):
        folder = rank_folder(tmp_path, rank)
        folder.mkdir()
        where = {"host": "node0", "pid": 100 + rank, "boot_id": "b", "time_ns": 1, "rank": rank, "world_size": 3}
        write_json(folder / JOINING_FILE, where)
    trace = read_trace(tmp_path)
    assert trace.ranks["rank"].tolist() == [0, 2]
    assert trace.ranks["host"].tolist() == ["node0", "node0"]
    assert trace.has_only_collectives
    assert [problem.message for problem in trace.problems] == [f"{tmp_path}: 1 of 3 ranks left no log: 1"]


def test_a_whole_recording_has_no_problems(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path, ranks=3, steps=2))
    assert trace.problems == ()
    assert trace.run["world_size"] == 3
    assert trace.ranks[["rank", "pid", "clock", "offset_ns", "closed"]].to_numpy().tolist() == [
        [rank, 1000 + rank, "same boot", 0, True] for rank in range(3)
    ]
    assert trace.steps[["rank", "step"]].to_numpy().tolist() == [[r, s] for r in range(3) for s in range(2)]
    assert trace.incidents.empty


def test_it_does_not_matter_how_many_ranks_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_recording(tmp_path, ranks=5, steps=4)
    at_once = read_trace(folder, latest_records=1_000)
    for records in (1, 60, 130):
        monkeypatch.setattr(tables, "_RECORDS_PER_BATCH", records)
        one_by_one = read_trace(folder, latest_records=1_000)
        for name, table in vars(at_once).items():
            if isinstance(table, pd.DataFrame):
                pd.testing.assert_frame_equal(table, getattr(one_by_one, name))


def test_plans_and_call_sites_are_tables(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path, ranks=2))
    plans = trace.plans[["plan_epoch", "bucket", "position", "parameter", "name", "shape", "bytes"]]
    assert plans.to_numpy().tolist() == [
        [0, index, 0, index, name, str(elements), 4 * elements] for index, (name, elements) in enumerate(PARAMETERS)
    ]
    assert trace.call_sites.to_numpy().tolist() == [[r, 1, "train.py", 42, "main"] for r in range(2)]


def test_what_is_not_a_recording_is_refused_in_one_line(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    (tmp_path / "trace.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "code" / "rank_files").mkdir(parents=True)
    one_rank = rank_folder(write_recording(tmp_path / "run", steps=1), 1)
    for name in ("monday", "tuesday"):
        write_recording(tmp_path / "several" / name, steps=1)
    refusals = []
    for path in ("nowhere", "trace.txt", "empty", "code", one_rank, "several"):
        with pytest.raises(OverlapScopeError) as refused:
            read_trace(tmp_path / path)
        refusals.append(str(refused.value).replace(str(tmp_path), "FOLDER"))
    assert all("\n" not in refusal for refusal in refusals)
    golden("recording/refused", "\n".join(refusals))


def messages(problems: Iterable[Problem], folder: Path) -> str:
    return "\n".join(str(problem).replace(str(folder), "FOLDER") for problem in problems)


def test_ranks_that_left_no_log_are_named(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    trace = read_trace(write_recording(tmp_path, ranks=2, world_size=1000))
    golden("recording/ranks_without_logs", messages(trace.errors, tmp_path))
    assert trace.steps["rank"].unique().tolist() == [0, 1]


def test_a_rank_whose_recording_ended_early_is_named_with_the_reason(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    folder = rank_folder(write_recording(tmp_path, ranks=2), 1)
    write_json(folder / ENDED_FILE, {"how": "ended", "unrecorded_because": "no space left", "time_ns": 1})
    golden("recording/ended_early", messages(read_trace(tmp_path).errors, tmp_path))


def test_an_unreadable_rank_is_named_and_the_others_are_shown(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    write_recording(tmp_path, ranks=3)
    bad = rank_folder(tmp_path, 1) / EVENTS_FILE
    bad.write_bytes(b"not a log at all")
    calls: list[tuple[int, int]] = []
    trace = read_trace(tmp_path, progress=lambda done, ranks: calls.append((done, ranks)))
    golden("recording/not_a_log", messages(trace.errors, tmp_path))
    assert trace.steps["rank"].unique().tolist() == [0, 2]
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_newer_rank_says_so_and_the_others_are_shown(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    write_recording(tmp_path, ranks=2)
    log = rank_folder(tmp_path, 0) / EVENTS_FILE
    content = bytearray(log.read_bytes())
    content[8] = 9
    log.write_bytes(content)
    trace = read_trace(tmp_path)
    golden("recording/newer_format", messages(trace.errors, tmp_path))
    assert trace.ranks["rank"].tolist() == [1]
    assert trace.run["world_size"] == 2


def test_if_no_rank_can_be_read_that_is_the_error(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=2)
    for rank in range(2):
        (rank_folder(tmp_path, rank) / EVENTS_FILE).unlink()
    with pytest.raises(OverlapScopeError, match=r"rank_0/events.log: can't be read \(No such file"):
        read_trace(tmp_path)


@pytest.mark.parametrize("name", [RUN_FILE, RANK_FILE])
@pytest.mark.parametrize("content", [None, "{", "[1, 2]", "null", b"\xff\xfe\x00"])
def test_a_bad_json_file_costs_no_more_than_its_facts(tmp_path: Path, name: str, content: str | bytes | None) -> None:
    write_recording(tmp_path, ranks=2)
    path = rank_folder(tmp_path, 0) / name
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    trace = read_trace(tmp_path)
    assert len(trace.steps) == 10
    assert trace.run["world_size"] == 2
    assert [str(path) in str(problem) for problem in trace.errors] == [True]


def test_facts_that_are_not_of_their_type_are_damage_or_unknown(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, ranks=1, steps=3) / "rank_0"
    run, where = {"models": [[1]], "started_unix_ns": 10**30}, {"host": ["\ud800"], "pid": "x", "device": {}}
    for name, odd in ((RUN_FILE, run), (RANK_FILE, where)):
        write_json(folder / name, read_json(folder / name, []) | odd)
    trace = read_trace(tmp_path)
    assert trace.ranks[["host", "pid", "device"]].values.tolist() == [["['?']", -1, "{}"]]
    assert [str(problem) for problem in trace.errors] == [
        f"{folder / RUN_FILE}: damaged; {name!r} is left out" for name in run
    ]
    assert not trace.run.keys() & run.keys()


def test_a_damaged_line_of_a_plan_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=1)
    path = rank_folder(tmp_path, 0) / PLANS_FILE
    good = path.read_text()
    second = json.dumps(json.loads(good) | {"epoch": 1}) + "\n"
    path.write_text(good + '{"model": 0}\n' + second)
    trace = read_trace(tmp_path)
    assert trace.plans["plan_epoch"].unique().tolist() == [0, 1]
    assert [str(problem) for problem in trace.errors] == [f"{path}: line 2 is damaged and skipped"]


@given(st.data())
def test_side_files_cut_at_any_byte_leave_the_steps_readable(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tmp_path = tmp_path_factory.mktemp("run")
    write_recording(tmp_path, ranks=1, steps=1)
    name = data.draw(st.sampled_from([RUN_FILE, RANK_FILE, PLANS_FILE, CALL_SITES_FILE]))
    path = rank_folder(tmp_path, 0) / name
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert len(read_trace(tmp_path).steps) == 1


def test_what_led_to_an_incident_is_shown_although_the_ring_dropped_it(tmp_path: Path) -> None:
    log = make_rank(tmp_path, 0, world_size=1, limit_bytes=HEADER_BYTES + 400 * RECORD_BYTES)
    for step in range(200):
        if step == 100:
            log.append(pack_body(Kind.INCIDENT, index=1), step, 77, 77)
            log.preserve(record_count=200)
        write_step(log, step, begin_ns=step * 10_000 * US)
    log.close()
    trace = read_trace(tmp_path)
    steps = trace.steps["step"].tolist()
    assert {0, 97, 98, 99, 198, 199} <= set(steps)
    assert 150 not in steps
    assert trace.collectives.groupby("step").size().to_dict() == dict.fromkeys(steps, 3)
    assert trace.errors == []
    assert [problem.severity for problem in trace.problems] == ["note"]


def test_an_incident_is_dated_and_numbered(tmp_path: Path) -> None:
    log = make_rank(tmp_path, 0, world_size=1)
    log.append(pack_body(Kind.INCIDENT, index=1), 3, 77, 77)
    log.close()
    assert read_trace(tmp_path).incidents.to_numpy().tolist() == [[0, 3, 1, 77]]


def test_ranks_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path, ranks=11, steps=1))
    assert trace.ranks["rank"].tolist() == list(range(11))


def test_no_table_of_a_recording_without_events_lacks_its_columns(tmp_path: Path) -> None:
    full = read_trace(write_recording(tmp_path / "full", ranks=1))
    make_rank(tmp_path / "bare", 0, world_size=1).close()
    bare = read_trace(tmp_path / "bare")
    for name in ("steps", "phases", "gradients", "copies", "collectives", "incidents", "ranks"):
        table = getattr(bare, name)
        assert isinstance(table, pd.DataFrame)
        assert list(table.columns) == list(getattr(full, name).columns), name


def test_ranks_that_left_only_collective_logs_have_empty_tables_and_a_note(tmp_path):
    write_order(tmp_path / "traces", dict.fromkeys(range(2), steps(3)))
    for _ in ("from the logs", "from the tables"):
        trace = read_trace(tmp_path / "traces")
        assert trace.ranks["rank"].tolist() == [0, 1]
        assert trace.aligned_ranks == (0, 1)
        assert not len(trace.steps)
        assert [problem.severity for problem in trace.problems] == ["note"]
        assert "no rank has an event log" in trace.problems[0].message


def test_a_rank_without_any_log_is_an_error_still(tmp_path):
    write_order(tmp_path / "traces", {0: steps(3)})
    make_folder(tmp_path / "traces", 1, world_size=2)
    trace = read_trace(tmp_path / "traces")
    assert trace.ranks["rank"].tolist() == [0]
    assert "rank_1/events.log" in trace.errors[0].message


@pytest.mark.parametrize("limit_bytes", [DEFAULT_LIMIT_BYTES, 100_000])
def test_the_latest_steps_alone_are_read_as_they_are_among_all(tmp_path: Path, limit_bytes: int) -> None:
    """Also of a log that has come round, and where one rank has lost its latest steps."""
    folder = write_recording(tmp_path, ranks=3, steps=100, limit_bytes=limit_bytes)
    whole, latest = read_trace(folder), read_trace(folder, latest_records=300)
    assert latest.extent == "latest"
    assert whole.extent == "all"
    first = latest.steps["step"].min()
    assert whole.steps["step"].min() == 0
    assert 3 < first < latest.steps["step"].max() == 99
    assert latest.steps.groupby("step")["rank"].nunique().eq(3).all(), "a step is there on all ranks or on none"
    for name in ("steps", "phases", "gradients", "copies", "collectives"):
        among_all = getattr(whole, name).query("step >= @first").reset_index(drop=True)
        pd.testing.assert_frame_equal(getattr(latest, name), among_all, obj=name)


@pytest.mark.parametrize("from_tables", [False, True], ids=["from logs", "from tables"])
def test_some_steps_are_read_as_they_are_among_all(tmp_path: Path, from_tables: bool) -> None:
    folder = write_recording(tmp_path, ranks=3, steps=60)
    if from_tables:
        read_trace(folder)
    some = read_trace(folder, steps=(20, 30))
    assert some.extent == "chosen"
    with_neighbors = read_trace(folder, steps=(22, 28), neighbors=2)
    whole = read_trace(folder)
    for name in ("steps", "phases", "gradients", "copies", "collectives"):
        among_all = getattr(whole, name).query("20 <= step < 30").reset_index(drop=True)
        for read in (some, with_neighbors):
            pd.testing.assert_frame_equal(getattr(read, name), among_all, obj=name)


def test_all_steps_may_be_asked_for_by_number(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, steps=20)
    assert read_trace(folder, steps=(0, 1000)).extent == "all"
    assert read_trace(folder, steps=(5, 15), neighbors=5).extent == "all"


def test_steps_that_it_does_not_have_are_an_error(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    folder = write_recording(tmp_path, steps=20)
    with pytest.raises(OverlapScopeError) as refused:
        read_trace(folder, steps=(20, 30), neighbors=5)
    golden("recording/no_such_steps", str(refused.value).replace(str(tmp_path), "FOLDER"))


def test_a_rank_that_is_far_behind_the_latest_steps_is_named(tmp_path: Path) -> None:
    """As one that is out of data under join()."""
    write_recording(tmp_path, steps=100)
    behind = make_rank(tmp_path, 2, world_size=3)
    for step in range(20):
        write_step(behind, step, begin_ns=1_000_000_000 + step * 10_000 * US)
    behind.close()
    latest = read_trace(tmp_path, latest_records=300)
    assert set(latest.steps["rank"]) == {0, 1}
    (problem,) = latest.problems
    assert problem.message.startswith(f"{tmp_path}: rank 2 is not shown: its latest step is 19,")


def test_the_latest_steps_are_no_warm_up(tmp_path: Path) -> None:
    latest = read_trace(write_recording(tmp_path, steps=100), latest_records=300)
    assert find_first_step_after_warm_up(latest.steps) == latest.steps["step"].min()
    assert find_first_step_after_warm_up(read_trace(tmp_path).steps) == 3
