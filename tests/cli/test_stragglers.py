"""``overlapscope stragglers``: who is late, when, and what that costs. A golden file has the text for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.command_line import overlapscope
from tests.synthetic import US, write_recording, write_straggling_recording

LATE_US = 2_000


def write_late_rank(folder: Path, *, late_rank: int | None = 1) -> Path:
    """Three ranks and steps of 10 ms; the late rank's forward takes 2 ms longer, and all wait for it."""
    return write_straggling_recording(
        folder, late_us=lambda rank, _: LATE_US if rank == late_rank else 0, ranks=3, steps=30
    )


def test_nobody_is_blamed_where_nobody_is_late(tmp_path: Path) -> None:
    assert stragglers_of(write_late_rank(tmp_path, late_rank=None))["findings"] == []


def test_a_rank_that_is_late_in_some_steps_is_late_in_every_one_of_these(tmp_path: Path) -> None:
    late_us = lambda rank, step: LATE_US if rank == 1 and step >= 30 else 0  # noqa: E731
    folder = write_straggling_recording(tmp_path, late_us=late_us, ranks=3, steps=60)
    (found,) = stragglers_of(folder)["findings"]
    assert (found["ranks"], found["pattern"], found["first_step"]) == ([1], "shift", 30)
    some = stragglers_of(folder, "--steps", "32:52")
    assert (some["steps"], some["steps_left_out"]) == (19, 1)
    assert [(found["ranks"], found["pattern"]) for found in some["findings"]] == [([1], "persistent")]
    assert stragglers_of(folder, "--steps", ":29")["findings"] == []
    assert stragglers_of(folder, "--steps", "32:33")["reason"]


def test_json_has_everything(tmp_path: Path) -> None:
    content = stragglers_of(write_late_rank(tmp_path))
    (finding,) = content["findings"]
    assert (finding["ranks"], finding["cause"], finding["pattern"]) == ([1], "compute", "persistent")
    assert finding["lateness_ns"] == finding["saving"]["step_ns"]["value"] == LATE_US * US
    assert finding["parts_ns"]["forward"] == LATE_US * US
    assert content["what_if"]["all_ranks_like_the_median"]["step_ns"]["value"] == LATE_US * US
    assert [row["rank"] for row in content["by_rank"]] == [0, 1, 2]
    assert content["reason"] is None


def test_one_rank_alone_is_a_reason_and_no_error(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, ranks=1)
    ran = overlapscope("stragglers", folder)
    content = stragglers_of(folder)
    assert ran.returncode == 0
    assert content["reason"] in ran.stdout
    assert "findings" not in content


def test_a_rank_whose_log_is_missing_is_said_on_stderr(tmp_path: Path) -> None:
    write_late_rank(tmp_path)
    (tmp_path / "rank_2" / "events.log").unlink()
    ran = overlapscope("stragglers", tmp_path, "--json")
    assert ran.returncode == 1
    assert "rank_2/events.log" in ran.stderr
    assert json.loads(ran.stdout)["ranks"] == [0, 1]


def stragglers_of(folder: Path, *options: str) -> dict[str, Any]:
    return json.loads(overlapscope("stragglers", "--json", folder, *options).stdout)
