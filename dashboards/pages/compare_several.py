"""Compare page of more than two runs: each in a row, with its figures and what differs from the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from bokeh.document import Document

from dashboards.comparisons import ComparisonOutline
from dashboards.pages.compare import SideChoice
from dashboards.pages.runs import RowView, build_row_view
from dashboards.pages.shell import QueryArguments, get_argument, render
from dashboards.runs import RunIndex
from dashboards.urls import RunUrl
from overlapscope.errors import OverlapScopeError
from overlapscope.text import capitalize, count_of


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A row of the table."""

    name: str
    view: RowView | None
    """The run as the table of runs shows it; None if there is no such run."""
    outline: ComparisonOutline | None
    """The comparison with the base; None for the base itself, and while it is being computed."""
    in_detail: str = ""
    """Address of the comparison with the base alone; empty for the base."""
    as_base: str = ""
    """Address of this page with this run as the base; empty for the base."""
    without: str = ""
    """Address of this page without this run."""


def is_asked(arguments: QueryArguments) -> bool:
    """Return whether the query names more than one run to compare with the base."""
    return len(_read_names(arguments)) > 2


def build(document: Document, runs: RunIndex, arguments: QueryArguments) -> None:
    """Fill a document with the runs of ``?base=RUN&new=RUN&new=RUN...``, each compared with the first."""
    names = _read_names(arguments)
    document.template_variables["place"] = RunUrl(has_table=True)
    compared = compare_each(runs, names)
    render(
        document,
        "compare_several.html",
        title="Compare",
        heading=f"{count_of(len(names) - 1, 'run')} against {names[0]}",
        compared=compared,
        choose=_format_url(names, "./"),
        is_computing=any(each.view is not None and each.outline is None for each in compared[1:]),
    )


def compare_each(runs: RunIndex, names: Sequence[str]) -> list[ComparedRun]:
    """Return a row for each run; comparisons that are not known yet are begun."""
    views = {row.run.latest_name: build_row_view(row) for row in runs.latest()}
    return [
        ComparedRun(
            name=name,
            view=views.get(name),
            outline=None if name == names[0] else _compare(runs, names[0], name),
            in_detail="" if name == names[0] else _format_url([names[0], name]),
            as_base="" if name == names[0] else _format_url([name, *(each for each in names if each != name)]),
            without=_format_url([each for each in names if each != name]),
        )
        for name in names
    ]


def _compare(runs: RunIndex, base: str, new: str) -> ComparisonOutline | None:
    try:
        sides = (
            SideChoice(name=side, run=run, steps="", plan="").wanted(runs)
            for side, run in (("base", base), ("new", new))
        )
        return runs.comparisons.outline(*sides)
    except OverlapScopeError as error:
        return ComparisonOutline(headline=f"{capitalize(str(error))}.")


def _read_names(arguments: QueryArguments) -> list[str]:
    """Return the runs in the query, each once, the base first."""
    new = (name.decode(errors="surrogateescape").strip() for name in arguments.get("new", ()))
    return list(dict.fromkeys(name for name in (get_argument(arguments, "base").strip(), *new) if name))


def _format_url(names: Sequence[str], page: str = "compare") -> str:
    return f"{page}?{urlencode([('base' if index == 0 else 'new', name) for index, name in enumerate(names)])}"
