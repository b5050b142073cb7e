"""What happens in a random training: a fault, something harmless that looks like one, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal

from benchmarks.chaos.setting import Setting
from overlapscope.diagnosis.verdict import FaultKind, RemarkKind

FAULT: Final = "  # <- fault"
"""Marks the line that is wrong."""

Blame = Literal["one", "all", "pair", "first", "nobody"]
"""Who is at fault: the setting's rank, all alike, it and the next one, rank 0, or nobody."""
Write = Callable[[Setting, Random], dict[str, str]]
"""Writes the slots of the script that are not as usual; ``$when`` stands for rank and step."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happens, and the truth about it."""

    name: str
    write: Write
    kinds: tuple[FaultKind, ...]
    """Kinds of a right verdict."""
    vague: tuple[FaultKind, ...] = ()
    """Kinds that are true as well, but say less."""
    blame: Blame = "one"
    is_disagreement: bool = False
    """Whether the side at fault can't be told among two ranks."""
    is_between_two: bool = False
    """Whether it is one of two ranks that disagree, however many others there are."""
    has_step: bool = True
    has_line: bool = True
    remark: RemarkKind | None = None
    """What is to be remarked of it, whatever the verdict."""
    false_phrases: tuple[str, ...] = ()
    """What is not so, although the kind of the verdict may be right."""
    is_unseen_with_stock: bool = False
    """Whether nothing of it can be known with torch's own DDP: what is said then is no false sentence."""
    is_seen_elsewhere: bool = True
    """Whether loop, forward and backward are right lines too."""
    extra_s: float = 0.0
    """For how much longer than usual nothing may happen, although the job does not hang."""
    wants: Mapping[str, Any] = field(default_factory=dict)
    """What the setting must be like, by field; a tuple is a choice."""
    weight: float = 1.0

    @property
    def is_harmless(self) -> bool:
        """Return whether nothing is wrong."""
        return self.kinds[0] == "healthy"


def one_line(slot: str, text: str) -> Write:
    """Make a fault that is this line, under the condition of rank and step."""
    return lambda _setting, _random: {slot: f"if $when:\n    {text}{FAULT}"}


def instead(slot: str, text: str) -> Write:
    """Make a fault that is an expression or a line in place of the usual."""
    return lambda _setting, _random: {slot: text + FAULT}
