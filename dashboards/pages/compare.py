"""Compare page: a comparison of the runs, steps and plans in the query, or of two runs as one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bokeh.document import Document

from dashboards.comparisons import ComparisonResult
from dashboards.pages.account import build_step_bar
from dashboards.pages.compare_choice import (
    SideChoice,
    build_side_views,
    format_compare_url,
    format_halves_url,
    parse_sides,
)
from dashboards.pages.shell import QueryArguments, render
from dashboards.pages.waterfall import build_waterfall
from dashboards.place import RunUrl, run_pages_url
from dashboards.plots.step_drawing import StepDrawing, draw_pairs
from dashboards.runs import RunIndex
from overlapscope.analysis.compare.comparison import Comparison
from overlapscope.analysis.compare.sentences import describe_outcomes
from overlapscope.analysis.compare.side import STEP
from overlapscope.analysis.compare.tables import build_tables, describe_sides
from overlapscope.diagnosis.wording import capitalize
from overlapscope.errors import OverlapScopeError

_JUDGED_PARTS: Final = (STEP,)
_FAIL_ABOVE: Final = 0.0
"""Default threshold, the same as that of the command."""


@dataclass(frozen=True, kw_only=True)
class StepLinks:
    """Links to one of the steps that differ most."""

    number: int
    """Number of the step in the base run."""
    timelines: tuple[str, ...]
    """Links to the timelines of the base and of the new run."""
    can_be_drawn: bool


def render_comparison_file(found: Comparison, parts: Sequence[str], fail_above: float) -> str:
    """Return the page as one self-contained file.

    Args:
        found: the comparison.
        parts: quantities to judge, of ``PARTS``.
        fail_above: threshold, as in ``Comparison.outcome``.
    """
    document = Document()
    render(
        document,
        "compare_file.html",
        title="Comparison",
        is_plain=True,
        further_problems=_collect_problems(found),
        **build_comparison_context(found, next(draw_pairs(found), ()), parts, fail_above),
        drawn=0,
        step_links=[],
    )
    return str(document.template.render(roots=[], plot_script="", **document.template_variables))


def build(document: Document, runs: RunIndex, arguments: QueryArguments) -> None:
    """Fill a document with the comparison in the query, or with what is missing for one."""
    has_table = runs.only_run is None
    document.template_variables["place"] = RunUrl(has_table=has_table)
    chosen = parse_sides(arguments, has_table=has_table)
    compared, why_not = None, ""
    if not has_table or all(side.run for side in chosen):
        try:
            compared = runs.comparisons.soon(*(side.wanted(runs) for side in chosen))
        except OverlapScopeError as error:
            why_not = capitalize(str(error))
        else:
            if compared is None:
                _build_computing(document)
                return
            why_not = compared.why_not
    found = None if compared is None else compared.found
    render(
        document,
        "compare.html",
        title="Compare",
        further_problems=[] if found is None else _collect_problems(found),
        names=[row.run.latest_name for row in runs.latest()] if has_table else [],
        sides=build_side_views(chosen, compared),
        swapped=format_compare_url(*reversed(chosen)),
        halves=format_halves_url(chosen, compared),
        why_not=why_not,
        is_found=found is not None,
        **({} if found is None or compared is None else _build_result_context(found, compared, chosen, arguments)),
    )


def build_comparison_context(
    found: Comparison, drawings: Sequence[StepDrawing], parts: Sequence[str], fail_above: float
) -> dict[str, Any]:
    """Return the template variables of ``comparison.html``.

    Args:
        found: the comparison.
        drawings: one of the steps that differ most, on both sides; empty if there is none.
        parts: quantities to judge, of ``PARTS``.
        fail_above: threshold, as in ``Comparison.outcome``.
    """
    sides = (("Base", found.base), ("New", found.new))
    longest_ns = max(side.summary.mean.step.value for _, side in sides)
    return {
        "is_slower": any(found.outcome(part, fail_above) == "slower" for part in parts),
        "sentences": describe_outcomes(found, parts, fail_above),
        "facts_of_sides": list(describe_sides(found)),
        "bars": [build_step_bar(label, side.summary.mean, longest_ns, {}) for label, side in sides],
        "waterfall": build_waterfall(found),
        "tables": list(build_tables(found)),
        "drawings": [
            (label, side.name, drawing) for (label, side), drawing in zip(sides, drawings, strict=bool(drawings))
        ],
    }


def parse_drawn_index(found: Comparison, arguments: QueryArguments) -> int:
    """Return the index of the step to draw: that of ``?step=…``, its number in the base run, else 0."""
    asked = (arguments.get("step") or [b""])[0].decode("utf-8", "replace")
    numbers = [str(pair.base_step) for pair in found.steps]
    return numbers.index(asked) if asked in numbers else 0


def _build_result_context(
    found: Comparison, compared: ComparisonResult, chosen: Sequence[SideChoice], arguments: QueryArguments
) -> dict[str, Any]:
    drawn = parse_drawn_index(found, arguments)
    pages = [run_pages_url(side.run) if side.run else "" for side in chosen]
    return {
        **build_comparison_context(found, compared.drawings[drawn] if found.steps else (), _JUDGED_PARTS, _FAIL_ABOVE),
        "drawn": drawn,
        "step_links": [
            StepLinks(
                number=pair.base_step,
                timelines=tuple(
                    f"{page}timeline?step={step}" + (f"&rank={pair.ranks[0]}" if pair.ranks else "")
                    for page, step in zip(pages, (pair.base_step, pair.new_step), strict=True)
                ),
                can_be_drawn=bool(drawings),
            )
            for pair, drawings in zip(found.steps, compared.drawings, strict=True)
        ],
    }


def _build_computing(document: Document) -> None:
    render(
        document,
        "computing.html",
        title="Compare",
        message="Both sides are being read and compared. This can take a while for long recordings; the page then "
        "reloads by itself.",
    )


def _collect_problems(found: Comparison) -> list[Any]:
    return [problem for side in (found.base, found.new) for problem in side.trace.problems]
