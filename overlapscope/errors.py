"""What users see as one line: the exception that ends a command, and problems with files that are worked around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class OverlapScopeError(Exception):
    """A problem that the user can act on.

    The message is one line: what is wrong, where, and what to do. ``overlapscope.cli.main.main`` catches it, prints it,
    and exits non-zero.
    """


@dataclass(frozen=True)
class Problem:
    """One-line problem with a file that readers of the numbers should know, with the file's name and the position.

    A ``note`` is worth knowing (a log that was never closed); an ``error`` means that data is missing or unreadable.
    """

    severity: Literal["note", "error"]
    message: str

    def __str__(self) -> str:
        return self.message
