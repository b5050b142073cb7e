"""Sections of a report in the order in which they are read, with the same figures as on the pages of the app."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dashboards.pages import buckets, order, overview, stragglers
from dashboards.pages.shell import is_order_alone
from dashboards.recording import Snapshot
from overlapscope.analysis import sentences
from overlapscope.analysis.advice import Advice, advise
from overlapscope.diagnosis.attempts import others_text
from overlapscope.errors import OverlapScopeError


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report."""

    name: str
    title: str
    variables: dict[str, Any]
    """Variables of its templates."""
    reason: dict[str, str] | None = None
    """Why there is nothing to show: ``headline``, ``message`` and ``advice``; None if there is."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Content:
    """The sections, and the data of their plots."""

    snapshot: Snapshot
    sections: tuple[Section, ...]
    advice: Advice | None
    """Advice on bucket sizes; None if nothing can be predicted."""
    attempts: str
    """Outcome of other attempts of the job; empty if there are none."""


def content_of(snapshot: Snapshot) -> Content:
    """Analyze a recording. A fault of the job comes first."""
    advice, why_no_advice = _advice(snapshot)
    found = list(_of_steps(snapshot, advice, why_no_advice))
    is_incident = snapshot.diagnosis is not None and snapshot.diagnosis.is_incident
    found.insert(0 if is_incident else len(found), _order(snapshot))
    return Content(
        snapshot=snapshot,
        sections=tuple(found),
        advice=advice,
        attempts=others_text(snapshot.attempts, snapshot.trace.path),
    )


def _advice(snapshot: Snapshot) -> tuple[Advice | None, str]:
    """Return the advice on bucket sizes, or why there is none."""
    try:
        return advise(snapshot), ""
    except OverlapScopeError as error:
        return None, str(error)


def _of_steps(snapshot: Snapshot, advice: Advice | None, why_no_advice: str) -> Iterator[Section]:
    """Yield the sections based on steps; none if only the order of collectives was recorded."""
    if is_order_alone(snapshot.trace):
        return
    worth_doing = overview.worth_variables(snapshot, advice)
    yield Section(
        name="overview",
        title="Overview",
        variables=overview.overview_variables(snapshot) | {"incident": None} | worth_doing,
    )
    number = snapshot.summary.typical_step
    yield Section(
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
    found, why_none = snapshot.stragglers, sentences.why_none(snapshot.trace)
    yield Section(
        name="stragglers",
        title="Stragglers",
        variables={} if found is None else stragglers.stragglers_variables(snapshot.summary, found),
        reason={"headline": why_none.headline, "message": why_none.message, "advice": why_none.advice}
        if found is None
        else None,
    )
    yield Section(
        name="buckets",
        title="Buckets",
        variables={} if advice is None else buckets.advice_variables(snapshot.trace, advice),
        reason=None if advice is not None else buckets.reason_variables(snapshot.trace, why_no_advice),
    )


def _order(snapshot: Snapshot) -> Section:
    diagnosis = snapshot.diagnosis
    is_known = diagnosis is not None and (bool(diagnosis.groups) or diagnosis.verdict.is_fault)
    return Section(
        name="order",
        title="Order",
        variables=order.verdict_variables(diagnosis) if diagnosis is not None else {},
        reason=None if is_known else order.reason_variables(snapshot.trace, diagnosis.verdict if diagnosis else None),
    )
