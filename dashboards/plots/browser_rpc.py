"""Requests and responses between the script in the browser and a plot or table on the server.

Both are data sources that the script knows by name; to send a message is to fill one. A request that may be repeated
before it is answered has an ``id``, and its response has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bokeh.model import Model
from bokeh.models import ColumnDataSource

RequestColumns = Mapping[str, Sequence[Any]]
"""The columns of a request."""

_REQUEST: Final = "request"
_RESPONSE: Final = "response"
"""Tags of the sources."""


class BrowserRpc:
    """The requests and responses of a plot or a table."""

    def __init__(self) -> None:
        """Create a channel without messages."""
        self._root: Model | None = None
        self.sources: dict[str, ColumnDataSource] = {}
        """Sources by their names in the script."""

    def request(self, name: str, columns: Sequence[str], act: Callable[[RequestColumns], None]) -> ColumnDataSource:
        """Return the source of a request; ``act`` is called with its columns whenever the browser fills it."""
        source = self.response(name, columns)
        source.tags = [_REQUEST]
        source.on_change("data", lambda _attribute, _old, args: act(args))
        return source

    def response(self, name: str, columns: Sequence[str]) -> ColumnDataSource:
        """Return the source of a response, which the server fills."""
        self.sources[name] = ColumnDataSource(name=name, data={column: [] for column in columns}, tags=[_RESPONSE])
        if self._root is not None:
            self.attach(self._root)
        return self.sources[name]

    def attach(self, root: Model) -> None:
        """Attach the sources, also later ones, to a root: the browser sends only what a root refers to."""
        self._root = root
        root.tags = [{"rpc": list(self.sources.values())}]


def is_request(model: Model) -> bool:
    """Return whether a model is the source of a request."""
    return _REQUEST in model.tags


def is_response(model: Model) -> bool:
    """Return whether a model is the source of a response."""
    return _RESPONSE in model.tags


TOOLTIP_COLUMNS: Final = ("id", "title", "label", "value")


def build_tooltip_columns(
    args: RequestColumns, title: str, rows: Sequence[tuple[str, str]], **more: Any
) -> dict[str, Any]:
    """Return the response with the tooltip under the pointer: a title, and lines of label and value.

    Args:
        args: columns of the request.
        title: title of the tooltip.
        rows: label and value of each line.
        **more: further columns, of one value each.
    """
    lines = rows or [("", "")]
    columns = {"id": args["id"][0], "title": title, **more}
    texts = {"label": [label for label, _ in lines], "value": [value for _, value in lines]}
    return {name: [value] * len(lines) for name, value in columns.items()} | texts
