"""The board by which a watchdog says that it is awake."""

from __future__ import annotations

from pathlib import Path

from overlapscope.errors import Problem
from overlapscope.trace.live_files import pack_liveness, read_alive_file


def test_what_was_written_is_read_and_zeros_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "alive.bin").write_bytes(pack_liveness(5, 0, 7))
    problems: list[Problem] = []
    assert read_alive_file(tmp_path / "alive.bin", problems) == (5, None, 7)
    assert read_alive_file(tmp_path / "missing", problems) == (None, None, None)
    assert problems == []


def test_a_damaged_board_says_nothing_and_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "alive.bin"
    for place in range(32):
        content = bytearray(pack_liveness(5, 6, 7))
        content[place] ^= 0x10
        path.write_bytes(content)
        problems: list[Problem] = []
        assert read_alive_file(path, problems) == (None, None, None)
        assert [str(problem).partition(";")[0] for problem in problems] == [f"{path}: damaged"]
