"""Glossary page: the words that pages, commands and documents use, from ``docs/glossary.md``."""

from __future__ import annotations

import re

from bokeh.document import Document
from markdown_it import MarkdownIt
from markupsafe import Markup

from dashboards.assets import read_asset
from dashboards.pages.shell import render
from dashboards.runs import RunIndex
from dashboards.urls import RunUrl


def build(document: Document, runs: RunIndex) -> None:
    """Fill a document with the glossary."""
    document.template_variables["place"] = RunUrl(has_table=runs.only_run is None)
    render(document, "glossary.html", title="Glossary", text=render_glossary())


def render_glossary() -> Markup:
    """Return the glossary as markup; what it refers to in other documents is not served, and so is no link."""
    text = MarkdownIt("commonmark").render(read_asset("glossary.md"))
    return Markup(re.sub(r"<a [^>]*>(.*?)</a>", r"\1", text))
