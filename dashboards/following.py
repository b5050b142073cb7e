"""Pages that follow a recording in place: their plots get its new steps, their markup what differs.

A page is built in one way. To follow, the server builds it again for the later state, and sends the markup of both; the
browser changes on the page what differs, and so keeps what the reader has done. The plots stay the same
objects: their sources are filled anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Final
from urllib.parse import parse_qs

from bokeh.document import Document
from bokeh.models import CustomJS

from dashboards.pages.shell import PageBuilder, PageUpdate, QueryArguments
from dashboards.plots.browser_rpc import BrowserRpc, RequestColumns
from dashboards.recording import Snapshot

_log = logging.getLogger(__name__)
_OWN_VARIABLES: Final = ("place", "has_experiments")
"""Template variables of a document that the server sets before a page is built."""


class PageFollower:
    """Shows later states of a recording on a page that is open.

    Args:
        document: the page, as it was built.
        build: function that built it.
        update: function that shows another state in its plots.
        latest: function that returns the latest state, for the arguments of the page.
    """

    def __init__(
        self,
        document: Document,
        build: PageBuilder,
        update: PageUpdate,
        latest: Callable[[QueryArguments], Snapshot],
    ) -> None:
        """Connect the page with its script."""
        self._document = document
        self._build = build
        self._update = update
        self._latest = latest
        self._markup = ""
        rpc = BrowserRpc()
        self.wanted = rpc.request("wanted", ("id", "query"), self._follow)
        self.response = rpc.response("answer", ("id", "before", "after"))
        root = document.roots[0]
        root.tags = [*root.tags, {"follow": list(rpc.sources.values())}]
        document.js_on_event(
            "document_ready",
            CustomJS(args={"sources": rpc.sources}, code="window.overlapscope.followInPlace(sources)"),
        )

    def _follow(self, args: RequestColumns) -> None:
        before, after = "", ""
        try:
            before, after = self._show_latest(str(args["query"][0]))
        except Exception as error:  # the browser then opens the page again, which says what is wrong
            _log.debug("can't follow in place: %r", error)
        self.response.data = {"id": args["id"], "before": [before], "after": [after]}

    def _show_latest(self, query: str) -> tuple[str, str]:
        """Show the latest state in the plots; return the markup before and after, empty if the page has others."""
        arguments = {name: [value.encode() for value in values] for name, values in parse_qs(query).items()}
        later = Document()
        known = self._document.template_variables
        later.template_variables.update({name: known[name] for name in _OWN_VARIABLES if name in known})
        snapshot = self._latest(arguments)
        self._build(later, snapshot, arguments)
        if later.template is not self._document.template or _names(later) != _names(self._document):
            return "", ""
        before = self._markup or render_markup(self._document)
        self._update(snapshot)
        self._markup = render_markup(later)
        return before, self._markup


def follow(
    document: Document,
    build: PageBuilder,
    update: PageUpdate | None,
    latest: Callable[[QueryArguments], Snapshot],
) -> None:
    """Let a page be followed in place, if its plots can show another state, and it is no plot alone."""
    if update is not None and document.roots and document.template_variables["is_recorded"]:
        PageFollower(document, build, update, latest)


def render_markup(document: Document) -> str:
    """Return the markup of a page; where its plots are there are elements with their names."""
    roots = {str(root.name): SimpleNamespace(id=root.name, elementid="", name=root.name) for root in document.roots}
    return str(document.template.render({**document.template_variables, "roots": roots, "plot_script": ""}))


def _names(document: Document) -> list[str | None]:
    return [root.name for root in document.roots]
