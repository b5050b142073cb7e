"""Render a report as text for a terminal or a pipe."""

from __future__ import annotations

from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from overlapscope.editor_links import find_code_links, read_editor
from overlapscope.errors import make_printable
from overlapscope.report.report import INDENT, Report, Section, Table

_KEPT: Final = "\n\t"
_MIN_WIDTH: Final = 120
"""Width that fits every table, so that none is cut off on a narrower terminal or in a pipe."""


def print_report(report: Report) -> None:
    """Print facts, then for each section its headline, notes, tables and actions."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    console.width = max(console.width, _MIN_WIDTH)
    editor = read_editor(in_browser=False) if console.is_terminal else ""
    for line in report.facts:
        _print(console, line)
    for index, section in enumerate(report.sections):
        if index or report.facts:
            console.print()
        _print_section(console, section, editor)


def _print_section(console: Console, section: Section, editor: str) -> None:
    console.print(_link_code(section.headline, section, editor), style="bold")
    if section.preformatted:
        console.print(_link_code(section.preformatted, section, editor))
    for line in (*([section.basis] if section.basis else []), *section.notes):
        console.print(_link_code(line, section, editor))
    for table in section.tables:
        _print(console, f"\n{table.title}")
        console.print(_build_table(table))
        for note in table.notes:
            _print(console, note)
    for action in section.actions:
        _print(console, action)


def _link_code(text: str, section: Section, editor: str) -> Text:
    """Return a text whose lines of code are links, as terminals open them."""
    linked = Text(make_printable(text, _KEPT))
    for link in find_code_links(linked.plain, section.files, editor) if editor else ():
        linked.stylize(Style(link=link.url), link.start, link.end)
    return linked


def _print(console: Console, text: str) -> None:
    console.print(make_printable(text, _KEPT), markup=False)


def _build_table(table: Table) -> RichTable:
    rows = table.format_rows()
    more = len(rows) - len(rows[: table.shown])
    caption = f"and {more:,} more: --json" if more else None
    built = RichTable(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left", caption=caption)
    has_numbers = not all(column.is_text for column in table.columns)
    for column in table.columns:
        justify: JustifyMethod = "left" if column.is_text else "right"
        built.add_column(column.label, justify=justify, no_wrap=has_numbers, overflow="fold")
    for index, row in enumerate(rows[: table.shown]):
        built.add_row(*(escape(make_printable(cell.replace(INDENT, "  "), _KEPT)) for cell in row))
        if index in table.groups:
            built.add_section()
    return built
