"""Report as a short text in Markdown, to be pasted into an issue."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from dashboards.pages.order import build_report_rows
from dashboards.recording import Snapshot
from dashboards.report.sections import build_report_content, get_recording_name, list_report_facts, redact_path
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.report.problems import merge_problems
from overlapscope.report.render_markdown import escape_markdown, render_markdown_section

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
        lines += ["", f"## {section.title}", "", *render_markdown_section(section)]
        if section.name == "order" and section.name not in content.missing and snapshot.diagnosis is not None:
            lines += _render_watchdog_reports(snapshot.diagnosis)
    facts = list_report_facts(snapshot.trace, now)
    lines += ["", "## About", "", *(f"- {label}: {escape_markdown(value)}" for label, value in facts)]
    lines += _render_problems(snapshot)
    return redact_path("\n".join(lines) + "\n", snapshot.trace.path)


def _render_watchdog_reports(diagnosis: Diagnosis) -> Iterator[str]:
    verdict = diagnosis.verdict
    if reports := build_report_rows(diagnosis.reports, verdict.named, verdict_sentence=verdict.sentence):
        yield from ["", "What the watchdog reported:", ""]
        yield from (f"- {escape_markdown(f'{row.when}: {row.sentence} {row.retracted}')}" for row in reports)


def _render_problems(snapshot: Snapshot) -> Iterator[str]:
    of_order = snapshot.diagnosis.problems if snapshot.diagnosis is not None else ()
    problems = [problem.message for problem in merge_problems([*snapshot.trace.problems, *of_order])]
    if problems:
        yield from ["", "Problems with the recording:", ""]
        yield from (f"- {escape_markdown(message)}" for message in problems[:_MAX_PROBLEMS])
        if len(problems) > _MAX_PROBLEMS:
            yield f"- and {len(problems) - _MAX_PROBLEMS:,} more"
