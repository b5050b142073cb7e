"""Sides of a comparison: parsed from the query of the page, and shown in the form at its top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from dashboards.comparisons import ComparisonResult, SideRequest
from dashboards.pages.shell import QueryArguments
from dashboards.place import run_pages_url
from dashboards.runs import RunIndex
from overlapscope.analysis.compare.side import StepChoice, parse_step_bounds
from overlapscope.errors import OverlapScopeError


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
        """The label of the side on the page."""
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

    def text(name: str) -> str:
        return (arguments.get(name) or [b""])[0].decode("utf-8", "replace").strip()

    base, new = (
        SideChoice(
            name=name, run=text(name) if has_table else "", steps=text(f"{name}_steps"), plan=text(f"{name}_plan")
        )
        for name in ("base", "new")
    )
    return base, new


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
