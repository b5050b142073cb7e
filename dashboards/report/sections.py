"""Sections of a saved report in the order in which they are read: those of the commands, and of the same pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from markupsafe import escape

from dashboards.pages import buckets, order, overview
from dashboards.pages.shell import has_only_collectives, list_run_facts
from dashboards.recording import Snapshot
from overlapscope import __version__
from overlapscope.advice.advice import Advice, advise
from overlapscope.diagnosis.attempts import format_other_attempts
from overlapscope.diagnosis.text import format_kind
from overlapscope.errors import OverlapScopeError
from overlapscope.report.buckets import build_buckets_section
from overlapscope.report.communication import build_communication_sections
from overlapscope.report.diagnosis import build_diagnosis_section
from overlapscope.report.machine import build_machine_sections
from overlapscope.report.report import Section
from overlapscope.report.stragglers import build_stragglers_section
from overlapscope.stragglers.text import explain_missing_stragglers
from overlapscope.text import format_count
from overlapscope.trace.recording import Trace

_MAX_HOSTS: Final = 8

Fact = tuple[str, str]
"""Label and value."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportContent:
    """The sections, and the data of their plots."""

    snapshot: Snapshot
    sections: tuple[Section, ...]
    missing: frozenset[str]
    """Names of sections that only say why there is nothing to show."""
    advice: Advice | None
    """Advice on bucket sizes; None if nothing can be predicted."""
    attempts: str
    """Outcome of other attempts of the job; empty if there are none."""


def build_report_content(snapshot: Snapshot) -> ReportContent:
    """Analyze a recording. A fault of the job comes first."""
    advice, why_no_advice = _try_advise(snapshot)
    found = list(_build_step_sections(snapshot, advice, why_no_advice))
    is_incident = snapshot.diagnosis is not None and snapshot.diagnosis.is_incident
    found.insert(0 if is_incident else len(found), _build_order_section(snapshot))
    return ReportContent(
        snapshot=snapshot,
        sections=tuple(section for section, _ in found),
        missing=frozenset(section.name for section, is_known in found if not is_known),
        advice=advice,
        attempts=format_other_attempts(snapshot.attempts, snapshot.trace.path),
    )


def _try_advise(snapshot: Snapshot) -> tuple[Advice | None, str]:
    """Return the advice on bucket sizes, or why there is none."""
    try:
        return advise(snapshot), ""
    except OverlapScopeError as error:
        return None, str(error)


_FoundSection = tuple[Section, bool]
"""A section, and False if it only says why there is nothing to show."""


def _build_step_sections(snapshot: Snapshot, advice: Advice | None, why_no_advice: str) -> Iterator[_FoundSection]:
    """Yield the sections based on steps; none if only the order of collectives was recorded."""
    if has_only_collectives(snapshot.trace) and snapshot.summary.imported is None:
        return
    yield _build_overview_section(snapshot, advice), True
    if (step := snapshot.summary.typical_step) is not None:
        yield Section(name="timeline", title="Timeline", headline=f"Step {step} is the typical one."), True
    else:
        why_none = "No step has been finished by all ranks, so none can be said to be typical."
        yield _build_missing("timeline", "Timeline", "There is no typical step", why_none), False
    if snapshot.stragglers is not None:
        yield build_stragglers_section(snapshot.stragglers), True
    else:
        reason = explain_missing_stragglers(snapshot.trace)
        yield _build_missing("stragglers", "Stragglers", reason.headline, reason.message, reason.advice), False
    if advice is not None:
        yield build_buckets_section(advice), True
    else:
        yield (
            _build_missing("buckets", "Buckets", **buckets.build_unavailable_context(snapshot.trace, why_no_advice)),
            False,
        )


def _build_overview_section(snapshot: Snapshot, advice: Advice | None) -> Section:
    """Build the section on the mean step, with recommended changes and without single steps."""
    breakdown, context = snapshot.breakdown_section, overview.build_overview_context(snapshot)
    worth_doing = overview.build_improvements_context(snapshot, advice)["worth_doing"]
    tables = [table for table in breakdown.tables if table.name == "breakdown"]
    tables += [overview.build_ranks_table(snapshot.trace, breakdown)] if breakdown.tables else []
    others = (*build_communication_sections(snapshot.summary), *build_machine_sections(snapshot.machine))
    tables += [table for section in others for table in section.tables]
    if worth_doing is not None:
        tables.insert(len(tables) if context["fault"] else 1, worth_doing)
    notes = (*breakdown.notes, *(note for section in others for note in section.notes))
    headline = " ".join(filter(None, (context["straggler"], breakdown.headline)))
    return replace(breakdown, name="overview", title="Overview", headline=headline, tables=tuple(tables), notes=notes)


def _build_order_section(snapshot: Snapshot) -> _FoundSection:
    diagnosis = snapshot.diagnosis
    if diagnosis is not None and (diagnosis.groups or diagnosis.verdict.is_fault):
        verdict = diagnosis.verdict
        section = build_diagnosis_section(verdict, diagnosis.evidence)
        headline = f"{format_kind(verdict.kind)}: {section.headline}"
        return replace(section, name="order", title="Order", headline=headline), True
    reason = order.build_unavailable_context(snapshot.trace, diagnosis.verdict if diagnosis else None)
    return _build_missing("order", "Order", **reason), False


def _build_missing(name: str, title: str, headline: str, message: str, advice: str = "") -> Section:
    """Build a section that says why there is nothing to show, and what to do."""
    return Section(name=name, title=title, headline=f"{headline}.", basis=message, actions=(advice,) if advice else ())


def list_report_facts(trace: Trace, now: datetime) -> list[Fact]:
    """Return label and value of the known facts."""
    return [(label, value) for label, value in _yield_facts(trace, now) if value]


def _yield_facts(trace: Trace, now: datetime) -> Iterator[Fact]:
    run, versions = trace.run, trace.run.get("versions", {})
    yield "recording", get_recording_name(trace.path)
    yield from list_run_facts(trace)
    yield "recorded with", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "detail", str(run.get("detail", ""))
    hosts = [host for host in trace.ranks["host"].drop_duplicates().astype(str) if host != "unknown"]
    more = f" and {len(hosts) - _MAX_HOSTS:,} more" if len(hosts) > _MAX_HOSTS else ""
    yield "hosts", ", ".join(hosts[:_MAX_HOSTS]) + more
    devices = trace.ranks.loc[trace.ranks["device"] != "unknown", "device"].astype(str).value_counts()
    yield "devices", ", ".join(f"{device} ×{count}" if count > 1 else str(device) for device, count in devices.items())
    if steps := int(trace.steps["step"].nunique()):
        first, last = trace.steps["step"].min(), trace.steps["step"].max()
        chosen = f"{first:,} to {last:,} of those recorded"
        yield "steps", f"{format_count(steps)} recorded" if trace.extent == "all" else chosen
    for model in run.get("models") or ():
        arguments = model.get("ddp_arguments") or {}
        settings = ", ".join(f"{name}={value}" for name, value in arguments.items())
        yield f"DDP arguments of {model.get('class', '?')}", settings
    yield "report", f"made on {now:%d %b %Y, %H:%M} by OverlapScope {__version__}"


def get_recording_name(folder: Path) -> str:
    """Return the name of a recording: reports are shared, and paths reveal more than others need to know."""
    return folder.resolve().name or "recording"


def redact_path(text: str, folder: Path) -> str:
    """Return a text in which the path of a folder is replaced by its name."""
    name, given = get_recording_name(folder), str(folder)
    for path in dict.fromkeys([str(folder.resolve()), os.path.abspath(folder), given]):
        if "/" not in path.rstrip("/"):
            continue
        # A short relative path may mean something else elsewhere in the text.
        for end in ("",) if path.startswith("/") else ("/", ":"):
            for before, after in ((path, name), (str(escape(path)), str(escape(name)))):
                text = text.replace(before + end, after + end)
    return text
