"""Compare page: a comparison of the runs, steps and plans in the query, or of two runs as one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bokeh.document import Document

from dashboards.comparisons import Compared
from dashboards.pages.account import bar_of
from dashboards.pages.compare_choice import SideChoice, address, choices_of, halves, side_views
from dashboards.pages.shell import Arguments, render
from dashboards.pages.waterfall import waterfall_of
from dashboards.place import Place, address_of
from dashboards.plots.step_drawing import StepDrawing, draw_pairs
from dashboards.runs import Runs
from overlapscope.analysis.compare.comparison import Comparison
from overlapscope.analysis.compare.sentences import verdict
from overlapscope.analysis.compare.side import STEP
from overlapscope.analysis.compare.tables import facts_of, tables_of
from overlapscope.diagnosis.wording import capitalised
from overlapscope.errors import OverlapScopeError

_PARTS: Final = (STEP,)
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


def page_text(found: Comparison, parts: Sequence[str], fail_above: float) -> str:
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
        further_problems=_problems(found),
        **variables_of(found, next(draw_pairs(found), ()), parts, fail_above),
        drawn=0,
        step_links=[],
    )
    return str(document.template.render(roots=[], plot_script="", **document.template_variables))


def build(document: Document, runs: Runs, arguments: Arguments) -> None:
    """Fill a document with the comparison in the query, or with what is missing for one."""
    has_table = runs.alone is None
    document.template_variables["place"] = Place(has_table=has_table)
    chosen = choices_of(arguments, has_table=has_table)
    compared, why_not = None, ""
    if not has_table or all(side.run for side in chosen):
        try:
            compared = runs.comparisons.soon(*(side.wanted(runs) for side in chosen))
        except OverlapScopeError as error:
            why_not = capitalised(str(error))
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
        further_problems=[] if found is None else _problems(found),
        names=[row.run.newest_name for row in runs.newest()] if has_table else [],
        sides=side_views(chosen, compared),
        swapped=address(*reversed(chosen)),
        halves=halves(chosen, compared),
        why_not=why_not,
        is_found=found is not None,
        **({} if found is None or compared is None else _found_variables(found, compared, chosen, arguments)),
    )


def variables_of(
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
        "sentences": verdict(found, parts, fail_above),
        "facts_of_sides": list(facts_of(found)),
        "bars": [bar_of(label, side.summary.mean, longest_ns, {}) for label, side in sides],
        "waterfall": waterfall_of(found),
        "tables": list(tables_of(found)),
        "drawings": [
            (label, side.name, drawing) for (label, side), drawing in zip(sides, drawings, strict=bool(drawings))
        ],
    }


def drawn_of_address(found: Comparison, arguments: Arguments) -> int:
    """Return the index of the step to draw: that of ``?step=…``, its number in the base run, else 0."""
    asked = (arguments.get("step") or [b""])[0].decode("utf-8", "replace")
    numbers = [str(pair.base_step) for pair in found.steps]
    return numbers.index(asked) if asked in numbers else 0


def _found_variables(
    found: Comparison, compared: Compared, chosen: Sequence[SideChoice], arguments: Arguments
) -> dict[str, Any]:
    drawn = drawn_of_address(found, arguments)
    pages = [address_of(side.run) if side.run else "" for side in chosen]
    return {
        **variables_of(found, compared.drawings[drawn] if found.steps else (), _PARTS, _FAIL_ABOVE),
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


def _problems(found: Comparison) -> list[Any]:
    return [problem for side in (found.base, found.new) for problem in side.trace.problems]
