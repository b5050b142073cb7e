"""Render a report as Markdown, to be pasted into an issue or shown in a CI job summary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from overlapscope.report.report import INDENT, Report, Section, Table

_MAX_ROWS: Final = 16
_MARKUP: Final = re.compile(r"[\\`*<\[|~$]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)|^[#>+-](?=\s)")
_REFERENCE: Final = re.compile(r"(?<!\w)[@#](?=\w)")
"""Text that GitHub renders as a user or an issue, escaped or not."""
_QUOTED: Final = re.compile(r"`([^`\n]+)`")


def render_markdown(report: Report, title: str) -> str:
    """Render facts and sections below a title."""
    lines = [f"## {escape_markdown(title)}", "", *(f"- {escape_markdown(line)}" for line in report.facts)]
    for section in report.sections:
        lines += ["", *render_markdown_section(section)]
    return "\n".join(lines)


def render_markdown_section(section: Section) -> Iterator[str]:
    """Generate the lines of a section below its title: headline, notes, numbers, tables and actions."""
    yield f"**{escape_markdown(section.headline)}**"
    if section.preformatted:
        fence = max(re.findall(r"`{3,}", section.preformatted), default="``") + "`"  # longer than any within
        yield from ["", fence, *section.preformatted.strip("\n").splitlines(), fence]
    for line in (section.basis, *section.notes):
        if line:
            yield from ["", escape_markdown(line)]
    if section.numbers:
        yield ""
    for number in section.numbers:
        note = f" ({escape_markdown(number.note)})" if number.note else ""
        yield f"- {escape_markdown(number.label)}: **{escape_markdown(number.text)}**{note}"
    for table in section.tables:
        yield from ["", f"### {escape_markdown(table.title)}", "", *render_markdown_table(table)]
    if section.actions:
        yield from ["", *(f"- {escape_markdown(action)}" for action in section.actions)]


def escape_markdown(text: object) -> str:
    r"""Return text that Markdown shows as it is, on one line: names in a recording may contain anything.

    Text between backticks is code, unless it contains a mark that would break a table.
    """
    joined = " ".join(str(text).replace("\N{NO-BREAK SPACE}", " ").split())
    parts = _QUOTED.split(joined)
    return "".join(
        f"`{part}`"
        if number % 2 and "|" not in part
        else _REFERENCE.sub("\\g<0>\N{ZERO WIDTH SPACE}", _MARKUP.sub(r"\\\g<0>", part))
        for number, part in enumerate(parts)
    )


def render_markdown_table(table: Table) -> Iterator[str]:
    """Generate the lines of a table; of many rows, the first few."""
    yield f"| {' | '.join(escape_markdown(column.label) for column in table.columns)} |"
    yield f"|{'|'.join('---' if column.is_text else '---:' for column in table.columns)}|"
    for row in table.format_rows()[:_MAX_ROWS]:
        yield f"| {' | '.join(escape_markdown(cell.replace(INDENT, '↳ ')) for cell in row)} |"
    if len(table.rows) > _MAX_ROWS:
        yield f"\nand {len(table.rows) - _MAX_ROWS:,} more"
    for note in table.notes:
        yield f"\n{escape_markdown(note)}"
