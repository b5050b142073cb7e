"""What is known of a recording as one object, which every surface renders: text, JSON, Markdown, tables, pages.

A builder per subject makes it from analyses and formats nothing: cells and numbers are raw values whose units decide,
in ``overlapscope.text.format_value``, how they are written. So the same number reads the same on every surface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

from overlapscope.text import Unit, Value, format_value

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Value]
"""Cells of a row by the keys of their columns; a cell that does not apply is left out."""

INDENT: Final = "\N{NO-BREAK SPACE} "
"""Prefix of the label of a row that is a part of the row above."""


class Column(NamedTuple):
    """A column of a table; several may show the same cell, as the mean and the bounds of an interval."""

    key: str
    label: str
    unit: Unit

    @property
    def is_text(self) -> bool:
        """Return True if the column holds words, which are aligned to the left."""
        return self.unit in ("text", "rank")


@dataclass(frozen=True, kw_only=True)
class Number:
    """A figure that stands by itself."""

    key: str
    label: str
    value: Value
    unit: Unit
    note: str = ""

    @property
    def text(self) -> str:
        """Return the value as it is read."""
        return format_value(self.value, self.unit)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of raw values."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    groups: tuple[int, ...] = ()
    """Indexes of the rows behind which a line is drawn."""
    shown: int | None = None
    """Number of rows that matter most; where space is short, the others are folded or left out. None for all."""
    notes: tuple[str, ...] = ()
    """What a reader of the table needs to know, a sentence each."""

    def format_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each row as they are read."""
        return [tuple(format_value(row.get(column.key), column.unit) for column in self.columns) for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure as data; a renderer that can't draw leaves it out, as tables have the same numbers."""

    kind: Literal["waterfall"]
    """A waterfall has a bar for each row, from ``from`` to ``from`` plus ``difference``."""
    table: Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """The answer to one question."""

    name: str
    title: str
    headline: str
    preformatted: str = ""
    """Lines below the headline that are shown as they are, in a font of one width."""
    basis: str = ""
    """What the answer is based on: steps, ranks, clocks."""
    numbers: tuple[Number, ...] = ()
    """Figures to see at a glance, on pages and in Markdown; a terminal has them in the headline and the tables."""
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    """Caveats and evidence, a sentence each."""
    files: tuple[str, ...] = ()
    """Whole paths of files of code, of which lines above may show the end alone."""
    actions: tuple[str, ...] = ()
    """What to do, a sentence each."""

    def table(self, name: str) -> Table:
        """Return the table with a name."""
        return next(table for table in self.tables if table.name == name)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Sections about one recording, or two that are compared."""

    facts: tuple[str, ...]
    """What it is about, a line each."""
    sections: tuple[Section, ...]
    content: Mapping[str, Any]
    """Everything there is to know, with the keys that ``docs/json.md`` documents."""


def list_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame as rows of a table."""
    return cast("list[dict[str, Any]]", frame.to_dict("records"))
