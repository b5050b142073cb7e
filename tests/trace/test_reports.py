"""What a watchdog reports is what is read of it, also while it writes."""

from __future__ import annotations

from pathlib import Path

from overlapscope.trace.process_files import ReportLog, read_rank_reports, read_reports
from overlapscope.trace.schema import REPORTS_FILE

VERDICT = {"kind": "stuck", "sentence": "Rank 1 is stuck.", "blamed": [1]}


def test_reports_are_read_back_with_their_stacks(tmp_path: Path) -> None:
    number = ReportLog(tmp_path).add(VERDICT, "Rank 1 is stuck.\nStep 3.", step=3, process_state="S")
    (report,) = read_rank_reports(0, tmp_path, [])
    assert (report.rank, report.number, report.step, report.kind) == (0, number, 3, "stuck")
    assert (report.sentence, report.text) == ("Rank 1 is stuck.", "Rank 1 is stuck.\nStep 3.")
    assert report.verdict == VERDICT
    assert report.retracted_ns is None
    assert "test_reports.py" in report.stacks


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
