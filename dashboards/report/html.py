"""Report as one HTML file, the pages below each other, and comparison as one: with plots that need no server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup

from dashboards.pages.breakdown import build_breakdown_context
from dashboards.pages.compare import build_comparison_context, collect_problems
from dashboards.pages.order import OTHER_COLORS
from dashboards.pages.rank_choice import MAX_RANKS
from dashboards.pages.shell import build_shell_context, render_fragment, render_standalone
from dashboards.plots.step_drawing import draw_pairs, draw_step
from dashboards.recording import Snapshot
from dashboards.report.about import get_recording_name, list_report_facts, redact_path
from dashboards.report.figures import ReportFigures, load_bokeh_js
from dashboards.report.sections import ReportContent, ReportSection, build_report_content
from overlapscope.advice.advice import Advice, predict_mean_step
from overlapscope.breakdown.lanes import BUCKET_SLOTS
from overlapscope.bucket_model.text import list_assumptions
from overlapscope.compare.comparison import Comparison
from overlapscope.errors import OverlapScopeError
from overlapscope.report.buckets import tabulate_sizes, tabulate_what_ifs


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
    content: ReportContent, sections: Sequence[ReportSection], *, is_plain: bool = False, **about_context: Any
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
                Markup(render_fragment(f"report_{section.name}.html", figures=elements, **variables)),
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


def _build_section_context(content: ReportContent, section: ReportSection, figures: ReportFigures) -> dict[str, Any]:
    """Return the template variables of a section: those of its page, and those around its plots."""
    if section.reason is not None:
        return {"reason": section.reason}
    return {"reason": None} | section.variables | _add_figures(content, section, figures)


def _add_figures(content: ReportContent, section: ReportSection, figures: ReportFigures) -> dict[str, Any]:
    """Add the plots of a section; return the template variables that only the report has."""
    snapshot, diagnosis, advice = content.snapshot, content.snapshot.diagnosis, content.advice
    if section.name == "overview":
        return figures.add_trends(snapshot.summary) if section.variables["rank_rows"] else {"trends": ()}
    if section.name == "timeline":
        ranks = sorted(snapshot.trace.ranks["rank"].tolist())[:MAX_RANKS]
        drawing = draw_step(snapshot.trace, snapshot.lanes, section.variables["number"], ranks)
        figures.add_steps([drawing])
        return {"drawing": drawing}
    if section.name == "stragglers":
        return figures.add_heatmaps(snapshot.heatmap)
    if section.name == "buckets" and advice is not None:
        figures.add_curve(advice.recommendation.curve)
        return _build_buckets_context(content, advice)
    if section.name == "order" and diagnosis is not None:
        return {
            **figures.add_order(snapshot, diagnosis),
            "bucket_slots": BUCKET_SLOTS,
            "other_colors": OTHER_COLORS,
        }
    return {}


def _build_buckets_context(content: ReportContent, advice: Advice) -> dict[str, Any]:
    found, mean = advice.recommendation, content.snapshot.summary.mean
    curve = found.curve
    best = curve.plans.index(found.best.buckets)
    return {
        "tables": (
            ("By size", "of one limit for all buckets", tabulate_sizes(found)),
            ("What if", "each with the best size for it", tabulate_what_ifs(found)),
        ),
        "assumptions": list_assumptions(found),
        **build_breakdown_context(
            content.snapshot.summary, ("With the best size", predict_mean_step(mean, curve, best))
        ),
    }


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
