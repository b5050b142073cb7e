"""What is missing of a recording is said, takes "healthy" away, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from overlapscope.cli.main import main
from overlapscope.diagnosis import from_recording
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.collective_log import ENTRY_BYTES, group_file
from overlapscope.trace.collective_log_reader import CollectiveLogs, open_collective_logs
from overlapscope.trace.json_files import dump_json_line, write_json
from overlapscope.trace.manifest import write_manifest
from overlapscope.trace.schema import (
    ENDED_FILE,
    EVENTS_FILE,
    HEADER_BYTES,
    JOINING_FILE,
    PARAMETERS_FILE,
    PLANS_FILE,
    RUN_FILE,
    SIGNATURES_FILE,
    rank_folder,
)
from tests.diagnosis.test_from_logs import write_model
from tests.ordered import Collective, all_reduce, end, lives_here, make_folder, steps, write_order
from tests.trace.logs import make_log


def verdict_on(folder: Path) -> Verdict:
    return judge(read_evidence(folder)[0])


def gaps_of(folder: Path) -> list[str]:
    """What is missing, where that is all that is wrong."""
    evidence, _ = read_evidence(folder)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.named) == ("cannot tell", ())
    return [gap.what for gap in evidence.gaps]


def ended(folder: Path, ranks: int = 3) -> Path:
    end(write_order(folder, {number: steps(5) for number in range(ranks)}), range(ranks))
    return folder


def test_a_rank_that_left_no_folder_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    shutil.rmtree(rank_folder(ended(tmp_path), 2))
    assert main(["diagnose", str(tmp_path)]) == 1
    golden("recording/missing_rank", capsys.readouterr().out)


def test_a_log_that_was_cut_short_is_named(tmp_path: Path) -> None:
    ended(tmp_path)
    path = rank_folder(tmp_path, 1) / group_file(0)
    os.truncate(path, HEADER_BYTES + 5 * ENTRY_BYTES)
    [gap] = gaps_of(tmp_path)
    assert gap.startswith(f"{path}: ")


def test_logs_that_are_gone_are_missed(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """Of one rank, then of all: nothing is called the same then."""
    ended(tmp_path)
    missed = []
    for number in range(3):
        (rank_folder(tmp_path, number) / group_file(0)).unlink()
        missed.append("; ".join(gaps_of(tmp_path)))
    golden("recording/missing_logs", "\n".join(missed))


def test_of_a_group_only_members_are_missed(tmp_path: Path) -> None:
    ended(tmp_path)
    write_order(tmp_path, {0: [all_reduce()], 1: [all_reduce()]}, group="pair", number=1, world_size=3)
    assert verdict_on(tmp_path).kind == "healthy"


def test_what_may_end_on_one_rank_alone_need_not_be_on_the_others(tmp_path: Path) -> None:
    """The root of a broadcast over gloo does not wait for anybody."""
    parting = replace(all_reduce(), op="broadcast", peer=0)
    end(write_order(tmp_path, {0: [*steps(2), Collective(signature=parting, step=1)], 1: steps(2)}), (0, 1))
    assert verdict_on(tmp_path).kind == "healthy"


def test_a_job_that_runs_is_not_missing_what_is_not_written_yet(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(5), 1: steps(4)}, close=False)
    for number in (0, 1):
        lives_here(tmp_path, number, os.getpid())
    lines = rank_folder(tmp_path, 1) / SIGNATURES_FILE
    lines.write_text(lines.read_text() + '{"signature": 9, "op"')
    (rank_folder(tmp_path, 1) / "group_1.log").write_bytes(bytes(2 * HEADER_BYTES))
    (rank_folder(tmp_path, 1) / EVENTS_FILE).write_bytes(bytes(2 * HEADER_BYTES))
    assert verdict_on(tmp_path).kind == "healthy"


def test_of_a_job_that_runs_nothing_need_be_copied_again(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(5), 1: steps(5)}, close=False)
    for number in (0, 1):
        lives_here(tmp_path, number, os.getpid())
    (rank_folder(tmp_path, 1) / RUN_FILE).write_text("{")
    (gap,) = read_evidence(tmp_path)[0].gaps
    assert (verdict_on(tmp_path).kind, "Copy" in gap.advice) == ("cannot tell", False)


@pytest.mark.parametrize("is_here", [True, False])
def test_a_job_that_ends_while_it_is_read_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_here: bool
) -> None:
    write_order(tmp_path, {0: steps(5), 1: steps(4)}, close=False)
    for number in (0, 1):
        if is_here:
            lives_here(tmp_path, number, os.getpid())

    def read_before_the_end(folders: dict[int, Path]) -> CollectiveLogs:
        logs = open_collective_logs(folders)
        end(tmp_path, (0, 1))
        return logs

    monkeypatch.setattr(from_recording, "open_collective_logs", read_before_the_end)
    evidence, _ = read_evidence(tmp_path)
    assert evidence.gaps == ()
    if is_here:
        assert judge(evidence).kind == "healthy"


def test_a_fault_that_the_rest_proves_is_still_that_fault(tmp_path: Path) -> None:
    late = steps(5)
    late.insert(7, Collective(signature=all_reduce("seen"), step=2))
    end(write_order(tmp_path, {0: steps(5), 1: late, 2: steps(5), 3: steps(5)}), range(4))
    shutil.rmtree(rank_folder(tmp_path, 3))
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.concerned) == ("missing collective", (0, 1, 2))


def test_all_ranks_that_joined_are_expected_whoever_trained_together(tmp_path: Path) -> None:
    ended(tmp_path, 2)
    for number in (0, 1):
        folder = rank_folder(tmp_path, number)
        write_json(folder / RUN_FILE, {"world_size": 3, "ranks": [0, 1]})
    assert verdict_on(tmp_path).kind == "healthy"
    write_json(rank_folder(tmp_path, 0) / JOINING_FILE, {"rank": 0, "world_size": 3})
    assert len(gaps_of(tmp_path)) == 1


def test_a_size_of_the_job_that_cannot_be_is_not_counted_up_to(tmp_path: Path) -> None:
    ended(tmp_path, 2)
    write_json(rank_folder(tmp_path, 0) / JOINING_FILE, {"rank": 0, "world_size": 2})
    write_json(rank_folder(tmp_path, 0) / RUN_FILE, {"world_size": 10**7})
    assert read_evidence(tmp_path)[0].gaps == ()


def test_a_rank_that_trained_has_an_event_log(tmp_path: Path) -> None:
    ended(tmp_path, 2)
    write_json(rank_folder(tmp_path, 1) / RUN_FILE, {"world_size": 2, "models": [{"model": 0}]})
    [gap] = gaps_of(tmp_path)
    assert "rank_1/events.log" in gap


@pytest.mark.parametrize("name", [EVENTS_FILE, group_file(1)])
def test_a_log_of_zeros_is_not_about_to_be_written_by_a_rank_that_has_ended(tmp_path: Path, name: str) -> None:
    path = rank_folder(ended(tmp_path), 1) / name
    path.write_bytes(bytes(2 * HEADER_BYTES))
    [gap] = gaps_of(tmp_path)
    assert gap.startswith(f"{path}: ")


def test_how_a_rank_ended_is_not_guessed_from_a_damaged_file(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(5), 1: steps(5)}, close=False)
    end(tmp_path, (0, 1))
    lives_here(tmp_path, 1, 2**22 - 1)
    path = rank_folder(tmp_path, 1) / ENDED_FILE
    path.write_text(path.read_text().replace("ended", "endet"))
    [gap] = gaps_of(tmp_path)
    assert gap.startswith(f"{path}: ")


def test_a_job_that_only_sent_and_received_is_healthy(tmp_path: Path) -> None:
    sent = replace(all_reduce(), op="send", reduce_op="", peer=1)
    received = replace(all_reduce(), op="recv", reduce_op="", peer=0)
    end(write_order(tmp_path, {0: [sent], 1: [received]}, point_to_point=True), (0, 1))
    assert verdict_on(tmp_path).kind == "healthy"


@pytest.mark.parametrize("has_events", [False, True])
def test_ranks_that_joined_launched_nothing_and_ended_are_healthy(tmp_path: Path, *, has_events: bool) -> None:
    for number in (0, 1):
        folder = make_folder(tmp_path, number, 2)
        if has_events:
            make_log(folder / EVENTS_FILE, 3)
    if not has_events:
        assert verdict_on(tmp_path).kind == "cannot tell", "how they ended is unknown"
    end(tmp_path, (0, 1))
    if has_events:
        assert verdict_on(tmp_path).kind == "cannot tell", "whether there were other logs is unknown"
        for number in (0, 1):
            write_manifest(rank_folder(tmp_path, number))
    assert verdict_on(tmp_path).kind == "healthy"


def test_lines_that_are_lost_are_no_difference(tmp_path: Path) -> None:
    """The logs agree; what some of the collectives of one rank were is not known any more."""
    ended(tmp_path)
    path = rank_folder(tmp_path, 1) / SIGNATURES_FILE
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first.replace("sum", "max"), *others]))
    [gap] = gaps_of(tmp_path)
    assert gap.startswith(f"{path}: line 1 ")


def test_what_the_buckets_say_nothing_of_is_believed_of_a_model(tmp_path: Path) -> None:
    ended(tmp_path)
    for number in range(3):
        write_model(tmp_path, number, bytes(3))
    path = rank_folder(tmp_path, 1) / PARAMETERS_FILE
    written = path.read_text()
    path.write_text(written.replace('"Net"', '"LoggingNet"'))
    assert verdict_on(tmp_path).kind == "healthy"
    path.write_text(written.replace('"frozen": []', '"frozen": ["c.weight"]'))
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.blamed) == ("models differ", (1,))


def test_recorded_parameters_are_believed_whatever_was_reduced(tmp_path: Path) -> None:
    ended(tmp_path)
    for number in range(3):
        write_model(tmp_path, number, bytes(3))
    path = rank_folder(tmp_path, 1) / PARAMETERS_FILE
    path.write_text(dump_json_line(json.loads(path.read_text().replace("b.bias", "b.bigs"))))
    assert len(gaps_of(tmp_path)) == 1, "its own plans have other parameters: the file is of another job"
    (rank_folder(tmp_path, 1) / PLANS_FILE).unlink()
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.blamed) == ("models differ", (1,))
