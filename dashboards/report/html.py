"""Report as one HTML file, the pages below each other, and comparison as one: with plots that need no server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup

from dashboards.forecast import predict_mean_step
from dashboards.pages import buckets, order, overview, stragglers
from dashboards.pages.breakdown import build_breakdown_context
from dashboards.pages.compare import build_comparison_context, collect_problems
from dashboards.pages.order import MAX_RANKS
from dashboards.pages.shell import build_shell_context, render_fragment, render_standalone
from dashboards.plots.step_drawing import draw_pairs, draw_step
from dashboards.plots.trend import has_trend
from dashboards.recording import Snapshot
from dashboards.report.figures import ReportFigures, load_bokeh_js
from dashboards.report.sections import (
    ReportContent,
    build_report_content,
    get_recording_name,
    list_report_facts,
    redact_path,
)
from overlapscope.advice.advice import Advice
from overlapscope.breakdown.lanes import BUCKET_SLOTS
from overlapscope.compare.comparison import Comparison
from overlapscope.errors import OverlapScopeError
from overlapscope.report.report import Section


def render_html_report(snapshot: Snapshot, now: datetime) -> str:
    """Return the report of a recording; ``now`` is when it is made."""
    content = build_report_content(snapshot)
    trace = snapshot.trace
    return _render_page(
        content,
        content.sections,
        name=get_recording_name(trace.path),
        made=f"{now:%d %b %Y, %H:%M}",
        about=list_report_facts(trace, now),
    )


def render_section_html(content: ReportContent, name: str) -> str:
    """Return one section alone, without header and title.

    Raises:
        OverlapScopeError: the recording has no such section, because it has no steps.
    """
    sections = tuple(section for section in content.sections if section.name == name)
    if not sections:
        raise OverlapScopeError(
            f"{content.snapshot.trace.path}: has no steps to be shown, only the order of collectives"
        )
    return _render_page(content, sections, is_plain=True)


def render_comparison_file(found: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """Return a comparison as a file.

    Args:
        found: the comparison.
        parts: quantities to judge, of ``PARTS``.
        fail_above: threshold, as in ``Comparison.outcome``.
    """
    drawings, figures = next(draw_pairs(found), ()), ReportFigures()
    if drawings:
        figures.add_steps(drawings)
    elements, script = figures.embed()
    page = render_standalone(
        "compare_file.html",
        title="Comparison",
        further_problems=collect_problems(found),
        **build_comparison_context(found, drawings, parts, fail_above),
        figures=elements,
        script=script,
        drawn=0,
        step_links=[],
    )
    return _add_bokeh_js(page, script)


def _render_page(
    content: ReportContent, sections: Sequence[Section], *, is_plain: bool = False, **about_context: Any
) -> str:
    snapshot, diagnosis = content.snapshot, content.snapshot.diagnosis
    name = get_recording_name(snapshot.trace.path)
    figures = ReportFigures()
    contexts = [(section, _build_section_context(content, section, figures)) for section in sections]
    elements, script = figures.embed()
    page = render_fragment(
        "report.html",
        **build_shell_context(f"Report on {name}", snapshot.trace, diagnosis.problems if diagnosis is not None else ()),
        is_plain=is_plain,
        roots=[],
        navigation=[(f"#{section.name}", section.title) for section in sections],
        attempts=content.attempts,
        sections=[
            (
                section,
                Markup(  # noqa: S704 - of templates, which escape
                    render_fragment("report_reason.html", section=section)
                    if section.name in content.missing
                    else render_fragment(f"report_{section.name}.html", figures=elements, **variables)
                ),
            )
            for section, variables in contexts
        ],
        script=script,
        **about_context,
    )
    page = redact_path(_link_within_page(page, snapshot.summary.typical_step), snapshot.trace.path)
    return _add_bokeh_js(page, script)


def _add_bokeh_js(page: str, script: Markup) -> str:
    return page.replace("<script></script>", load_bokeh_js(), 1) if script else page


def _build_section_context(content: ReportContent, section: Section, figures: ReportFigures) -> dict[str, Any]:
    """Return the template variables of a section: those of its page, and those around its plots."""
    snapshot, diagnosis, advice = content.snapshot, content.snapshot.diagnosis, content.advice
    if section.name in content.missing:
        return {}
    if section.name == "overview":
        context = overview.build_overview_context(snapshot) | overview.build_improvements_context(snapshot, advice)
        is_drawn = context["has_steps"] and has_trend(snapshot.summary)
        return context | (figures.add_trends(snapshot.summary, snapshot.machine) if is_drawn else {"trends": ()})
    if section.name == "timeline":
        ranks, step = sorted(snapshot.trace.ranks["rank"].tolist())[:MAX_RANKS], snapshot.summary.typical_step
        assert step is not None
        drawing = draw_step(snapshot.trace, snapshot.lanes, snapshot.breakdown, step, ranks)
        figures.add_steps([drawing])
        return {"drawing": drawing}
    if section.name == "stragglers":
        assert snapshot.stragglers is not None
        context = stragglers.build_stragglers_context(snapshot, snapshot.stragglers)
        return context | figures.add_heatmaps(snapshot.heatmap)
    if section.name == "buckets":
        assert advice is not None
        figures.add_curve(advice.recommendation.curve)
        return _build_buckets_context(content, advice)
    assert diagnosis is not None
    context = order.build_verdict_context(diagnosis) | figures.add_order(snapshot, diagnosis)
    return context | {"bucket_slots": BUCKET_SLOTS, "other_colors": order.OTHER_COLORS}


def _build_buckets_context(content: ReportContent, advice: Advice) -> dict[str, Any]:
    found, summary = advice.recommendation, content.snapshot.summary
    curve = found.curve
    best = predict_mean_step(summary.mean, curve, curve.plans.index(found.best.buckets))
    return buckets.build_advice_context(content.snapshot.trace, advice) | build_breakdown_context(
        summary, ("With the best size", best)
    )


def _link_within_page(page: str, step: int | None) -> str:
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
