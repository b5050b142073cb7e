"""What users see as one line: the exception that ends a command, and problems with files that are worked around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

_KEPT: Final = "\t"


def make_printable(text: str, keep: str = _KEPT) -> str:
    """Return a text that is safe to print on one line: names may hold line ends, and commands for a terminal.

    Args:
        keep: control characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class OverlapScopeError(Exception):
    """A problem that the user can act on.

    The message is one line: what is wrong, where, and what to do. ``overlapscope.cli.main.main`` catches it, prints it,
    and exits non-zero.
    """

    def __str__(self) -> str:
        return make_printable(super().__str__())


@dataclass(frozen=True)
class Problem:
    """One-line problem with a file that readers of the numbers should know, with the file's name and the position.

    A ``note`` is worth knowing (a log that was never closed); an ``error`` means that data is missing or unreadable.
    """

    severity: Literal["note", "error"]
    message: str

    def __str__(self) -> str:
        return make_printable(self.message)


class NotClosed(Problem):
    """Note of a log that was not closed, which is so of every process that still runs."""
