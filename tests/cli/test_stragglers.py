"""``overlapscope stragglers``: the text for people and the JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command_line import overlapscope, overlapscope_process
from tests.synthetic import US, write_recording, write_straggling_recording

LATE_US = 2_000


def write_late_rank(folder: Path, *, late_rank: int | None = 1) -> Path:
    """Three ranks and steps of 10 ms; the late rank's forward takes 2 ms longer, and all wait for it."""
    return write_straggling_recording(
        folder, late_us=lambda rank, _: LATE_US if rank == late_rank else 0, ranks=3, steps=30
    )


def test_the_late_rank_its_cause_and_its_cost_are_said_first(tmp_path: Path) -> None:
    ran = overlapscope_process("stragglers", write_late_rank(tmp_path))
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0] == f"{tmp_path}: 26 steps of 3 ranks on one clock, 4 steps left out"
    assert lines[2].startswith(
        "Rank 1 computes 2.00 ms longer than the median rank in every step (forward), which costs "
    )
    assert "sign test" in lines[3]
    (as_recorded,) = [line.split() for line in lines if line.startswith(" as recorded")]
    (all_alike,) = [line.split() for line in lines if line.startswith(" all ranks at the")]
    assert as_recorded[-2:] == ["12.0", "ms"]
    assert all_alike[-11:] == ["median", "10.0", "ms", "2.00", "ms", "2.00", "to", "2.00", "ms", "17", "%"]


def test_nobody_is_blamed_where_nobody_is_late(tmp_path: Path) -> None:
    ran = overlapscope("stragglers", write_late_rank(tmp_path, late_rank=None))
    assert ran.returncode == 0
    assert "No straggler found." in ran.stdout


def test_a_rank_that_is_late_in_some_steps_is_late_in_every_one_of_these(tmp_path: Path) -> None:
    late_us = lambda rank, step: LATE_US if rank == 1 and step >= 30 else 0  # noqa: E731
    folder = write_straggling_recording(tmp_path, late_us=late_us, ranks=3, steps=60)
    assert " from step 30 on " in overlapscope("stragglers", folder).stdout
    some = overlapscope("stragglers", folder, "--steps", "32:52").stdout.splitlines()
    assert some[0] == f"{tmp_path}: 19 steps (only 32 to 51 were read) of 3 ranks on one clock, 1 step left out"
    assert some[2].startswith("Rank 1 computes 2.00 ms longer than the median rank in every step")
    assert "No straggler found." in overlapscope("stragglers", folder, "--steps", ":29").stdout
    none = overlapscope("stragglers", folder, "--steps", "32:33").stdout
    assert none.endswith("What was read has 1 finished step.\nChoose more steps.\n")
    ran = overlapscope("stragglers", folder, "--steps", "80:")
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert "has no step from 80 on; it has 0 to 59" in ran.stderr


def test_json_has_everything(tmp_path: Path) -> None:
    ran = overlapscope("stragglers", "--json", write_late_rank(tmp_path))
    content = json.loads(ran.stdout)
    (finding,) = content["findings"]
    assert (finding["ranks"], finding["cause"], finding["pattern"]) == ([1], "compute", "persistent")
    assert finding["cost_ns"]["value"] == finding["saving"]["step_ns"]["value"] == LATE_US * US
    assert finding["parts_ns"]["forward"] == LATE_US * US
    assert content["what_if"]["all_ranks_like_the_median"]["step_ns"]["value"] == LATE_US * US
    assert [row["rank"] for row in content["by_rank"]] == [0, 1, 2]
    assert content["reason"] is None


def test_one_rank_alone_is_a_reason_and_no_error(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, ranks=1)
    ran = overlapscope("stragglers", folder)
    assert ran.returncode == 0
    assert "this recording has only one rank.\nIf the run had more, copy" in ran.stdout
    content = json.loads(overlapscope("stragglers", "--json", folder).stdout)
    assert content["reason"].endswith("this recording has only one rank.")
    assert "findings" not in content


def test_a_rank_whose_log_is_missing_is_said_on_stderr(tmp_path: Path) -> None:
    write_late_rank(tmp_path)
    (tmp_path / "rank_2" / "events.log").unlink()
    ran = overlapscope("stragglers", tmp_path)
    assert ran.returncode == 1
    assert "rank_2/events.log" in ran.stderr
    assert ran.stdout.splitlines()[0].startswith(f"{tmp_path}: 26 steps of 2 ranks")
