"""``overlapscope diagnose``: the text for people, the JSON for programs, and the exit code for scripts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
    assert ran.stdout.count("\n") == 1


def test_a_fault_is_told_with_both_sequences_and_exit_code_1(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    ran = overlapscope("diagnose", with_extra_collective(tmp_path))
    assert (ran.returncode, ran.stderr) == (1, "")
    golden("cli/diagnose_fault", ran.stdout)


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
    assert gap["what"].startswith("rank 1 ")
    assert gap["advice"]


def test_what_could_not_be_read_goes_to_stderr_and_the_rest_is_judged(tmp_path: Path) -> None:
    with_extra_collective(tmp_path)
    (rank_folder(tmp_path, 2) / group_file(0)).write_bytes(b"nonsense")
    ran = overlapscope("diagnose", tmp_path, "--json")
    assert ran.returncode == 1
    assert str(rank_folder(tmp_path, 2) / group_file(0)) in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert json.loads(ran.stdout)["verdict"]["number"] == 11


def test_signatures_that_are_lost_leave_the_hashes(tmp_path: Path) -> None:
    with_extra_collective(tmp_path)
    for rank in range(3):
        (rank_folder(tmp_path, rank) / SIGNATURES_FILE).unlink()
    assert overlapscope("diagnose", tmp_path).returncode == 1


def test_a_job_of_many_ranks_fits_on_a_page(tmp_path: Path) -> None:
    orders = {rank: steps(4) for rank in range(40)}
    orders[17] = steps(3)
    write_order(tmp_path, orders, close=False)
    for rank in sorted({*orders} - {17}):
        fail(tmp_path, rank, "RuntimeError", "Connection closed by peer [10.0.0.1]:9")
    ran = overlapscope("diagnose", tmp_path)
    verdict = json.loads(overlapscope("diagnose", tmp_path, "--json").stdout)["verdict"]
    assert (verdict["kind"], verdict["blamed"]) == ("killed", [17])
    assert "  0-16, 18-39  failed" in ran.stdout
    assert len(ran.stdout.splitlines()) < 40


def of_three_attempts(folder: Path) -> Path:
    """The first failed, the second ended well, and the last has an order that differs."""
    fail(end_of_two(folder), 1, "ValueError", "no such label")
    end_of_two(folder / "restart_1")
    with_extra_collective(folder / "restart_3")
    return folder


def test_of_a_job_that_was_started_again_a_line_says_why_each_attempt_ended(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    folder = of_three_attempts(tmp_path)
    ran = overlapscope("diagnose", folder)
    assert ran.returncode == 1
    golden("cli/diagnose_attempts", ran.stdout.replace(str(folder), "traces"))


@pytest.mark.parametrize("ask", [["--attempt", 1], "restart_1"], ids=["by number", "by folder"])
def test_another_attempt_can_be_asked_for(tmp_path: Path, ask: object) -> None:
    folder = of_three_attempts(tmp_path)
    asked = [folder, *ask] if isinstance(ask, list) else [folder / str(ask)]
    ran = overlapscope("diagnose", *asked)
    assert len(ran.stdout.splitlines()) == 6
    assert ran.returncode == 0
    content = json.loads(overlapscope("diagnose", *asked, "--json").stdout)
    assert (content["path"], content["verdict"]["kind"]) == (str(folder / "restart_1"), "healthy")


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
    for number, shown in ((0, folder), (1, folder / "restart_1")):
        note = overlapscope("summary", shown).stderr.splitlines()[0]
        assert note.startswith("note: ")
        assert f"attempt {number}" in note
        assert set(re.findall(r"Attempt (\d)", note)) == {"0", "1", "3"} - {str(number)}
    assert "attempt" not in overlapscope("summary", end_of_two(tmp_path / "once")).stderr
