"""Pages that follow a recording in place: their plots get its new steps, their markup what differs.

A page is built in one way. To follow, the server builds it again for the later state, and sends the markup of both; the
browser changes on the page what differs, and so keeps what the reader has done. The plots stay the same objects: they
get what those of the page just built have, pass requests on to them, and show their responses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import parse_qs

from bokeh.document import Document
from bokeh.document.events import ColumnDataChangedEvent, DocumentChangedEvent, ModelChangedEvent, SessionCallbackAdded
from bokeh.model import Model, collect_models
from bokeh.models import ColumnDataSource, CustomJS, Range1d

from dashboards.pages.shell import PageBuilder, QueryArguments
from dashboards.plots.browser_rpc import BrowserRpc, RequestColumns, is_request, is_response
from dashboards.recording import Snapshot

_log = logging.getLogger(__name__)
_OWN_VARIABLES: Final = ("place", "has_experiments")
"""Template variables of a document that the server sets before a page is built."""


class PageFollower:
    """Shows later states of a recording on a page that is open.

    Args:
        document: the page, as it was built.
        build: function that built it.
        latest: function that returns the latest state, for the arguments of the page.
    """

    def __init__(self, document: Document, build: PageBuilder, latest: Callable[[QueryArguments], Snapshot]) -> None:
        """Connect the page with its script."""
        self._document = document
        self._build = build
        self._latest = latest
        self._markup = ""
        self._models = collect_models(*document.roots)
        self._later = document  # the one whose state is shown
        rpc = BrowserRpc()
        self.wanted = rpc.request("wanted", ("id", "query"), self._follow)
        self.response = rpc.response("rendered", ("id", "before", "after"))
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
        self._build(later, self._latest(arguments), arguments)
        models = collect_models(*later.roots)
        if later.template is not self._document.template or _kinds(models) != _kinds(self._models):
            return "", ""
        before = self._markup or render_markup(self._document)
        self._take_over(later, dict(zip(models, self._models, strict=True)))
        self._markup = render_markup(later)
        return before, self._markup

    def _take_over(self, later: Document, shown_of: Mapping[Model, Model]) -> None:
        """Let the models that are shown get what later ones have, now and whenever it changes."""
        for model, shown in shown_of.items():
            shown._callbacks.clear()  # answers from the state before
            if isinstance(model, ColumnDataSource) and is_request(model):
                shown.on_change("data", _pass_on_to(model))
            else:
                _copy(model, shown)

        def show(event: DocumentChangedEvent) -> None:
            if self._later is not later:  # an even later one is shown by now
                return
            if isinstance(event, SessionCallbackAdded):
                self._document.add_next_tick_callback(event.callback.callback)
            elif isinstance(event, ModelChangedEvent | ColumnDataChangedEvent) and not is_request(event.model):
                shown, value = shown_of[event.model], getattr(event.model, event.attr)
                setattr(shown, event.attr, dict(value) if isinstance(shown, ColumnDataSource) else value)

        later.on_change(show)
        self._later = later


def follow(document: Document, build: PageBuilder, latest: Callable[[QueryArguments], Snapshot]) -> None:
    """Let a page be followed in place, if it has plots, and is no plot alone."""
    if document.roots and document.template_variables["is_recorded"]:
        PageFollower(document, build, latest)


def render_markup(document: Document) -> str:
    """Return the markup of a page; where its plots are there are elements with their names."""
    roots = {str(root.name): SimpleNamespace(id=root.name, elementid="", name=root.name) for root in document.roots}
    return str(document.template.render({**document.template_variables, "roots": roots, "plot_script": ""}))


def _kinds(models: Sequence[Model]) -> list[tuple[type[Model], str | None]]:
    return [(type(model), model.name) for model in models]


def _pass_on_to(request: ColumnDataSource) -> Callable[[str, object, Any], None]:
    def pass_on(_attribute: str, _old: object, args: Any) -> None:
        request.data = dict(args)

    return pass_on


def _copy(model: Model, shown: Model) -> None:
    """Show what a later model does, except for responses that nobody has asked for, and for what is in view."""
    if isinstance(model, ColumnDataSource) and isinstance(shown, ColumnDataSource):
        columns: dict[str, Any] = dict(model.data)
        is_filled = any(len(values) for values in columns.values())
        if not is_response(model) or (is_filled and columns != shown.data):
            shown.data = columns
    elif isinstance(model, Range1d) and isinstance(shown, Range1d) and shown.bounds is not None:
        _copy_range(model, shown)
    else:
        _copy_properties(model, shown)


def _copy_range(model: Any, shown: Any) -> None:
    """Show the whole of a later range if that of the range before was in view, else what is in view."""
    view, (first, last) = sorted((shown.start, shown.end)), shown.bounds
    was_whole = view[0] <= first and view[1] >= last
    _copy_properties(model, shown, besides=("start", "end"))  # bounds first: a range is moved into them
    low, high = model.bounds
    low = max(low, high - (model.max_interval or high - low))
    if was_whole or view[0] < low:
        start, end = (low, high) if model.start < model.end else (high, low)
        shown.update(start=start, end=end)


def _copy_properties(model: Model, shown: Model, besides: Sequence[str] = ()) -> None:
    changed = [each.properties_with_values(include_defaults=False) for each in (shown, model)]
    for name in dict.fromkeys(name for each in changed for name in each if name not in besides):
        descriptor = model.lookup(name)
        if not (descriptor.readonly or descriptor.has_ref) and getattr(shown, name) != getattr(model, name):
            setattr(shown, name, getattr(model, name))
