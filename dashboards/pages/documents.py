"""Pages of the documents that explain the other pages, and of the glossary."""

from __future__ import annotations

import re
from typing import Final

from bokeh.document import Document
from markdown_it import MarkdownIt
from markupsafe import Markup

from dashboards.assets import read_asset
from dashboards.pages.shell import render
from dashboards.runs import RunIndex
from dashboards.urls import RunUrl

DOCUMENTS: Final = {
    "glossary": "Glossary",
    "breakdown": "Breakdown",
    "bucket-model": "Bucket sizes",
    "stragglers": "Stragglers",
    "faults": "Faults",
    "compare": "Comparisons",
}
"""Name and label of each document that is served."""


def build(document: Document, runs: RunIndex, name: str) -> None:
    """Fill a document of Bokeh with one of ``DOCUMENTS``."""
    document.template_variables["place"] = RunUrl(top_url="../", has_table=runs.only_run is None)
    render(document, "document.html", title="Docs", text=render_document(name), documents=DOCUMENTS, name=name)


def render_document(name: str) -> Markup:
    """Return a document as markup: links lead to other documents that are served; others are text, as are pictures."""
    markdown = re.sub(r"!\[([^]]*)\]\([^)]*\)", r"*\1*", read_asset(f"docs/{name}.md"))
    text = MarkdownIt("commonmark").enable("table").render(markdown)
    markup = re.sub(r'<a href="([^"]*)"[^>]*>(.*?)</a>', _keep_served_link, text, flags=re.DOTALL)
    return Markup(markup)  # noqa: S704 - of a document that is part of the package


def _keep_served_link(link: re.Match[str]) -> str:
    name = link[1].partition("#")[0].removesuffix(".md")
    return f'<a href="{name}">{link[2]}</a>' if name in DOCUMENTS else link[2]
