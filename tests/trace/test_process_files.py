"""Reports of watchdogs and exits of processes are read as they were written."""

from __future__ import annotations

from pathlib import Path

from overlapscope.errors import Problem
from overlapscope.trace import clocks
from overlapscope.trace.process_files import (
    ProcessExit,
    ReportLog,
    read_exits,
    read_rank_reports,
    read_reports,
    write_exit,
)
from overlapscope.trace.schema import REPORTS_FILE

VERDICT = {"kind": "stuck", "sentence": "Rank 1 is stuck.", "blamed": [1]}


def test_reports_are_read_back_with_their_stacks(tmp_path: Path) -> None:
    number = ReportLog(tmp_path).add(VERDICT, "Rank 1 is stuck.\nStep 3.", step=3, process_state="S")
    (report,) = read_rank_reports(0, tmp_path, [])
    assert (report.rank, report.number, report.step, report.kind) == (0, number, 3, "stuck")
    assert (report.sentence, report.text) == ("Rank 1 is stuck.", "Rank 1 is stuck.\nStep 3.")
    assert report.verdict == VERDICT
    assert report.retracted_ns is None
    assert Path(__file__).name in report.stacks


def test_a_report_that_was_taken_back_says_when(tmp_path: Path) -> None:
    log = ReportLog(tmp_path)
    log.retract(log.add(VERDICT, "", step=0, process_state="S"))
    log.add(VERDICT, "", step=1, process_state="S")
    first, second = read_rank_reports(0, tmp_path, [])
    assert first.retracted_ns is not None
    assert first.retracted_ns >= first.time_ns
    assert second.retracted_ns is None


def test_reports_from_before_stay_and_numbers_go_on(tmp_path: Path) -> None:
    ReportLog(tmp_path).add(VERDICT, "before", step=0, process_state="S")
    assert ReportLog(tmp_path).add(VERDICT, "after", step=0, process_state="S") == 2
    assert [report.text for report in read_rank_reports(0, tmp_path, [])] == ["before", "after"]


def test_reports_of_all_ranks_come_by_time_without_damaged_lines(tmp_path: Path) -> None:
    for rank in (1, 0):
        (tmp_path / str(rank)).mkdir()
        ReportLog(tmp_path / str(rank)).add(VERDICT, f"rank {rank}", step=0, process_state="S")
    path = tmp_path / "1" / REPORTS_FILE
    path.write_text('{"damaged\n' + path.read_text() + '{"report": 2, "cut sho')
    reports = read_reports({rank: tmp_path / str(rank) for rank in range(3)})
    assert [report.text for report in reports] == ["rank 1", "rank 0"]
    problems: list = []
    read_rank_reports(1, tmp_path / "1", problems)
    assert [str(problem) for problem in problems] == [f"{path}: line 1 is damaged and skipped"]


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
