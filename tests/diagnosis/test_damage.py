"""Whatever is lost of a recording, no rank is accused that has done nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from overlapscope.cli.main import main
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.collective_log import ENTRY_BYTES, Entries, group_file
from overlapscope.trace.collective_log_reader import CollectiveLogFile
from overlapscope.trace.json_files import dump_json_line, write_json
from overlapscope.trace.manifest import write_manifest
from overlapscope.trace.process_files import write_exit
from overlapscope.trace.schema import (
    ENDED_FILE,
    HEADER_BYTES,
    JOINING_FILE,
    MANIFEST_FILE,
    RANK_FILE,
    REPORTS_FILE,
    SIGNATURES_FILE,
    rank_folder,
)
from tests.damage import DAMAGES, DEPTH, Damage, delete, empty_rank, swap
from tests.ordered import BEGIN_NS, end, fail, steps, write_order

GUILTY = 1
TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
DEEP = "[" * DEPTH


def verdict_on(folder: Path) -> Verdict:
    return judge(read_evidence(folder)[0])


def uneven(folder: Path, *, began_ns: int = BEGIN_NS) -> Path:
    """Rank 1 left its loop after five steps; the others waited in the sixth until their time was up."""
    waiting = [*steps(5), replace(steps(1, first=5)[0], state="launched")]
    write_order(folder, {0: waiting, GUILTY: steps(5), 2: waiting})
    end(folder, [GUILTY])
    for victim in (0, 2):
        fail(folder, victim, "RuntimeError", TIMED_OUT)
    for rank in range(3):
        path = rank_folder(folder, rank) / RANK_FILE
        where = json.loads(path.read_text()) | {"pid": 100 + rank}
        where["clock_samples"][0]["monotonic_ns"] = began_ns
        write_json(path, where)
        write_manifest(rank_folder(folder, rank))
    return folder


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recording, and one of another run."""
    folder = tmp_path_factory.mktemp("jobs")
    return uneven(folder / "job"), uneven(folder / "other", began_ns=10**12)


def test_the_job_as_it_is(jobs: tuple[Path, Path]) -> None:
    verdict = verdict_on(jobs[0])
    assert (verdict.kind, verdict.blamed) == ("uneven inputs", (GUILTY,))


@given(seed=st.integers(0, 2**32), damages=st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=3))
@example(seed=18235, damages=[delete, empty_rank, swap])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_accuses_another_rank(
    jobs: tuple[Path, Path], tmp_path: Path, seed: int, damages: list[Damage]
) -> None:
    copy, random_ = tmp_path / "copy", random.Random(seed)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(jobs[0], copy)
    done = [damage(random_, copy, jobs[1]) for damage in damages]
    try:
        verdict = verdict_on(copy)
    except OverlapScopeError:
        return
    assert {*verdict.named} <= {GUILTY}, (done, verdict.sentence)
    assert verdict.kind != "healthy", done


@pytest.mark.parametrize("lost", [(0,), (0, 2)])
def test_a_victim_whose_ending_is_lost_is_not_blamed_for_its_status(tmp_path: Path, lost: tuple[int, ...]) -> None:
    uneven(tmp_path)
    for rank in lost:
        (rank_folder(tmp_path, rank) / ENDED_FILE).unlink()
    exits = tmp_path / "exits_node0_1.jsonl"
    write_exit(tmp_path, 100, 1)
    [path] = tmp_path.glob("exits_*.jsonl")
    line = json.loads(path.read_text()) | {"boot_id": "synthetic", "time_ns": 9 * BEGIN_NS}
    path.unlink()
    exits.write_text(json.dumps({name: value for name, value in line.items() if name != "crc32"}) + "\n")
    assert {*verdict_on(tmp_path).named} <= {GUILTY}


def test_a_rank_whose_log_is_lost_was_not_late(tmp_path: Path) -> None:
    """Of the log of rank 0, and then of a part of it."""
    uneven(tmp_path)
    path = rank_folder(tmp_path, 0) / group_file(0)
    data = path.read_bytes()
    path.unlink()
    assert 0 not in verdict_on(tmp_path).concerned or not verdict_on(tmp_path).named
    path.write_bytes(data[: HEADER_BYTES + 9 * ENTRY_BYTES])
    assert {*verdict_on(tmp_path).named} <= {GUILTY}


def test_a_folder_of_another_run_is_left_out(jobs: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(jobs[0], copy)
    shutil.rmtree(rank_folder(copy, 2))
    shutil.copytree(rank_folder(jobs[1], 2), rank_folder(copy, 2))
    evidence, _ = read_evidence(copy)
    assert (2 in evidence.ranks, len(evidence.gaps)) == (False, 2)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.blamed) == ("uneven inputs", (GUILTY,))


def test_of_two_ranks_of_different_runs_nothing_is_compared(jobs: tuple[Path, Path], tmp_path: Path) -> None:
    for rank, job in enumerate(jobs):
        shutil.copytree(rank_folder(job, rank), rank_folder(tmp_path, rank))
    evidence, _ = read_evidence(tmp_path)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.named, len(evidence.ranks)) == ("cannot tell", (), 0)


def test_folders_with_each_others_names_are_left_out(jobs: tuple[Path, Path], tmp_path: Path) -> None:
    for rank, other in ((0, 0), (1, 2), (2, 1)):
        shutil.copytree(rank_folder(jobs[0], rank), rank_folder(tmp_path, other))
    evidence, _ = read_evidence(tmp_path)
    assert ([*evidence.ranks], judge(evidence).named) == ([0], ())


def test_nothing_is_known_of_how_ranks_began_whose_folders_are_left_out(
    jobs: tuple[Path, Path], tmp_path: Path
) -> None:
    for rank in (0, 1):
        shutil.copytree(rank_folder(jobs[0], rank), rank_folder(tmp_path, 1 - rank))
        write_exit(tmp_path, 100 + rank, 0, rank=rank)
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.named) == ("cannot tell", ())


def test_an_ending_that_is_another_ranks_is_left_out(tmp_path: Path) -> None:
    uneven(tmp_path)
    shutil.copy(rank_folder(tmp_path, GUILTY) / ENDED_FILE, rank_folder(tmp_path, 0) / ENDED_FILE)
    evidence, _ = read_evidence(tmp_path)
    assert (evidence.ranks[0].liveness, len(evidence.gaps)) == ("unknown", 1)
    assert judge(evidence).blamed == (GUILTY,)


def test_an_ending_of_another_process_is_left_out_without_a_manifest(tmp_path: Path) -> None:
    """Rank 0 was cut off while its disk was full; then its ending and that of rank 1 were swapped."""
    uneven(tmp_path)
    for rank in (0, GUILTY):
        (rank_folder(tmp_path, rank) / MANIFEST_FILE).unlink()
    endings = {rank: rank_folder(tmp_path, rank) / ENDED_FILE for rank in (0, GUILTY)}
    left = {rank: json.loads(path.read_text()) | {"rank": rank, "pid": 100 + rank} for rank, path in endings.items()}
    for rank, path in endings.items():
        write_json(path, left[1 - rank])
    evidence, _ = read_evidence(tmp_path)
    assert [evidence.ranks[rank].is_end_lost for rank in (0, GUILTY)] == [True, True]
    assert {*judge(evidence).named} <= {GUILTY}
    for rank, path in endings.items():
        write_json(path, left[rank])
    assert judge(read_evidence(tmp_path)[0]).blamed == (GUILTY,)


def test_where_another_rank_ran_says_nothing_of_this_one(tmp_path: Path) -> None:
    """Rank 1 was killed, and its launcher saw that; then its rank.json and that of rank 0 were swapped."""
    order = [*steps(5), replace(steps(1, first=5)[0], state="launched")]
    write_order(tmp_path, {0: order, GUILTY: steps(5), 2: order}, close=False)
    for victim in (0, 2):
        fail(tmp_path, victim, "RuntimeError", "Connection closed by peer")
    paths = {rank: rank_folder(tmp_path, rank) / RANK_FILE for rank in range(3)}
    where = {rank: json.loads(path.read_text()) | {"pid": 100 + rank} for rank, path in paths.items()}
    for rank, path in paths.items():
        write_json(path, where[rank])
        write_json(path.with_name(JOINING_FILE), where[rank] | {"time_ns": BEGIN_NS, "world_size": 3})
    write_exit(tmp_path, 100 + GUILTY, -9)
    [exits] = tmp_path.glob("exits_*.jsonl")
    line = json.loads(exits.read_text()) | {"boot_id": where[GUILTY]["boot_id"], "time_ns": 9 * BEGIN_NS}
    exits.write_text(dump_json_line(line))
    assert judge(read_evidence(tmp_path)[0]).blamed == (GUILTY,)
    for rank in (0, GUILTY):
        write_json(paths[rank], where[1 - rank])
    evidence, _ = read_evidence(tmp_path)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.blamed, len(evidence.gaps)) == ("killed", (GUILTY,), 2)


def test_a_report_of_another_process_is_no_witness(tmp_path: Path) -> None:
    folder = rank_folder(uneven(tmp_path), 2)
    (folder / MANIFEST_FILE).unlink()
    verdict = {"kind": "stuck", "sentence": "Rank 0 is stuck.", "blamed": [0]}
    report = {"report": 1, "time_ns": BEGIN_NS, "verdict": verdict, "rank": 2, "pid": 102}
    counts = []
    for more in ({}, {"pid": 7}, {"rank": 1}):
        (folder / REPORTS_FILE).write_text(dump_json_line(report | more))
        evidence, _ = read_evidence(tmp_path)
        counts.append((len(evidence.reports), len(evidence.gaps)))
    assert counts == [(1, 0), (0, 1), (0, 1)]


def test_a_folder_without_a_name_is_left_out_if_it_is_of_another_time(jobs: tuple[Path, Path], tmp_path: Path) -> None:
    left_out = []
    for hours in (0, 1):
        copy, later = tmp_path / str(hours), []
        shutil.copytree(jobs[0], copy)
        shutil.rmtree(rank_folder(copy, 2))
        for place, one in enumerate(steps(5)):
            later.append(replace(one, now_ns=BEGIN_NS + hours * 3600 * 10**9 + place * 100_000))
        write_order(copy, {2: later}, members=range(3))
        (rank_folder(copy, 2) / RANK_FILE).write_text("{")
        left_out.append(2 not in read_evidence(copy)[0].ranks)
    assert left_out == [False, True]


def test_what_nobody_knows_is_no_difference(tmp_path: Path) -> None:
    """Lines that are lost, of two ranks that agree with a third one up to where these differ."""
    more = [*steps(5), *steps(1, first=6)]
    end(write_order(tmp_path, {0: steps(6), 1: more, 2: steps(6)}), range(3))
    for rank in (0, 2):
        (rank_folder(tmp_path, rank) / SIGNATURES_FILE).unlink()
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.named) == ("cannot tell", ())


def test_folders_without_anything_of_a_rank_are_none(jobs: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(jobs[0], copy)
    for rank in range(3, 30):
        rank_folder(copy, rank).mkdir()
    rank_folder(copy, 30).symlink_to(".")
    assert [*read_evidence(copy)[0].ranks] == [0, 1, 2]


def test_a_log_that_is_rewritten_while_it_is_read_accuses_nobody(
    jobs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any one of the reads on, a rank's log holds less than it did, or is there again after that."""
    read, calls = CollectiveLogFile.read, count()
    limits = range(0)

    def read_changing(log: CollectiveLogFile, first: int, last: int) -> Entries:
        found = read(log, first, last)
        return found[: len(found) // 2] if next(calls) in limits else found

    monkeypatch.setattr(CollectiveLogFile, "read", read_changing)
    verdict_on(jobs[0])
    total = next(calls)
    for begin in range(total):
        for limits in (range(begin, begin + 1), range(begin, total)):
            calls = count()
            verdict = verdict_on(jobs[0])
            assert {*verdict.named} <= {GUILTY}, (limits, verdict.sentence)


@pytest.mark.parametrize("command", ["diagnose", "summary"])
@pytest.mark.parametrize("how", ["pipe", "device", "folder", "deep"])
def test_no_file_keeps_a_command_waiting(
    jobs: tuple[Path, Path], tmp_path: Path, how: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(jobs[0], copy)
    for path in [each for each in rank_folder(copy, 2).iterdir() if each.is_file()]:
        path.unlink()
        if how == "pipe":
            os.mkfifo(path)
        elif how == "folder":
            path.mkdir()
        elif how == "device":
            path.symlink_to("/dev/zero")
        else:
            path.write_text(DEEP)
    assert main([command, str(copy)]) in (1, 2)
    assert capsys.readouterr().err


def test_a_name_commands_no_terminal(
    jobs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "evil\x1b[2J\n\u202e"
    shutil.copytree(jobs[0], copy)
    (rank_folder(copy, 0) / JOINING_FILE).write_text("{")
    main(["diagnose", str(copy)])
    main(["summary", str(copy)])
    main(["diagnose", str(copy / "nowhere")])
    said = capsys.readouterr()
    text = said.out + said.err
    assert "evil" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "evil\\x1b[2J\\n\\u202e" in text
