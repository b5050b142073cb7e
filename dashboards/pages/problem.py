"""The page for a folder without anything to show."""

from __future__ import annotations

from bokeh.document import Document

from dashboards.pages.shell import render
from overlapscope.errors import OverlapScopeError


def build(document: Document, error: OverlapScopeError) -> None:
    """Fill a document with what is wrong and what to do about it."""
    message, _, advice = str(error).partition("; ")
    render(
        document,
        "problem.html",
        title="Nothing to show",
        headline="There is nothing to show yet",
        message=f"{message}.",
        advice=f"{advice[:1].upper()}{advice[1:]}. Then reload this page." if advice else "",
    )
