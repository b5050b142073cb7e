"""What must hold of everything that is said of a recording, whatever it is of.

No interval outside what is possible, no sentence against its table, and one number on all surfaces. Each check yields a
line for what does not hold, which begins with the name of the surface.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dashboards.forecast import predict_mean_step
from dashboards.pages import buckets, overview, stragglers
from dashboards.pages.breakdown import StepBar, build_breakdown_context
from dashboards.recording import RecordingCache
from dashboards.report.sections import ReportContent, build_report_content
from dashboards.runs import summarize_run
from overlapscope.advice.advice import Advice
from overlapscope.advice.worth_doing import find_improvements
from overlapscope.analysis import Analysis
from overlapscope.breakdown.text import describe_drift
from overlapscope.bucket_model.text import format_headline, format_limit
from overlapscope.compare.comparison import MAX_SEEN_SHARE, Comparison, compare
from overlapscope.compare.side import STEP, ComparisonSide, StepChoice
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.report.buckets import build_buckets_report
from overlapscope.report.compare import build_comparison_report
from overlapscope.report.render_json import render_json
from overlapscope.report.render_markdown import render_markdown, render_markdown_section
from overlapscope.report.report import Report
from overlapscope.report.stragglers import build_stragglers_report
from overlapscope.report.summary import build_breakdown_section, build_summary_report
from overlapscope.stragglers.delays import MIN_COST_SHARE
from overlapscope.stragglers.text import describe_verdict
from overlapscope.text import format_ns, format_share
from overlapscope.trace.recording import read_trace

_ROUNDING = 1e-6
_HARDLY = 0.05
"""Gain that is worth a thought: where it can't be excluded, no sentence says that nothing matters."""


def find_contradictions(folder: Path, other: Path | None = None) -> list[str]:
    """Return what does not hold of a recording, and of its comparison with another one."""
    snapshot = RecordingCache(folder).latest()
    report = build_report_content(snapshot)
    found = [*_of_summary(snapshot), *_of_stragglers(snapshot), *_of_run(folder, snapshot)]
    if report.advice is not None:
        found += [*_of_advice(snapshot, report.advice), *_of_improvements(snapshot, report.advice)]
    found += _of_pages(report)
    if other is not None:
        found += _of_comparison(snapshot, Analysis(read_trace(other)))
    return found


def _near(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or abs(one - other) <= max(1.0, _ROUNDING * abs(one))


def _of_report(report: Report, name: str) -> Iterator[str]:
    """Whatever is printed can be read, and is the same as JSON."""
    text = render_markdown(report, name)
    yield from _of_text(text, name)
    json.loads(render_json(report), parse_constant=_refuse)


def _of_text(text: str, name: str) -> Iterator[str]:
    if (odd := re.search(r"(?<![\w-])(nan|inf|None|NaT)\b|\{\w+\}", text)) is not None:
        yield f"{name}: prints {text[max(0, odd.start() - 40) : odd.end() + 20]!r}"


def _refuse(constant: str) -> Any:
    raise ValueError(f"JSON has {constant}")


def _of_intervals(content: Any, name: str, *, least: float = -math.inf, most: float = math.inf) -> Iterator[str]:
    """Every interval holds its value, and neither is beyond what is possible."""
    if isinstance(content, Interval):
        value, low, high = content.value, content.low, content.high
        if math.isnan(low) != math.isnan(high):
            yield f"{name}: half of an interval is unknown: {content}"
        if low > value + 1e-9 * abs(value) or high < value - 1e-9 * abs(value):
            yield f"{name}: the value is outside its interval: {content}"
        if min(value, low) < least - 1 or max(value, high) > most + 1:
            yield f"{name}: beyond what is possible, {least:.6g} to {most:.6g}: {content}"
    elif isinstance(content, Mapping):
        for key, each in content.items():
            yield from _of_intervals(each, f"{name}.{key}", least=least, most=most)


def _of_summary(analysis: Analysis) -> Iterator[str]:
    summary = analysis.summary
    yield from _of_report(build_summary_report(analysis), "summary")
    if not summary.steps:
        return
    mean, figures = summary.mean, summary.figures[summary.is_steady]
    by_step = figures.groupby("step")["step_time_ns"].mean()
    longest = float(by_step.max())
    yield from _of_intervals({"step": mean.step}, "summary", least=0, most=longest if summary.steps > 5 else math.inf)
    yield from _of_intervals({**mean.blocks, **summary.exposed_for, "hidden": summary.hidden}, "summary", least=0)
    if not _near(sum(each.value for each in mean.blocks.values()), mean.step.value):
        yield "summary: blocks don't sum to the step"
    if not _near(sum(each.value for each in summary.exposed_for.values()), mean.blocks["exposed"].value):
        yield "summary: reasons don't sum to exposed communication"
    if summary.job is not None and not _near(summary.job.step.value, mean.step.value):
        yield f"summary: the critical path takes {summary.job.step.value}, a step {mean.step.value}"
    for name, each in mean.blocks.items():
        if not -1e-9 <= summary.share_of(each) <= 1 + 1e-9:
            yield f"summary: {name} is {summary.share_of(each):.1%} of the step"
    if not math.isnan(summary.overlap_ratio) and not -1e-9 <= summary.overlap_ratio <= 1 + 1e-9:
        yield f"summary: {summary.overlap_ratio:.1%} of communication is hidden"
    drift = summary.drift
    if drift is not None:
        first, last = drift.first_ns, drift.last_ns
        if not min(by_step) - 1 <= min(first, last) <= max(first, last) <= max(by_step) + 1:
            yield "summary: drift beyond the recorded steps"
        if drift.steady is not None and not {*drift.steady} <= {*summary.steady.steps.tolist()}:
            yield f"summary: steady steps {drift.steady} that are not counted"
    ranks = summary.means_by_rank()
    if not _near(float(ranks["step_time_ns"].mean()), mean.step.value):
        yield "summary: the mean of all ranks is not that of the step"


def _of_stragglers(analysis: Analysis) -> Iterator[str]:
    report, found = build_stragglers_report(analysis), analysis.stragglers
    yield from _of_report(report, "stragglers")
    if found is None:
        return
    (section,) = report.sections
    step_ns, verdict = found.step_time_ns, describe_verdict(found)
    if analysis.summary.steps and not _near(step_ns, analysis.summary.mean.step.value):
        yield "stragglers: another step than the summary's"
    for name, saving, of_ns in (
        ("equal ranks", found.saved_if_ranks_equal, step_ns),
        ("best transfers", found.saved_by_best_transfers, step_ns),
        *((f"finding {number}", finding.saving, finding.step_ns) for number, finding in enumerate(found.findings)),
    ):
        yield from _of_intervals({"step": saving.step}, f"stragglers: {name}", most=1.01 * of_ns)
        if not _near(sum(each.value for each in saving.blocks.values()), saving.step.value):
            yield f"stragglers: blocks of what {name} saves don't sum to it"
        if saving.step.value < -MIN_COST_SHARE * of_ns:
            yield f"stragglers: {name} would save {format_ns(saving.step.value)}"
    rows = {int(row["rank"]): row for row in found.by_rank.to_dict("records")}
    for finding in found.findings:
        if not 0 <= finding.saving_share <= 1:
            yield f"stragglers: {finding.ranks} saves {finding.saving_share:.1%}"
        if finding.lateness_ns is not None and len(finding.ranks) == 1:
            row = rows[finding.ranks[0]]
            if not _near(finding.lateness_ns, row["lateness_ns"]) or not _near(
                finding.saving.step.value, row["saving_ns"]
            ):
                yield f"stragglers: sentence and table differ: {finding.saving.step.value}, {row}"
        if finding.saving.step.low > 0 and not set(finding.steps.tolist()) <= set(found.cycles.steps.tolist()):
            yield "stragglers: steps that are not compared"
    for name, table in (("rank", found.by_rank), ("host", found.by_host), ("cause", found.by_cause)):
        worst = float(table["saving_ns"].max()) if len(table) else 0.0
        if worst > step_ns + 1:
            yield f"stragglers: a {name} saves {worst / step_ns:.1%} of the step"
    for row in found.by_bucket.to_dict("records"):
        if row["best_ns"] <= 0 or row["saving_ns"] < -1 or row["saving_ns"] > step_ns:
            yield f"stragglers: {row}"
    cards = {number.key: number for number in section.numbers}
    is_nobody = verdict.startswith("No straggler found")
    if is_nobody and "fixed" in cards:
        yield f"stragglers: nobody is late, and a card says {cards['fixed'].label}"
    if not is_nobody and not found.findings and found.suspect is None:
        yield "stragglers: somebody is late, without a finding"
    if is_nobody and not math.isnan(found.waiting.value):
        saves = found.saved_if_ranks_equal.step.value
        if "No rank waits" in verdict and saves >= MIN_COST_SHARE * step_ns:
            yield f"stragglers: no rank waits, and equal ranks would save {format_ns(saves)} of {format_ns(step_ns)}"
    for key, saving in (
        ("equal_ranks", found.saved_if_ranks_equal),
        ("best_transfers", found.saved_by_best_transfers),
    ):
        if not _near(float(cards[key].value), step_ns - saving.step.value):  # type: ignore[arg-type]
            yield f"stragglers: card and table of {key} differ"
    for number in section.numbers:
        if float(number.value) < 0:  # type: ignore[arg-type]
            yield f"stragglers: {number.label} takes {number.text}"
    if found.suspect is not None:
        row = rows[found.suspect.rank]
        if not _near(found.suspect.saving_ns, row["saving_ns"]) or format_ns(row["saving_ns"]) not in verdict:
            yield "stragglers: the suspect's sentence and row differ"
        if found.suspect.late_steps > found.suspect.steps or found.suspect.steps > len(found.cycles.steps):
            yield "stragglers: more late steps than there are"


def _of_run(folder: Path, analysis: Analysis) -> Iterator[str]:
    """The row of a run and its metrics, which are computed from a second reading."""
    summary, row = analysis.summary, summarize_run(folder)
    known = {(one.family, *(value for _, value in one.labels)): 1e9 * one.value for one in row.samples}
    expected: dict[tuple[str, ...], float] = {}
    if summary.steps:
        expected = {
            ("overlapscope_step_seconds",): summary.mean.step.value,
            ("overlapscope_hidden_seconds",): summary.hidden.value,
            ("overlapscope_overlap_ratio",): 1e9 * summary.overlap_ratio,
            **{("overlapscope_block_seconds", name): each.value for name, each in summary.mean.blocks.items()},
            **{("overlapscope_exposed_seconds", name): each.value for name, each in summary.exposed_for.items()},
        }
        if row.step_ns != summary.mean.step.value or row.exposed_ns != summary.mean.blocks["exposed"].value:
            yield f"runs: {row.step_ns} and {row.exposed_ns}, the summary says otherwise"
    yield from (
        f"metrics: {key} is {known.get(key)}, the summary says {value}"
        for key, value in expected.items()
        if not _near(known.get(key, math.inf), value)
    )
    yield from (f"metrics: {one}" for one in row.samples if one.value < -1e-9)
    if row.is_fault:
        yield f"runs: {row.line}"


def _of_advice(analysis: Analysis, advice: Advice) -> Iterator[str]:
    found, summary = advice.recommendation, analysis.summary
    report = build_buckets_report(analysis.trace, advice)
    if summary.drift is not None and describe_drift(summary.drift) not in report.sections[0].notes:
        yield "recommend: nothing of the drift that the summary says"
    yield from _of_report(report, "recommend")
    recorded = summary.finished_together
    warm = recorded[recorded["step"] >= min([3, *summary.steady.steps.tolist()])]
    by_step = warm.groupby("step")["step_time_ns"].mean()
    measured = found.curve.measured
    for name, each in (
        *((f"size {number}", size) for number, size in enumerate(found.sizes)),
        ("default", found.default), ("now", found.now), ("best", found.best), ("best plan", found.free),
    ):  # fmt: skip
        yield from _of_intervals({"step": each.step_ns}, f"recommend: {name}", least=0)
        if not each.step_ns.low > 0:
            yield f"recommend: {name} may take {format_ns(each.step_ns.low)}"
        if len(by_step) and measured is not None:
            at_least, at_most = _possible_steps_ns(analysis, float(by_step.min()), float(by_step.max()))
            if each.step_ns.low < at_least or each.step_ns.high > at_most:
                yield (
                    f"recommend: {name} would take {format_ns(each.step_ns.low)} to {format_ns(each.step_ns.high)}, "
                    f"where steps took {format_ns(by_step.min())} to {format_ns(by_step.max())}"
                )
        if not -1 <= each.exposed_ns <= each.step_ns.value + 1:
            yield f"recommend: {format_ns(each.exposed_ns)} of {format_ns(each.step_ns.value)} exposed with {name}"
    for name, gain in (("gain", found.gain), ("default", found.gain_over_default), ("best plan", found.free_gain)):
        yield from _of_intervals({name: gain}, "recommend", most=0)
        if max(gain.value, gain.high) >= 1:
            yield f"recommend: {name} gains {gain}"
    if not _near(1e9 * found.gain.value, 1e9 * (1 - found.best.step_ns.value / found.now.step_ns.value)):
        yield "recommend: the gain is not that of the two steps"
    headline = format_headline(found)
    if found.has_choice and found.best.buckets != found.now.buckets:
        if found.verdict == "leave it" and found.gain.value > 0 and found.gain.high >= _HARDLY:
            yield f"recommend: {headline}"
        if found.verdict == "change" and found.gain.low <= 0:
            yield f"recommend: {headline}"
        if found.gain.value < 0 and "no other is predicted" not in headline:
            yield f"recommend: the best is slower: {headline}"
    if measured is not None and measured.plan == found.now.buckets and summary.steps:
        if not _near(found.now.step_ns.value, summary.mean.step.value):
            yield f"recommend: now {found.now.step_ns.value}, the summary says {summary.mean.step.value}"
        if not _near(found.now.exposed_ns, summary.mean.blocks["exposed"].value):
            yield f"recommend: {found.now.exposed_ns} exposed, the summary says {summary.mean.blocks['exposed'].value}"
        if found.best.buckets == found.now.buckets:
            share = format_share(summary.share_of(summary.mean.blocks["exposed"]))
            if f"{share} of it is exposed" not in format_limit(found.limits):
                yield f"recommend: {format_limit(found.limits)} The summary says {share}"
    for name in ("latency", "bandwidth", "communication", "exposed", "differences"):
        share = getattr(found.limits, name)
        if not math.isnan(share) and not -1e-6 <= share <= 1:
            yield f"recommend: without {name} the step would be {share:.1%} shorter"
    for change in found.what_ifs:
        if not 0 < change.step_ns < math.inf or change.gain > 1:
            yield f"recommend: {change}"
        is_less = change.kind in ("compression", "twice the bandwidth", "bucket views")
        if is_less and change.gain < -1e-9:
            yield f"recommend: {change.kind} makes the step {-change.gain:.1%} longer"


def _possible_steps_ns(analysis: Analysis, shortest: float, longest: float) -> tuple[float, float]:
    """Return between which bounds a step is with any buckets.

    No shorter than a half of the shortest recorded one without any communication, and no longer than twice the longest
    one if all its communication were exposed a few times.
    """
    figures = analysis.summary.figures[analysis.summary.is_steady]
    by_step = figures.groupby("step")[["exposed_ns", "hidden_ns"]].mean()
    least = max(0.0, shortest - float(by_step["exposed_ns"].max()) - float(by_step["hidden_ns"].max()))
    return least / 2, 2 * longest + 10 * float(by_step["hidden_ns"].max() + by_step["exposed_ns"].max())


def _of_improvements(analysis: Analysis, advice: Advice) -> Iterator[str]:
    for each in find_improvements(analysis, advice):
        yield from _of_intervals({each.what: each.saves}, "improvements", least=0, most=each.step_ns)
        if each.saves.value <= 0:
            yield f"improvements: {each.what} saves {each.saves.value}"


def _of_pages(content: ReportContent) -> Iterator[str]:
    """The pages, and the report that has them below each other."""
    analysis, advice = content.snapshot, content.advice
    report = "\n".join(line for section in content.sections for line in render_markdown_section(section))
    report = report.replace("\\", "")
    yield from _of_text(report.replace("=None", ""), "report")
    section = overview.build_overview_context(analysis)["section"]
    if section != build_breakdown_section(analysis.summary):
        yield "overview: another section than the summary's"
    wanted = [section.headline, *(number.text for number in section.numbers)]
    if analysis.stragglers is not None:
        context = stragglers.build_stragglers_context(analysis, analysis.stragglers)
        wanted.append(context["section"].headline)
        yield from _of_bars(context["bars"], "stragglers page")
    if advice is not None:
        wanted.append(buckets.build_advice_context(analysis.trace, advice)["section"].headline)
        curve = advice.recommendation.curve
        for index in {*curve.special.values(), curve.fastest}:
            predicted = predict_mean_step(analysis.summary.mean, curve, index)
            yield from _of_bars(
                build_breakdown_context(analysis.summary, ("Predicted", predicted))["bars"], "buckets page"
            )
            if analysis.summary.steps and not _near(
                sum(each.value for each in predicted.blocks.values()), predicted.step.value
            ):
                yield f"buckets page: blocks don't sum to the step of plan {index}"
    yield from (f"report: does not say {text}" for text in wanted if text not in report)


def _of_bars(bars: list[StepBar], name: str) -> Iterator[str]:
    for bar in bars:
        percent = sum(piece.percent for piece in bar.pieces)
        if percent > 100.01:
            yield f"{name}: the bar {bar.title} is {percent:.1f} % of the longest"


def _of_comparison(base: Analysis, new: Analysis) -> Iterator[str]:
    try:
        sides = [ComparisonSide.of(each, StepChoice()) for each in (base, new)]
    except OverlapScopeError:
        return
    found = compare(*sides)
    report = build_comparison_report(found, (STEP,), 0.0)
    yield from _of_report(report, "compare")
    yield from _of_changes(found)
    sentence = report.sections[0].headline
    is_same_content = base.trace.steps.equals(new.trace.steps)
    outcome = found.outcome(STEP, 0.0)
    if is_same_content and outcome in ("slower", "faster", "slower, but not surely enough"):
        yield f"compare: with itself: {sentence}"
    if is_same_content and found.unlike:
        yield f"compare: with itself: {found.unlike}"
    if found.unlike and not sentence.startswith("Not the same job"):
        yield f"compare: unlike jobs: {sentence}"
    for name, analysis, value in (("base", base, found.step.mean.base), ("new", new, found.step.mean.new)):
        if not _near(value, analysis.summary.mean.step.value):
            yield f"compare: the {name} takes {value}, the summary says {analysis.summary.mean.step.value}"


def _of_changes(found: Comparison) -> Iterator[str]:
    step = found.step.mean
    blocks = [found.changes[name].mean.ns.value for name in found.base.summary.mean.blocks]
    if not _near(sum(blocks), step.ns.value):
        yield "compare: blocks don't sum to the difference"
    for part, change in found.changes.items():
        for each in (change.mean, change.middle):
            yield from _of_intervals({part: each.ns}, "compare", least=-each.base)
        outcome, value = found.outcome(part, 0.0), change.mean.ns.value
        seen = found.share(change.seen_ns)
        if outcome == "no difference seen" and (abs(found.share(value)) > seen or seen > MAX_SEEN_SHARE):
            yield f"compare: no difference in {part}, which is {found.share(value):+.1%}; {seen:.1%} would be seen"
