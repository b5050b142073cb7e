"""Sections of a report in the order in which they are read, with the same figures as on the pages of the app."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dashboards.pages import buckets, order, overview, stragglers
from dashboards.pages.shell import has_only_collectives
from dashboards.recording import Snapshot
from overlapscope.advice.advice import Advice, advise
from overlapscope.diagnosis.attempts import format_other_attempts
from overlapscope.errors import OverlapScopeError
from overlapscope.stragglers import text


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A part of the report."""

    name: str
    title: str
    variables: dict[str, Any]
    """Variables of its templates."""
    reason: dict[str, str] | None = None
    """Why there is nothing to show: ``headline``, ``message`` and ``advice``; None if there is."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportContent:
    """The sections, and the data of their plots."""

    snapshot: Snapshot
    sections: tuple[ReportSection, ...]
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
        sections=tuple(found),
        advice=advice,
        attempts=format_other_attempts(snapshot.attempts, snapshot.trace.path),
    )


def _try_advise(snapshot: Snapshot) -> tuple[Advice | None, str]:
    """Return the advice on bucket sizes, or why there is none."""
    try:
        return advise(snapshot), ""
    except OverlapScopeError as error:
        return None, str(error)


def _build_step_sections(snapshot: Snapshot, advice: Advice | None, why_no_advice: str) -> Iterator[ReportSection]:
    """Yield the sections based on steps; none if only the order of collectives was recorded."""
    if has_only_collectives(snapshot.trace):
        return
    worth_doing = overview.build_improvements_context(snapshot, advice)
    yield ReportSection(
        name="overview",
        title="Overview",
        variables=overview.build_overview_context(snapshot) | {"incident": None} | worth_doing,
    )
    number = snapshot.summary.typical_step
    yield ReportSection(
        name="timeline",
        title="Timeline",
        variables={"number": number},
        reason=None
        if number is not None
        else {
            "headline": "There is no typical step",
            "message": "No step has been finished by all ranks, so none can be said to be typical.",
            "advice": "",
        },
    )
    found, why_none = snapshot.stragglers, text.explain_missing_stragglers(snapshot.trace)
    yield ReportSection(
        name="stragglers",
        title="Stragglers",
        variables={} if found is None else stragglers.build_stragglers_context(snapshot.summary, found),
        reason={"headline": why_none.headline, "message": why_none.message, "advice": why_none.advice}
        if found is None
        else None,
    )
    yield ReportSection(
        name="buckets",
        title="Buckets",
        variables={} if advice is None else buckets.build_advice_context(snapshot.trace, advice),
        reason=None if advice is not None else buckets.build_unavailable_context(snapshot.trace, why_no_advice),
    )


def _build_order_section(snapshot: Snapshot) -> ReportSection:
    diagnosis = snapshot.diagnosis
    is_known = diagnosis is not None and (bool(diagnosis.groups) or diagnosis.verdict.is_fault)
    return ReportSection(
        name="order",
        title="Order",
        variables=order.build_verdict_context(diagnosis) if diagnosis is not None else {},
        reason=None
        if is_known
        else order.build_unavailable_context(snapshot.trace, diagnosis.verdict if diagnosis else None),
    )
