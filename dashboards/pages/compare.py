"""Compare page: a comparison of the runs, steps and plans in the query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast
from urllib.parse import urlencode

from bokeh.document import Document
from bokeh.model import Model

from dashboards.comparisons import FAIL_ABOVE, JUDGED_PARTS, ComparisonResult, SideRequest
from dashboards.pages.breakdown import build_step_bar
from dashboards.pages.shell import QueryArguments, get_argument, render
from dashboards.plots.step_drawing import StepDrawing, StepPlots
from dashboards.runs import RunIndex
from dashboards.urls import RunUrl, run_pages_url
from overlapscope.compare.comparison import Comparison
from overlapscope.compare.side import StepChoice
from overlapscope.compare.text import describe_sides
from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.interval import Interval
from overlapscope.report.compare import build_comparison_section
from overlapscope.report.report import Table
from overlapscope.text import capitalize, format_ns_change
from overlapscope.trace.table_file import parse_step_bounds

# Sides of a comparison: parsed from the query of the page, and shown in the form at its top.


@dataclass(frozen=True, kw_only=True)
class SideChoice:
    """One side of a comparison, as it is in the query."""

    name: str
    """Which side this is, ``base`` or ``new``."""
    run: str
    """Name of the run; empty for none, or for the only one."""
    steps: str
    """Range of steps; empty for all."""
    plan: str
    """Epoch of a bucket plan; empty for all."""

    @property
    def label(self) -> str:
        """Return the label of the side on the page."""
        return self.name.capitalize()

    def wanted(self, runs: RunIndex) -> SideRequest:
        """Return the side as a request to compare it.

        Raises:
            OverlapScopeError: there is no such run, or the range or the plan is invalid.
        """
        path = runs.only_run or runs.path_of(self.run)
        first, end = parse_step_bounds(self.steps) if self.steps else (None, None)
        if self.plan and not (self.plan.isascii() and self.plan.isdigit() and len(self.plan) <= 9):
            raise OverlapScopeError(f"{self.plan!r} is no bucket plan: give a number like 1")
        plan = int(self.plan) if self.plan else None
        recording = self.run or path.resolve().name
        return SideRequest(recording=recording, path=path, choice=StepChoice(first=first, end=end, plan=plan))


@dataclass(frozen=True, kw_only=True)
class SideView:
    """One side in the form."""

    choice: SideChoice
    plans: tuple[int, ...]
    """Epochs of its bucket plans, if there are several."""
    page: str
    """Address of the pages of its run; empty if there are none yet."""


def parse_sides(arguments: QueryArguments, *, has_table: bool) -> tuple[SideChoice, SideChoice]:
    """Parse both sides of ``?base=RUN&base_steps=10:50&base_plan=1&new=...``.

    Names of runs are ignored unless there are several runs to choose from (``has_table``).
    """

    def parse_side(name: str) -> SideChoice:
        run, steps, plan = (get_argument(arguments, key).strip() for key in (name, f"{name}_steps", f"{name}_plan"))
        return SideChoice(name=name, run=run if has_table else "", steps=steps, plan=plan)

    return parse_side("base"), parse_side("new")


def build_side_views(chosen: Sequence[SideChoice], compared: ComparisonResult | None) -> list[SideView]:
    """Return both sides as the form shows them."""
    plans = ((), ()) if compared is None else compared.plans
    return [
        SideView(
            choice=side,
            plans=of_side if len(of_side) > 1 or side.plan else (),
            page="" if compared is None else run_pages_url(side.run) if side.run else "./",
        )
        for side, of_side in zip(chosen, plans, strict=True)
    ]


def format_compare_url(base: SideChoice, new: SideChoice) -> str:
    """Return the address of a comparison, relative to the top."""
    entries = [
        (key, value)
        for name, side in (("base", base), ("new", new))
        for key, value in ((name, side.run), (f"{name}_steps", side.steps), (f"{name}_plan", side.plan))
        if value
    ]
    return f"compare?{urlencode(entries)}" if entries else "compare"


def format_halves_url(chosen: Sequence[SideChoice], compared: ComparisonResult | None) -> str:
    """Return the address that compares the two halves of a run; empty if the sides are different runs."""
    if compared is None or compared.middle is None:
        return ""
    base, new = (replace(side, plan="") for side in chosen)
    return format_compare_url(replace(base, steps=f":{compared.middle}"), replace(new, steps=f"{compared.middle}:"))


# Waterfall chart of a comparison: the differences of the blocks, from the step of the base to that of the new side.

_DESIRED_TICKS: Final = 6
"""Approximate number of ticks on the axis."""


@dataclass(frozen=True, kw_only=True)
class WaterfallBar:
    """A row of the waterfall; positions are percentages of its width."""

    label: str
    block: str
    """Name of the block, one of ``BLOCKS``; empty for the step, whose row begins at 0 again."""
    left: float
    width: float
    low: float
    """Start of the confidence interval around the end of the row; ``high`` is its end."""
    high: float
    difference: str
    interval: str
    is_significant: bool
    """True if the difference is significant."""


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """The differences of all blocks, each row beginning where the one above ends, and that of the step."""

    falls: tuple[WaterfallBar, ...]
    ticks: tuple[tuple[float, str], ...]
    """Position on the axis and label of each tick."""


def build_waterfall(table: Table) -> Waterfall:
    """Lay out the rows of a waterfall."""
    rows = [(row, cast("float", row["from"]), cast("Interval", row["difference"])) for row in table.rows]
    edges_ns = [from_ns + edge for _, from_ns, each in rows for edge in (0.0, each.low, each.high)]
    first_ns, last_ns = min(edges_ns), max(edges_ns)
    first_ns, last_ns = (first_ns, last_ns) if last_ns > first_ns else (first_ns - 1, last_ns + 1)

    def to_percent(ns: float) -> float:
        return 100 * (ns - first_ns) / (last_ns - first_ns)

    return Waterfall(
        falls=tuple(
            WaterfallBar(
                label=str(row["label"]),
                block=str(row.get("block", "")),
                left=to_percent(min(from_ns, from_ns + each.value)),
                width=to_percent(first_ns + abs(each.value)),
                low=to_percent(from_ns + each.low),
                high=to_percent(from_ns + each.high),
                difference=format_ns_change(each.value),
                interval=f"{format_ns_change(each.low)} to {format_ns_change(each.high)}",
                is_significant=each.low > 0 or each.high < 0,
            )
            for row, from_ns, each in rows
        ),
        ticks=tuple(
            (to_percent(ns), "0" if ns == 0 else format_ns_change(ns)) for ns in _compute_ticks(first_ns, last_ns)
        ),
    )


def _compute_ticks(first_ns: float, last_ns: float) -> list[float]:
    """Return about ``_DESIRED_TICKS`` round numbers in a range: from -0.7 to 5.2 these are 0, 1, 2, 3, 4 and 5."""
    least = (last_ns - first_ns) / _DESIRED_TICKS
    unit = 10.0 ** math.floor(math.log10(least))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least)
    return [number * step for number in range(math.ceil(first_ns / step), math.floor(last_ns / step) + 1)]


@dataclass(frozen=True, kw_only=True)
class StepLinks:
    """Links to one of the steps that differ most."""

    number: int
    """Number of the step in the base run."""
    timelines: tuple[str, ...]
    """Links to the timelines of the base and of the new run."""
    can_be_drawn: bool


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
        roots=[] if compared is None else _draw_steps(document, compared, arguments),
        further_problems=[] if found is None else collect_problems(found),
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
    section = build_comparison_section(found, parts, fail_above)
    sides = (("Base", found.base), ("New", found.new))
    longest_ns = max(side.summary.mean.step.value for _, side in sides)
    return {
        "is_slower": any(found.outcome(part, fail_above) == "slower" for part in parts),
        "section": section,
        "facts_of_sides": list(describe_sides(found)),
        "bars": [build_step_bar(label, side.summary.mean, longest_ns, {}) for label, side in sides],
        "waterfall": build_waterfall(section.figures[0].table),
        "drawings": [
            (label, side.name, drawing) for (label, side), drawing in zip(sides, drawings, strict=bool(drawings))
        ],
    }


def parse_drawn_index(found: Comparison, arguments: QueryArguments) -> int:
    """Return the index of the step to draw: that of ``?step=…``, its number in the base run, else 0."""
    asked = get_argument(arguments, "step")
    numbers = [str(pair.base_step) for pair in found.steps]
    return numbers.index(asked) if asked in numbers else 0


def _draw_steps(document: Document, compared: ComparisonResult, arguments: QueryArguments) -> list[Model]:
    """Return the figures of the chosen one of the steps that differ most, and connect them; empty if there is none."""
    if compared.found is None or not compared.drawings:
        return []
    drawings = compared.drawings[parse_drawn_index(compared.found, arguments)]
    if not drawings:
        return []
    plots = StepPlots(drawings)
    document.js_on_event("document_ready", plots.start_script)
    return plots.roots


def _build_result_context(
    found: Comparison, compared: ComparisonResult, chosen: Sequence[SideChoice], arguments: QueryArguments
) -> dict[str, Any]:
    drawn = parse_drawn_index(found, arguments)
    pages = [run_pages_url(side.run) if side.run else "" for side in chosen]
    return {
        **build_comparison_context(found, compared.drawings[drawn] if found.steps else (), JUDGED_PARTS, FAIL_ABOVE),
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


def collect_problems(found: Comparison) -> list[Problem]:
    """Return the problems with the recordings of both sides."""
    return [problem for side in (found.base, found.new) for problem in side.trace.problems]
