"""Build the report of ``overlapscope summary``: where the step time goes, and how much communication is hidden."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from overlapscope.analysis import Analysis
from overlapscope.breakdown.summary import Summary
from overlapscope.breakdown.text import (
    BLOCK_LABELS,
    REASON_LABELS,
    describe_drift,
    describe_excluded,
    describe_summary,
    describe_uncounted_ranks,
)
from overlapscope.chunked_analysis import ChunkedAnalysis
from overlapscope.diagnosis.attempts import read_attempts
from overlapscope.interval import Interval
from overlapscope.report.communication import build_communication_sections, collect_communication
from overlapscope.report.diagnosis import collect_attempts
from overlapscope.report.machine import build_machine_sections, collect_machine
from overlapscope.report.report import INDENT, Column, Number, Report, Row, Section, Table, list_rows
from overlapscope.stragglers.text import describe_headline, describe_verdict
from overlapscope.text import Value, count_of, format_interval_ns, format_ns, format_share
from overlapscope.trace.description import (
    CONFIDENTIAL,
    describe_backend,
    describe_chosen_steps,
    describe_clocks,
    describe_models,
    describe_strategies,
)
from overlapscope.trace.off_steps import describe_all_off_steps
from overlapscope.trace.recording import Trace

_STEPS_AT_EACH_END: Final = 3
_MAX_RANKS_WITH_STEPS: Final = 8
"""Number of ranks whose first and last steps are shown; of more ranks, only the means."""
_MEANS: Final = (
    Column("step_time_ns", "step time", "ms"),
    Column("compute_ns", "compute", "ms"),
    Column("communication_ns", "comm.", "ms"),
    Column("hidden_ns", "hidden", "ms"),
    Column("exposed_ns", "exposed", "ms"),
    Column("overlap_ratio", "ratio", "ratio"),
)


def build_summary_report(analysis: Analysis) -> Report:
    """Build the report from the analysis of a recording."""
    trace, summary = analysis.trace, analysis.summary
    breakdown = build_breakdown_section(summary)
    return Report(
        facts=(describe_recording(trace),),
        sections=(
            replace(breakdown, notes=(*_describe_stragglers(analysis), *breakdown.notes)),
            *build_communication_sections(summary),
            *build_machine_sections(analysis.machine),
        ),
        content=_collect_content(trace, summary) | {"machine": collect_machine(analysis.machine)},
    )


def build_breakdown_section(summary: Summary) -> Section:
    """Build the section on the mean step: its blocks, which add up, and the means of each rank."""
    if not len(summary.figures):
        return Section(name="breakdown", title="Step-time breakdown", headline=describe_summary(summary))
    notes = []
    if summary.drift is not None:
        notes.append(describe_drift(summary.drift))
    if summary.steady.excluded:
        notes.append(f"Excluded: {describe_excluded(summary.steady.excluded)}.")
    if summary.steady.excluded_ranks:
        notes.append(describe_uncounted_ranks(summary.steady.excluded_ranks))
    return Section(
        name="breakdown",
        title="Step-time breakdown",
        headline=describe_summary(summary),
        basis=_describe_basis(summary),
        notes=tuple(notes),
        numbers=tuple(_list_numbers(summary)),
        tables=(
            *([_tabulate_blocks(summary)] if summary.steps else []),
            _tabulate_ranks(summary),
            _tabulate_steps(summary),
        ),
    )


def _describe_stragglers(analysis: Analysis) -> Iterator[str]:
    """Yield what is said of stragglers on one line, as the Overview page says it; of too large a recording, where."""
    if not analysis.summary.steps:
        return
    if (found := analysis.stragglers) is not None:
        yield describe_headline(found) or describe_verdict(found)
    elif isinstance(analysis, ChunkedAnalysis):
        yield "'overlapscope stragglers' says whether ranks wait for a straggler."


def _describe_basis(summary: Summary) -> str:
    if not summary.steps:
        return ""
    is_sample = any(excluded.why == "light" for excluded in summary.steady.excluded)
    sample = ", the sample that was recorded in full" if is_sample else ""
    return f"Means of {count_of(summary.steps, 'step')} of {count_of(summary.ranks, 'rank')}{sample}."


def _list_numbers(summary: Summary) -> Iterator[Number]:
    if not summary.steps:
        return
    step, exposed = summary.mean.step, summary.mean.blocks["exposed"]
    hidden = "no communication was recorded"
    if summary.communication_ns:
        hidden = f"{format_ns(summary.hidden.value)} of {format_ns(summary.communication_ns)} is hidden"
    interval = "" if math.isnan(step.low) else f"90 %: {format_interval_ns(step)}"
    yield Number(key="step", label="Step time", value=step, unit="ns", note=interval)
    for key, label, time_ns in (
        ("compute", "Compute", summary.compute_ns),
        ("exposed", "Exposed communication", exposed.value),
    ):
        share = f"{format_share(time_ns / step.value)} of the step"
        yield Number(key=key, label=label, value=time_ns, unit="ns", note=share)
    yield Number(key="overlap", label="Overlap ratio", value=summary.overlap_ratio, unit="share", note=hidden)


def _tabulate_blocks(summary: Summary) -> Table:
    """Tabulate the blocks of the mean step, exposed communication also by reason, and what the job waited for."""
    rows = [*_generate_block_rows(summary), _block_row("step", summary, summary.mean.step, summary.mean.step)]
    return Table(
        name="breakdown",
        title="Step-time breakdown, in milliseconds",
        columns=(
            Column("label", "", "text"),
            Column("mean", "mean", "ms"),
            Column("mean", "90 % interval", "ms range"),
            Column("share", "share", "share"),
            *([] if summary.job is None else [Column("critical_path", "critical path", "ms")]),
        ),
        rows=tuple(rows),
        groups=(len(rows) - 2,),
    )


def describe_recording(trace: Trace) -> str:
    """Describe a recording on one line: model, ranks, clocks, backend, steps, versions and date, as far as known."""
    run = trace.run
    facts = [
        f"{trace.path}: {describe_models(run) or 'unknown model'}",
        f"{len(trace.ranks)} of {run.get('world_size', '?')} ranks",
        describe_clocks(trace),
    ]
    facts += [f"backend {backend}"] if (backend := describe_backend(run)) else []
    facts += [f"strategy {strategy}"] if (strategy := describe_strategies(run)) else []
    facts += [count_of(trace.steps["step"].nunique(), "step") + describe_chosen_steps(trace)]
    facts += [f"off {steps}" for steps in describe_all_off_steps(trace.modes)]
    facts += [f"{name} {version}" for name, version in run.get("versions", {}).items() if name == "torch"]
    facts += ["names are pseudonyms"] if CONFIDENTIAL in run else []
    if "started_unix_ns" in run:
        facts.append(f"recorded {datetime.fromtimestamp(run['started_unix_ns'] / 1e9):%Y-%m-%d %H:%M}")
    return ", ".join(facts)


def _generate_block_rows(summary: Summary) -> Iterator[Row]:
    for name, mean in summary.mean.blocks.items():
        on_path = None if summary.job is None else summary.job.blocks[name]
        if mean.value or (on_path is not None and on_path.value):
            yield _block_row(BLOCK_LABELS[name], summary, mean, on_path) | {"block": name}
        if name == "exposed":
            for reason, part in summary.exposed_for.items():
                if part.value:
                    yield _block_row(INDENT + REASON_LABELS[reason], summary, part, None)


def _block_row(label: str, summary: Summary, mean: Interval, on_path: Interval | None) -> dict[str, Value]:
    return {"label": label, "mean": mean, "share": summary.share_of(mean), "critical_path": on_path}


def _tabulate_ranks(summary: Summary) -> Table:
    return Table(
        name="ranks",
        title="Ranks: means of the same steps, in milliseconds",
        columns=(Column("rank", "", "rank"), Column("steps_counted", "steps", "count"), *_MEANS),
        rows=tuple(list_rows(summary.means_by_rank())),
    )


def _tabulate_steps(summary: Summary) -> Table:
    """Tabulate the first and last steps of the first ranks."""
    rows: list[dict[str, Value]] = []
    groups = []
    ranks = summary.figures["rank"].drop_duplicates().sort_values()
    shown = summary.figures[summary.figures["rank"].isin(ranks[:_MAX_RANKS_WITH_STEPS])]
    for _, steps in shown.groupby("rank"):
        elided = len(steps) - 2 * _STEPS_AT_EACH_END
        if elided <= 1:
            rows += list_rows(steps)
        else:
            rows += list_rows(steps.head(_STEPS_AT_EACH_END))
            rows.append({"step": "...", "step_time_ns": f"{elided:,} steps"})
            rows += list_rows(steps.tail(_STEPS_AT_EACH_END))
        groups.append(len(rows) - 1)
    more = len(ranks) - _MAX_RANKS_WITH_STEPS
    return Table(
        name="steps",
        title="Steps, in milliseconds",
        columns=(Column("rank", "", "rank"), Column("step", "step", "count"), *_MEANS),
        rows=tuple(rows),
        groups=tuple(groups),
        notes=(f"--json has the steps of {count_of(more, 'more rank')}",) * (more > 0),
    )


def _collect_content(trace: Trace, summary: Summary) -> dict[str, Any]:
    return {
        "schema": 1,
        "path": str(trace.path),
        "attempts": collect_attempts(read_attempts(trace.path)),
        "run": trace.run,
        "sentence": describe_summary(summary),
        "breakdown": {
            "ranks": summary.ranks,
            "steps": summary.steps,
            "excluded": summary.steady.excluded,
            "excluded_ranks": summary.steady.excluded_ranks,
            "step_ns": summary.mean.step,
            "blocks_ns": summary.mean.blocks,
            "exposed_for_ns": summary.exposed_for,
            "critical_path_ns": None if summary.job is None else summary.job.blocks,
            "hidden_ns": summary.hidden,
            "overlap_ratio": summary.overlap_ratio,
            "drift": summary.drift,
        },
        "communication": collect_communication(summary),
        "ranks": summary.means_by_rank().to_dict("records"),
        "steps": summary.figures.assign(is_counted=summary.is_steady),
        "problems": trace.problems,
    }
