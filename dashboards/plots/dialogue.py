"""What the script of a page and its plot, or its table, say to each other: the browser asks, the server answers.

Questions and answers are sources that the script knows by their names; who fills one has said something. A question
that may be asked again before it is answered has an ``id``, and its answer has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bokeh.model import Model
from bokeh.models import ColumnDataSource

Asked = Mapping[str, Sequence[Any]]
"""The columns of a question."""


class Dialogue:
    """The questions and answers of a plot or a table."""

    def __init__(self) -> None:
        self.sources: dict[str, ColumnDataSource] = {}
        """By the names that the script has for them."""

    def question(self, name: str, columns: Sequence[str], act: Callable[[Asked], None]) -> ColumnDataSource:
        """What the browser fills; ``act`` is called with its columns whenever it does."""
        source = self.answer(name, columns)
        source.on_change("data", lambda _attribute, _old, asked: act(asked))
        return source

    def answer(self, name: str, columns: Sequence[str]) -> ColumnDataSource:
        """What the server fills."""
        self.sources[name] = ColumnDataSource(name=name, data={column: [] for column in columns})
        return self.sources[name]

    def attach(self, root: Model) -> None:
        """Have the browser send what it fills: it does so only of what a root refers to."""
        root.tags = [{"dialogue": list(self.sources.values())}]


TOOLTIP_COLUMNS: Final = ("id", "title", "label", "value")


def tooltip_columns(asked: Asked, title: str, rows: Sequence[tuple[str, str]], **more: Any) -> dict[str, Any]:
    """The answer to what is under the pointer: a heading, and lines of label and value.

    Args:
        more: further columns, of one value each.
    """
    lines = rows or [("", "")]
    columns = {"id": asked["id"][0], "title": title, **more}
    texts = {"label": [label for label, _ in lines], "value": [value for _, value in lines]}
    return {name: [value] * len(lines) for name, value in columns.items()} | texts
