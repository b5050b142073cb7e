"""Error pages: a folder without anything to show, steps that can't be shown, and a run that does not exist."""

from __future__ import annotations

from bokeh.document import Document

from dashboards.pages.shell import render
from overlapscope.errors import OverlapScopeError


def build(document: Document, error: OverlapScopeError) -> None:
    """Fill a document with an error and what to do about it."""
    message, _, advice = str(error).partition("; ")
    render(
        document,
        "problem.html",
        title="Nothing to show",
        headline="There is nothing to show yet",
        message=f"{message}.",
        advice=f"{advice[:1].upper()}{advice[1:]}. Then reload this page." if advice else "",
    )


def build_no_steps(document: Document, error: OverlapScopeError) -> None:
    """Fill a document with why the steps in the query can't be shown."""
    message = str(error).partition("; choose")[0]
    render(
        document,
        "problem.html",
        title="No such steps",
        headline="These steps can't be shown",
        message=f"{message}.",
        advice="",
        way_out="Open the page without choosing steps",
    )


def build_no_run(document: Document, reason: OverlapScopeError) -> None:
    """Fill a document with why an address leads to no run."""
    render(
        document,
        "problem.html",
        title="No such run",
        headline="There is no such run",
        message=f"{str(reason)[:1].upper()}{str(reason)[1:]}.",
        advice="The table of runs lists those that there are.",
    )
