"""A recording in a notebook: its figures as tables, and the chapters of its report as drawings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Final

import pandas as pd

from dashboards.recording import Recording
from dashboards.report.html import chapter_html
from dashboards.report.sections import Content, content_of
from overlapscope.account.wording import BLOCK_LABELS, REASON_LABELS
from overlapscope.analysis import sentences
from overlapscope.analysis.finding import Finding
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.model.recommend import Prediction
from overlapscope.model.sentences import headline

_HEIGHT_PX: Final = 640


@dataclass(frozen=True, eq=False)
class Answer:
    """A sentence, and the table that it rests on."""

    sentence: str
    table: pd.DataFrame

    def __repr__(self) -> str:
        return f"{self.sentence}\n\n{self.table.to_string()}"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self.sentence)}</b></p>{self.table.to_html()}"


@dataclass(frozen=True, eq=False)
class Drawing:
    """A chapter of the report, which a notebook shows in a frame of its own."""

    name: str
    html: str
    """A whole page, which needs neither a server nor a network."""

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.html) / 1000:,.0f} kB of HTML; a notebook shows it>"

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {_HEIGHT_PX}px; border: 0; resize: vertical"
        page = escape(self.html)
        return f'<iframe title="{self.name}" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


class Run:
    """A recording as it was when it was opened. Times in tables are nanoseconds.

    Args:
        path: the folder that ``overlapscope record -o`` wrote, or Flight Recorder dumps.

    Raises:
        OverlapScopeError: the folder has nothing to show.

    Example::

        import overlapscope as ov

        run = ov.open("traces/")
        run.account()
        run.timeline()
    """

    def __init__(self, path: Path | str) -> None:
        self._snapshot = Recording(Path(path)).newest()
        self.trace = self._snapshot.trace
        """All that was recorded, as tables."""

    def __repr__(self) -> str:
        return f"{self.trace.path}: {self._snapshot.summary.sentence}"

    @property
    def steps(self) -> pd.DataFrame:
        """What every rank's every step consists of, and whether it is counted in means."""
        summary = self._snapshot.summary
        return summary.figures.assign(is_counted=summary.is_alike)

    @property
    def ranks(self) -> pd.DataFrame:
        """The means of each rank."""
        return self._snapshot.rank_means

    @property
    def collectives(self) -> pd.DataFrame:
        """Every collective of gradient buckets, of every rank."""
        return self.trace.collectives

    def account(self) -> Answer:
        """What the mean step consists of: blocks that sum to it, and exposed communication by reason."""
        summary = self._snapshot.summary
        rows = []
        for name, mean in summary.mean.blocks.items():
            on_path = None if summary.job is None else summary.job.blocks[name].value
            rows.append(_row(BLOCK_LABELS[name], "", mean) | {"critical_path_ns": on_path})
            if name == "exposed":
                rows += [
                    _row(REASON_LABELS[each], BLOCK_LABELS[name], part) for each, part in summary.exposed_for.items()
                ]
        table = pd.DataFrame(rows)
        table["share"] = table["mean_ns"] / summary.mean.step.value
        return Answer(summary.sentence, table[table["mean_ns"] > 0].reset_index(drop=True))

    def stragglers(self) -> Answer:
        """Who makes the others wait, why, how often, and what fixing it would save.

        Raises:
            OverlapScopeError: ranks or steps can't be compared.
        """
        found = self._snapshot.stragglers
        if found is None:
            reason = sentences.why_none(self.trace)
            raise OverlapScopeError(f"{self.trace.path}: {reason.message} {reason.advice}")
        return Answer(sentences.verdict(found), pd.DataFrame([_finding(each) for each in found.findings]))

    def recommend(self) -> Answer:
        """The predicted step time of bucket sizes, and which one to set.

        Raises:
            OverlapScopeError: nothing can be predicted.
        """
        advice = self._content.advice
        if advice is None:
            reason = next((each.reason for each in self._content.sections if each.name == "buckets"), None)
            raise OverlapScopeError(f"{self.trace.path}: {reason['message'] if reason else 'it has no steps'}")
        found = advice.recommendation
        rows = [
            _size(each) | {"is_best": each.buckets == found.best.buckets, "is_now": each.buckets == found.now.buckets}
            for each in found.sizes
        ]
        return Answer(headline(found), pd.DataFrame(rows))

    def diagnose(self) -> Verdict | None:
        """What is wrong with the job; None without logs of collectives."""
        return None if self._snapshot.diagnosis is None else self._snapshot.diagnosis.verdict

    def overview(self) -> Drawing:
        """The account, what is worth doing, and how steps and ranks differ."""
        return self._draw("overview")

    def timeline(self) -> Drawing:
        """The typical step, to be zoomed."""
        return self._draw("timeline")

    def straggler_map(self) -> Drawing:
        """Findings, and the map of ranks and steps."""
        return self._draw("stragglers")

    def buckets(self) -> Drawing:
        """Step time by bucket size."""
        return self._draw("buckets")

    def order(self) -> Drawing:
        """The verdict, and the order of collectives that shows it."""
        return self._draw("order")

    @cached_property
    def _content(self) -> Content:
        return content_of(self._snapshot)

    def _draw(self, name: str) -> Drawing:
        return Drawing(name, chapter_html(self._content, name))


def _row(label: str, part_of: str, mean: Interval) -> dict[str, Any]:
    return {"block": label, "part_of": part_of, **_interval("mean", mean)}


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "ranks": finding.ranks,
        "host": finding.host,
        "link": None if finding.link is None else asdict(finding.link),
        "cause": finding.cause,
        "pattern": finding.pattern.kind,
        "steps": len(finding.steps),
        "worst_step": finding.worst_step,
        "delay_ns": finding.delay_ns,
        **_interval("cost", finding.cost),
        **_interval("saving", finding.saving.step),
        "sentence": sentences.describe(finding),
    }


def _size(prediction: Prediction) -> dict[str, Any]:
    return {
        "bucket_cap_mb": prediction.cap_mb,
        "buckets": len(prediction.buckets),
        **_interval("step", prediction.step_ns),
        "exposed_ns": prediction.exposed_ns,
        "recorded_ns": None if prediction.recorded_ns is None else prediction.recorded_ns.value,
    }


def _interval(name: str, interval: Interval) -> dict[str, float]:
    """Columns of a value and the ends of its 90 % interval."""
    return {f"{name}_ns": interval.value, f"{name}_low_ns": interval.low, f"{name}_high_ns": interval.high}
