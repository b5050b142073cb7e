"""Notebook API: the figures of a recording as pandas tables, and the chapters of its report as drawings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Final

import pandas as pd

from dashboards.recording import RecordingCache
from dashboards.report.html import render_section_html
from dashboards.report.sections import ReportContent, build_report_content
from dashboards.saving import breakdown_table, findings_table, ranks_table, steps_table
from overlapscope.breakdown.text import describe_summary
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError
from overlapscope.interop.table_files import LogScalars, log_steps
from overlapscope.report.buckets import build_buckets_section
from overlapscope.report.render_frames import render_frame
from overlapscope.stragglers import text
from overlapscope.trace.table_file import StepRange

_HEIGHT_PX: Final = 640


@dataclass(frozen=True, eq=False)
class Answer:
    """A sentence and the table that supports it."""

    sentence: str
    table: pd.DataFrame

    def __repr__(self) -> str:
        return f"{self.sentence}\n\n{self.table.to_string()}"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self.sentence)}</b></p>{self.table.to_html()}"


@dataclass(frozen=True, eq=False)
class Drawing:
    """A chapter of the report, which a notebook shows in an iframe."""

    name: str
    html: str
    """Self-contained page, which needs neither a server nor a network."""

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.html) / 1000:,.0f} kB of HTML; a notebook shows it>"

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {_HEIGHT_PX}px; border: 0; resize: vertical"
        page = escape(self.html)
        return f'<iframe title="{self.name}" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


class OpenedRecording:
    """A recording as it was when it was opened. Times in tables are nanoseconds.

    Args:
        path: the folder that ``overlapscope record -o`` wrote, or Flight Recorder dumps.
        steps: (start, stop) of the steps to read; None for all, or for the last ones if the recording is long and live
            or does not fit into memory; ``trace.extent`` says which.

    Raises:
        OverlapScopeError: the folder has nothing to show.

    Example::

        import overlapscope as ov

        run = ov.open("traces/")
        run.breakdown()
        run.timeline()
    """

    def __init__(self, path: Path | str, steps: StepRange | None = None) -> None:
        self._snapshot = RecordingCache(Path(path)).latest(which=steps)
        self.trace = self._snapshot.trace
        """The recorded data as tables."""

    def __repr__(self) -> str:
        step = self.trace.steps["step"]
        some = "" if self.trace.extent == "all" or step.empty else f" (steps {step.min()} to {step.max()})"
        return f"{self.trace.path}{some}: {describe_summary(self._snapshot.summary)}"

    @property
    def steps(self) -> pd.DataFrame:
        """Return the breakdown of every step of every rank, and whether it is included in means."""
        return steps_table(self._snapshot.summary)

    @property
    def ranks(self) -> pd.DataFrame:
        """Return the means of each rank, with its host and device."""
        return ranks_table(self._snapshot)

    @property
    def collectives(self) -> pd.DataFrame:
        """Return every collective of gradient buckets, of every rank."""
        return self.trace.collectives

    def breakdown(self) -> Answer:
        """Return the breakdown of the mean step: blocks that sum to it, and exposed communication by reason."""
        summary = self._snapshot.summary
        return Answer(describe_summary(summary), breakdown_table(summary))

    def stragglers(self) -> Answer:
        """Find the stragglers: which ranks delay the others, why, how often, and what fixing it would save.

        Raises:
            OverlapScopeError: ranks or steps can't be compared.
        """
        found = self._snapshot.stragglers
        if found is None:
            reason = text.explain_missing_stragglers(self.trace)
            raise OverlapScopeError(f"{self.trace.path}: {reason.message} {reason.advice}")
        return Answer(text.describe_verdict(found), findings_table(found))

    def recommend(self) -> Answer:
        """Predict the step time of bucket sizes, and recommend one.

        Raises:
            OverlapScopeError: nothing can be predicted.
        """
        advice = self._content.advice
        if advice is None:
            reason = next((each.basis for each in self._content.sections if each.name == "buckets"), "it has no steps")
            raise OverlapScopeError(f"{self.trace.path}: {reason}")
        section = build_buckets_section(advice)
        return Answer(section.headline, render_frame(section.tables[0]))

    def diagnose(self) -> Verdict | None:
        """Return the verdict on faults of the job; None without logs of collectives."""
        return None if self._snapshot.diagnosis is None else self._snapshot.diagnosis.verdict

    def log_to(self, log: LogScalars, after_step: int = -1) -> int:
        """Log the breakdown of each step that all ranks have finished to an experiment tracker.

        Args:
            log: called with scalars by name and ``step=``, like ``mlflow.log_metrics`` and ``wandb.log``. Times are in
                milliseconds, means over the ranks.
            after_step: log only later steps.

        Returns:
            The last step logged, for the next call if the recording is live.
        """
        return log_steps(self._snapshot.summary, log, after_step)

    def overview(self) -> Drawing:
        """Draw the step-time breakdown, suggestions, and the differences between steps and ranks."""
        return self._draw("overview")

    def timeline(self) -> Drawing:
        """Draw a zoomable timeline of the typical step."""
        return self._draw("timeline")

    def straggler_map(self) -> Drawing:
        """Draw the straggler findings, and the heatmap of ranks and steps."""
        return self._draw("stragglers")

    def buckets(self) -> Drawing:
        """Draw the predicted step time by bucket size."""
        return self._draw("buckets")

    def order(self) -> Drawing:
        """Draw the verdict and the order of collectives that supports it."""
        return self._draw("order")

    @cached_property
    def _content(self) -> ReportContent:
        return build_report_content(self._snapshot)

    def _draw(self, name: str) -> Drawing:
        return Drawing(name, render_section_html(self._content, name))
