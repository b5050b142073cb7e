"""What comes of a fault of the laboratory: it is run once, and judged while it happens and when all is over."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from overlapscope.diagnosis.verdict import Verdict
from overlapscope.lab import jobs
from overlapscope.lab.catalog import Fault
from overlapscope.lab.jobs import diagnose
from overlapscope.lab.truth import check_verdict, find_fault_script
from tests.lab.reports import JobReport, load_reports
from tests.lab.warm_ranks import WarmRank
from tests.redact.copies import facts_of, redact


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out of a run."""

    reports: list[JobReport]
    """Of watchdogs, those taken back left out."""
    verdict: Verdict
    """Of the recording, while the ranks that hang are there."""
    later: Verdict
    """Of the recording, when all of them are gone."""
    elsewhere: Verdict
    """Of the recording on another host, which can't look whether the processes exist."""
    redacted: Verdict
    """Of a copy of it in which names are pseudonyms, so that no host is that of its processes."""
    left_out: tuple[str, ...]
    """Files and fields of the recording that the copy lacks, because the allow list does not know them."""
    fault_ns: int | None
    launcher_ns: int | None
    """When the launcher had its verdict, if the fault had ended all ranks by then."""

    @property
    def seconds(self) -> str:
        """From the fault to the first message."""
        if self.fault_ns is None:
            return "-"
        if self.reports:
            return f"{(self.reports[0].time_ns - self.fault_ns) / 1e9:.1f}"
        return "-" if self.launcher_ns is None else f"{(self.launcher_ns - self.fault_ns) / 1e9:.1f} after the end"

    def wrong(self, fault: Fault, world_size: int) -> dict[str, list[str]]:
        """What is not the truth: in the diagnosis, in the first message, and in the diagnosis afterwards."""
        verdicts = {"diagnosis": self.verdict, "afterwards": self.later}
        if self.reports:
            verdicts["message"] = self.reports[0].verdict
        wrong = {
            what: [str(check) for check in check_verdict(fault, world_size, verdict) if not check.is_right]
            for what, verdict in verdicts.items()
        }
        if fault.is_healthy and self.reports:
            wrong["message"] = [self.reports[0].verdict.sentence]
        elif not fault.is_healthy and not self.reports:
            wrong["message"] = ["none"] if self.launcher_ns is None else wrong["diagnosis"]
        if facts_of(self.redacted) != facts_of(self.elsewhere):
            wrong["copy"] = [f"{facts_of(self.redacted)} instead of {facts_of(self.elsewhere)}"]
        wrong["allow list"] = list(self.left_out)
        return {what: points for what, points in wrong.items() if points}


def run_fault(fault: Fault, world_size: int, *, wrapper: jobs.Wrapper) -> Outcome:
    """Run a fault to its end, and diagnose it on the way."""
    with tempfile.TemporaryDirectory(prefix="lab-fault-") as temporary:
        trace = Path(temporary, "trace")
        # A script that knows nothing of us is recorded from its interpreter's start on.
        start: jobs.Start = jobs.start_python if wrapper == "torch" else WarmRank
        with jobs.run_fault_job(find_fault_script(fault), world_size, wrapper=wrapper, trace=trace, start=start) as job:
            job.wait(patience_s=fault.patience_s)
            verdict, _ = diagnose(trace)
            launcher_ns = None if job.running() else time.monotonic_ns()
            fault_ns = job.fault_ns()
        later, _ = diagnose(trace)
        with mock.patch("socket.gethostname", return_value="elsewhere"):
            elsewhere, _ = diagnose(trace)
        left_out = redact(trace, Path(temporary, "copy")).left_out
        redacted, _ = diagnose(Path(temporary, "copy"))
        reports = [report for report in load_reports(trace) if not report.is_retracted]
    return Outcome(
        reports=reports,
        verdict=verdict,
        later=later,
        elsewhere=elsewhere,
        redacted=redacted,
        left_out=left_out,
        fault_ns=fault_ns,
        launcher_ns=launcher_ns,
    )
