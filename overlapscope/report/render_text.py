"""Render a report as text for a terminal or a pipe."""

from __future__ import annotations

from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table as RichTable

from overlapscope.report.report import INDENT, Number, Report, Section, Table
from overlapscope.text import format_value

_MIN_WIDTH: Final = 120
"""Width that fits every table, so that none is cut off on a narrower terminal or in a pipe."""


def print_report(report: Report) -> None:
    """Print facts, then for each section its headline, notes, numbers, tables and actions."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    console.width = max(console.width, _MIN_WIDTH)
    for line in report.facts:
        console.print(line, markup=False)
    for index, section in enumerate(report.sections):
        if index or report.facts:
            console.print()
        _print_section(console, section)


def format_number(number: Number) -> str:
    """Format a number with its label and note: ``Overlap ratio: 65 % (2.40 ms hidden)``."""
    note = f" ({number.note})" if number.note else ""
    return f"{number.label}: {format_value(number.value, number.unit)}{note}"


def _print_section(console: Console, section: Section) -> None:
    console.print(section.headline, style="bold", markup=False)
    for line in (*([section.basis] if section.basis else []), *section.notes):
        console.print(line, markup=False)
    for number in section.numbers:
        console.print(f"  {format_number(number)}", markup=False)
    for table in section.tables:
        console.print(f"\n{table.title}", markup=False)
        console.print(_build_table(table))
    for action in section.actions:
        console.print(action, markup=False)


def _build_table(table: Table) -> RichTable:
    built = RichTable(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left", caption=table.note or None)
    has_numbers = not all(column.is_text for column in table.columns)
    for column in table.columns:
        justify: JustifyMethod = "left" if column.is_text else "right"
        built.add_column(column.label, justify=justify, no_wrap=has_numbers, overflow="fold")
    for index, row in enumerate(table.format_rows()):
        built.add_row(*(escape(cell.replace(INDENT, "  ")) for cell in row))
        if index in table.groups:
            built.add_section()
    return built
