"""Where the attempts of a job are, and in which order they come."""

from __future__ import annotations

from pathlib import Path

from overlapscope.trace.folders import (
    attempt_number,
    find_attempts,
    find_latest_attempt,
    find_sibling_attempts,
    restart_folder,
)
from overlapscope.trace.schema import JOINING_FILE


def begun(folder: Path) -> Path:
    (folder / "rank_0").mkdir(parents=True)
    (folder / "rank_0" / JOINING_FILE).touch()
    return folder


def test_attempts_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    first = begun(tmp_path / "traces")
    later = [begun(restart_folder(first, number)) for number in (1, 2, 10)]
    assert find_attempts(first) == [first, *later]
    assert list(map(attempt_number, find_attempts(first))) == [0, 1, 2, 10]
    assert find_latest_attempt(first) == later[-1]


def test_any_attempt_leads_to_all_of_them(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    first = begun(tmp_path / "traces")
    last = begun(restart_folder(first, 1))
    assert find_sibling_attempts(first) == find_sibling_attempts(last) == [first, last]
    monkeypatch.chdir(last)
    assert find_sibling_attempts(Path(".")) == [first, last]


def test_a_folder_in_which_no_rank_has_begun_is_no_attempt(tmp_path: Path) -> None:
    first = begun(tmp_path / "traces")
    (restart_folder(first, 1) / "rank_0").mkdir(parents=True)
    begun(first / "restart_of_something")
    assert find_attempts(first) == [first]
    assert find_latest_attempt(tmp_path / "new") == tmp_path / "new"


def test_a_recording_that_happens_to_have_such_a_name_stands_alone(tmp_path: Path) -> None:
    alone = begun(tmp_path / "restart_3")
    begun(tmp_path / "restart_4")
    assert find_sibling_attempts(alone) == [alone]
