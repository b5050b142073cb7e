"""Report as one HTML file: the pages below each other, with drawings instead of plots that need a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup

from dashboards.pages.account import account_variables
from dashboards.pages.order import OTHER_COLOURS
from dashboards.pages.rank_choice import MAX_RANKS
from dashboards.pages.shell import render_part, shell_variables
from dashboards.plots.step_drawing import draw_step
from dashboards.recording import Snapshot
from dashboards.report.about import about, name_of, without_path
from dashboards.report.charts import curve_chart, trend_charts
from dashboards.report.maps import maps_of
from dashboards.report.sections import Content, Section, content_of
from dashboards.report.strip import strip_of
from overlapscope.analysis.advice import Advice, predicted_step
from overlapscope.analysis.lanes import BUCKET_SLOTS
from overlapscope.errors import OverlapScopeError
from overlapscope.model.prediction_rows import SIZE_COLUMNS, WHAT_IF_COLUMNS, assumptions, size_rows, what_if_rows


def report_html(snapshot: Snapshot, now: datetime) -> str:
    """Return the report of a recording; ``now`` is when it is made."""
    content = content_of(snapshot)
    trace = snapshot.trace
    return _page(
        content, content.sections, name=name_of(trace.path), made=f"{now:%d %b %Y, %H:%M}", about=about(trace, now)
    )


def chapter_html(content: Content, name: str) -> str:
    """Return one section alone, without header and title.

    Raises:
        OverlapScopeError: the recording has no such section, because it has no steps.
    """
    sections = tuple(section for section in content.sections if section.name == name)
    if not sections:
        raise OverlapScopeError(
            f"{content.snapshot.trace.path}: has no steps to be shown, only the order of collectives"
        )
    return _page(content, sections, is_plain=True)


def _page(content: Content, sections: Sequence[Section], *, is_plain: bool = False, **about_it: Any) -> str:
    snapshot, diagnosis = content.snapshot, content.snapshot.diagnosis
    name = name_of(snapshot.trace.path)
    page = render_part(
        "report.html",
        **shell_variables(f"Report on {name}", snapshot.trace, diagnosis.problems if diagnosis is not None else ()),
        is_plain=is_plain,
        roots=[],
        navigation=[(f"#{section.name}", section.title) for section in sections],
        attempts=content.attempts,
        sections=[
            (section, Markup(render_part(f"report_{section.name}.html", **_variables(content, section))))
            for section in sections
        ],
        **about_it,
    )
    return without_path(_linked_within(page, snapshot.summary.typical_step), snapshot.trace.path)


def _variables(content: Content, section: Section) -> dict[str, Any]:
    """Return the template variables of a section: those of its page, and drawings instead of its plots."""
    if section.reason is not None:
        return {"reason": section.reason}
    return {"reason": None} | section.variables | _drawings(content, section)


def _drawings(content: Content, section: Section) -> dict[str, Any]:
    snapshot, diagnosis, advice = content.snapshot, content.snapshot.diagnosis, content.advice
    if section.name == "overview":
        return {"charts": trend_charts(snapshot.summary) if section.variables["rank_rows"] else []}
    if section.name == "timeline":
        ranks = sorted(snapshot.trace.ranks["rank"].tolist())[:MAX_RANKS]
        return {"drawing": draw_step(snapshot.trace, snapshot.lanes, section.variables["number"], ranks)}
    if section.name == "stragglers":
        return {"maps": [] if snapshot.heatmap is None else maps_of(snapshot.heatmap)}
    if section.name == "buckets" and advice is not None:
        return _of_buckets(content, advice)
    if section.name == "order" and diagnosis is not None:
        return {
            "strip": strip_of(snapshot, diagnosis) if diagnosis.groups else None,
            "bucket_slots": BUCKET_SLOTS,
            "other_colours": OTHER_COLOURS,
        }
    return {}


def _of_buckets(content: Content, advice: Advice) -> dict[str, Any]:
    found, mean = advice.recommendation, content.snapshot.summary.mean
    curve = found.curve
    best = curve.plans.index(found.best.buckets)
    return {
        "chart": curve_chart(curve),
        "size_columns": SIZE_COLUMNS,
        "size_rows": size_rows(found),
        "what_if_columns": WHAT_IF_COLUMNS,
        "what_if_rows": what_if_rows(found),
        "assumptions": assumptions(found),
        **account_variables(content.snapshot.summary, ("With the best size", predicted_step(mean, curve, best))),
    }


def _linked_within(page: str, step: int | None) -> str:
    """Return markup whose links between pages lead to the sections of this file.

    Links to steps are removed, except those to ``step``, which is the one that is drawn.
    """

    def anchor(link: re.Match[str]) -> str:
        route, _, query = link[1].partition("?")
        if route.startswith(("#", "data:")):
            return link[0]
        if route == "timeline" and f"step={step}" not in query.replace("&amp;", "&").split("&"):
            return ""
        target = route.removeprefix("./") or "top"
        return f' href="#{target}"' if f' id="{target}"' in page else ""

    return re.sub(r' href="([^"]*)"', anchor, page)
