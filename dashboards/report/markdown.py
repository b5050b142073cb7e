"""Report as a short text in Markdown, to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from dashboards.recording import Snapshot
from dashboards.report.about import get_recording_name, list_report_facts, redact_path
from dashboards.report.sections import ReportContent, ReportSection, build_report_content
from overlapscope.report.buckets import tabulate_sizes
from overlapscope.report.render_markdown import escape_markdown, render_markdown_table

_MAX_ROWS: Final = 16
_MAX_PROBLEMS: Final = 12


def render_markdown_report(snapshot: Snapshot, now: datetime) -> str:
    """Return the report of a recording; ``now`` is when it is made."""
    content = build_report_content(snapshot)
    lines = [f"# OverlapScope: {escape_markdown(get_recording_name(snapshot.trace.path))}"]
    if content.attempts:
        lines += ["", escape_markdown(content.attempts)]
    for section in content.sections:
        if section.name == "timeline":
            continue  # the timeline is useless without zooming
        lines += ["", f"## {section.title}", "", *_render_section(content, section)]
    lines += [
        "",
        "## About",
        "",
        *(f"- {label}: {escape_markdown(value)}" for label, value in list_report_facts(snapshot.trace, now)),
    ]
    lines += _problems(snapshot)
    return redact_path("\n".join(lines) + "\n", snapshot.trace.path)


def format_table(columns: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a table whose first column is text and whose others are numbers."""
    return [
        f"| {' | '.join(map(escape_markdown, columns))} |",
        f"|---|{'---:|' * (len(columns) - 1)}",
        *(f"| {' | '.join(map(escape_markdown, row))} |" for row in rows[:_MAX_ROWS]),
        *([f"\nand {len(rows) - _MAX_ROWS:,} more"] if len(rows) > _MAX_ROWS else []),
    ]


def _render_section(content: ReportContent, section: ReportSection) -> Iterator[str]:
    if section.reason is not None:
        yield escape_markdown(
            " ".join([f"{section.reason['headline']}.", section.reason["message"], section.reason["advice"]])
        )
        return
    context = section.variables
    if section.name == "overview":
        yield from _overview(context)
    elif section.name == "stragglers":
        yield from _stragglers(context)
    elif section.name == "buckets" and content.advice is not None:
        yield from [f"**{escape_markdown(context['sentence'])}**", ""]
        yield escape_markdown(" ".join([*context["further"], context["basis"], *context["missing"]]))
        yield from ["", *render_markdown_table(tabulate_sizes(content.advice.recommendation))]
    elif section.name == "order":
        yield from _order(context)


def _overview(context: dict[str, Any]) -> Iterator[str]:
    yield from [f"**{escape_markdown(context['sentence'])}**", "", escape_markdown(context["basis"])]
    if not context["rank_rows"]:
        return
    yield ""
    for each in context["headlines"]:
        yield f"- {escape_markdown(each.label)}: **{escape_markdown(each.value)}**" + (
            f" ({escape_markdown(each.note)})" if each.note else ""
        )
    on_path = ["on the critical path"] if context["has_job"] else []
    rows = [
        [
            row.label if row.block else f"of it {row.label}",
            row.mean,
            row.interval,
            row.share,
            *([row.job] if on_path else []),
        ]
        for row in context["breakdown"]
    ]
    total = [
        context["breakdown_step"],
        context["breakdown_interval"],
        "100 %",
        *([context["breakdown_step"]] if on_path else []),
    ]
    yield from ["", *format_table(["a step", "mean", "90 % interval", "share", *on_path], [*rows, ["step", *total]])]
    if context["worth_doing"]:
        yield from ["", "Recommended changes, with the saving of each one alone:", ""]
        yield from (
            f"- {escape_markdown(row.what)}: saves {row.saves} ({row.share}; {row.interval})"
            for row in context["worth_doing"]
        )
    yield from [
        "",
        *format_table(
            ["rank", "where", *context["columns"]], [[r.rank, r.place, *r.cells] for r in context["rank_rows"]]
        ),
    ]


def _stragglers(context: dict[str, Any]) -> Iterator[str]:
    yield from [f"**{escape_markdown(context['verdict'])}**", "", escape_markdown(context["basis"])]
    if context["blame"]:
        rows = [
            [row.who, row.blame, row.evidence, row.delay, row.cost, f"{row.saving} ({row.saving_interval})", row.step]
            for row in context["blame"]
        ]
        columns = ["who", "why", "evidence", "delay", "cost", "saves if fixed", "worst step"]
        yield from ["", *format_table(columns, rows)]


def _order(context: dict[str, Any]) -> Iterator[str]:
    yield from [f"**{escape_markdown(context['kind'])}: {escape_markdown(context['sentence'])}**"]
    if context["alternative"]:
        yield f"This is likely, not certain: {escape_markdown(context['alternative'])}."
    if context["basis"]:
        yield from ["", escape_markdown(context["basis"])]
    lists = [
        ("Where the ranks stood", [f"{who}: {where}" for who, where in context["standings"]]),
        ("Evidence", context["evidence"]),
        ("What to try", context["advice"]),
        ("Also found, probably consequences", context["also"]),
        ("What the watchdog reported", [f"{row.when}: {row.sentence} {row.retracted}" for row in context["reports"]]),
    ]
    for title, sentences in lists:
        if sentences:
            yield from ["", f"{title}:", "", *(f"- {escape_markdown(sentence)}" for sentence in sentences)]


def _problems(snapshot: Snapshot) -> Iterator[str]:
    of_order = snapshot.diagnosis.problems if snapshot.diagnosis is not None else ()
    problems = list(dict.fromkeys(problem.message for problem in [*snapshot.trace.problems, *of_order]))
    if problems:
        yield from ["", "Problems with the recording:", ""]
        yield from (f"- {escape_markdown(message)}" for message in problems[:_MAX_PROBLEMS])
        if len(problems) > _MAX_PROBLEMS:
            yield f"- and {len(problems) - _MAX_PROBLEMS:,} more"
