"""``overlapscope diagnose``: the text for people, the JSON for programs, and the exit code for scripts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from overlapscope.cli.main import main
from overlapscope.trace.collective_log import group_file
from overlapscope.trace.schema import SIGNATURES_FILE, rank_folder
from tests.cli.command_line import overlapscope, overlapscope_process
from tests.ordered import Collective, all_reduce, end, fail, steps, write_order

EXTRA = Collective(signature=all_reduce("seen"), step=3, line=88)


def with_extra_collective(folder: Path) -> Path:
    """Rank 1 of three has an all-reduce of its own in step 3."""
    late = steps(5)
    late.insert(10, EXTRA)
    return write_order(folder, {0: steps(5), 1: late, 2: steps(5)}, close=False)


def end_of_two(folder: Path) -> Path:
    """Two ranks that have ended well."""
    end(write_order(folder, {0: steps(5), 1: steps(5)}), (0, 1))
    return folder


def test_a_healthy_job_gets_one_line_and_exit_code_0(tmp_path: Path) -> None:
    ran = overlapscope_process("diagnose", end_of_two(tmp_path))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "All ranks finished: 15 collectives in 1 group are the same on all ranks.\n"


def test_a_fault_is_told_with_both_sequences_and_exit_code_1(tmp_path: Path) -> None:
    ran = overlapscope("diagnose", with_extra_collective(tmp_path))
    assert (ran.returncode, ran.stderr) == (1, "")
    sentence, *rest = ran.stdout.splitlines()
    assert sentence.startswith("In step 3 rank 1 launched all_reduce(sum) of 1 float32 (seen) at train.py:88 (main)")
    (row,) = [line for line in rest if line.startswith("  > ")]
    assert row.split("step 3: ")[1:] == [
        "all_reduce(sum) of bucket 1, 2,000 float32  ",
        "all_reduce(sum) of 1 float32 (seen)",
    ]
    assert "What to try:" in rest


def test_programs_get_the_verdict_the_ranks_and_the_groups(tmp_path: Path) -> None:
    ran = overlapscope("diagnose", with_extra_collective(tmp_path), "--json")
    content = json.loads(ran.stdout)
    assert ran.returncode == 1
    verdict = content["verdict"]
    assert (verdict["kind"], verdict["blamed"], verdict["step"], verdict["number"]) == (
        "missing collective",
        [1],
        3,
        11,
    )
    assert verdict["call_sites"]["1"] == {"file": "train.py", "line": 88, "function": "main"}
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1, 2]
    assert content["groups"][0]["latest"] == {"0": 15, "1": 16, "2": 15}
    assert (content["gaps"], content["problems"]) == ([], [])


def test_programs_get_what_is_missing_and_what_to_do_about_it(tmp_path: Path) -> None:
    shutil.rmtree(rank_folder(end_of_two(tmp_path), 1))
    (gap,) = json.loads(overlapscope("diagnose", tmp_path, "--json").stdout)["gaps"]
    assert gap["what"] == "rank 1 left no folder here"
    assert gap["advice"].startswith("Copy the rank_* folders")


def test_what_could_not_be_read_goes_to_stderr_and_the_rest_is_judged(tmp_path: Path) -> None:
    with_extra_collective(tmp_path)
    (rank_folder(tmp_path, 2) / group_file(0)).write_bytes(b"nonsense")
    ran = overlapscope("diagnose", tmp_path)
    assert ran.returncode == 1
    assert "not a collective log" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert "There is no collective 11 of rank 2 to compare with." in ran.stdout


def test_signatures_that_are_lost_leave_the_hashes(tmp_path: Path) -> None:
    with_extra_collective(tmp_path)
    for rank in range(3):
        (rank_folder(tmp_path, rank) / SIGNATURES_FILE).unlink()
    assert overlapscope("diagnose", tmp_path).returncode == 1


@pytest.mark.parametrize("content", [None, "empty", "file"])
def test_what_is_no_recording_is_refused_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "traces"
    if content == "empty":
        path.mkdir()
    elif content == "file":
        path.write_text("nothing")
    assert main(["diagnose", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"overlapscope diagnose: {path}: ")
    assert len(printed.err.splitlines()) == 1


def test_a_job_of_many_ranks_fits_on_a_page(tmp_path: Path) -> None:
    orders = {rank: steps(4) for rank in range(40)}
    orders[17] = steps(3)
    write_order(tmp_path, orders, close=False)
    for rank in sorted({*orders} - {17}):
        fail(tmp_path, rank, "RuntimeError", "Connection closed by peer [10.0.0.1]:9")
    ran = overlapscope("diagnose", tmp_path)
    assert ran.stdout.startswith("Rank 17 was killed, or ended by os._exit, without logging an error")
    assert "  0-16, 18-39  failed" in ran.stdout
    assert len(ran.stdout.splitlines()) < 40


def of_three_attempts(folder: Path) -> Path:
    """The first failed, the second ended well, and the last has an order that differs."""
    fail(end_of_two(folder), 1, "ValueError", "no such label")
    end_of_two(folder / "restart_1")
    with_extra_collective(folder / "restart_3")
    return folder


def test_of_a_job_that_was_started_again_a_line_says_why_each_attempt_ended(tmp_path: Path) -> None:
    folder = of_three_attempts(tmp_path)
    ran = overlapscope("diagnose", folder)
    lines = ran.stdout.splitlines()
    assert lines[0].startswith(f"Attempt 0 ({folder}): Rank 1 failed")
    assert lines[0].endswith("ValueError: no such label.")
    assert lines[1] == f"Attempt 1 ({folder / 'restart_1'}) came to its end."
    assert lines[2] == "Attempt 2 left nothing: no rank came to init_process_group."
    assert lines[3].startswith(f"Attempt 3 ({folder / 'restart_3'}): In step 3 rank 1 launched all_reduce")
    assert lines[4] == ""
    assert lines[5].startswith("In step 3 rank 1 launched all_reduce")
    assert ran.returncode == 1


@pytest.mark.parametrize("ask", [["--attempt", 1], "restart_1"], ids=["by number", "by folder"])
def test_another_attempt_can_be_asked_for(tmp_path: Path, ask: object) -> None:
    folder = of_three_attempts(tmp_path)
    asked = [folder, *ask] if isinstance(ask, list) else [folder / str(ask)]
    ran = overlapscope("diagnose", *asked)
    assert len(ran.stdout.splitlines()) == 6
    assert ran.stdout.endswith("\n\nAll ranks finished: 15 collectives in 1 group are the same on all ranks.\n")
    assert ran.returncode == 0


def test_an_attempt_that_there_is_not_is_named(tmp_path: Path) -> None:
    ran = overlapscope("diagnose", of_three_attempts(tmp_path), "--attempt", 7)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "there is no attempt 7; attempts: 0, 1, 3" in ran.stderr


def test_programs_get_all_attempts(tmp_path: Path) -> None:
    folder = of_three_attempts(tmp_path)
    content = json.loads(overlapscope("diagnose", folder, "--json").stdout)
    found = [(each["number"], each["path"], each["kind"]) for each in content["attempts"]]
    assert found == [
        (0, str(folder), "failed"),
        (1, str(folder / "restart_1"), "healthy"),
        (3, str(folder / "restart_3"), "missing collective"),
    ]
    assert content["path"] == str(folder / "restart_3")
    assert content["verdict"]["sentence"] == content["attempts"][-1]["sentence"]
    assert json.loads(overlapscope("diagnose", end_of_two(tmp_path / "once"), "--json").stdout)["attempts"] == []


def test_other_commands_say_of_which_attempt_a_recording_is(tmp_path: Path) -> None:
    folder = of_three_attempts(tmp_path)
    said = overlapscope("summary", folder).stderr
    assert f"note: This is attempt 0 of the job. Attempt 1 ({folder / 'restart_1'}) came to its end. Attempt 3" in said
    said = overlapscope("summary", folder / "restart_1").stderr
    assert f"note: This is attempt 1 of the job. Attempt 0 ({folder}): Rank 1 failed" in said
    assert "attempt" not in overlapscope("summary", end_of_two(tmp_path / "once")).stderr
