"""What launchers write down of the ends of processes."""

from __future__ import annotations

from pathlib import Path

from overlapscope.errors import Problem
from overlapscope.trace import clocks
from overlapscope.trace.process_files import ProcessExit, read_exits, write_exit


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_exit(tmp_path, 12, -9)
    write_exit(tmp_path, 13, 1, signaled_at_ns=7, signal_received=15)
    write_exit(tmp_path, 11, 1, is_command=True)
    problems: list[Problem] = []
    found = read_exits(tmp_path, problems)
    assert not problems
    assert [(each.pid, each.status, each.signaled_at_ns, each.signal_received, each.is_command) for each in found] == [
        (12, -9, None, None, False),
        (13, 1, 7, 15, False),
        (11, 1, None, None, True),
    ]
    assert {each.boot_id for each in found} == {clocks.get_boot_id()}
    assert all(isinstance(each, ProcessExit) and each.time_ns <= clocks.host_now_ns() for each in found)


def test_a_line_that_is_not_what_was_written_is_a_problem_and_no_evidence(tmp_path: Path) -> None:
    write_exit(tmp_path, 12, 1)
    (path,) = tmp_path.glob("exits_*.jsonl")
    path.write_text(path.read_text().replace('"status":1', '"status":0'))
    problems: list[Problem] = []
    assert read_exits(tmp_path, problems) == []
    assert "line 1 is damaged" in problems[0].message
