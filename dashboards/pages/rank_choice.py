"""The ranks that the timeline shows: those that the address asks for, as many as can be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from dashboards.pages.shell import Arguments

MAX_RANKS: Final = 16
"""Most ranks that one figure can show readably and draw quickly."""


@dataclass(frozen=True, kw_only=True)
class RankChoice:
    """The ranks that are shown, and a note on them."""

    shown: tuple[int, ...]
    """The ranks from top to bottom."""
    marked: int | None
    """The one that the address is about."""
    ranks: int
    """How many ranks the recording has."""
    note: str
    """What was asked for and is not shown; empty if everything is."""

    @property
    def is_part(self) -> bool:
        """Whether there are ranks that are not shown."""
        return len(self.shown) < self.ranks


def choose_ranks(ranks: pd.DataFrame, arguments: Arguments) -> RankChoice:
    """The ranks of ``?ranks=0-7,12`` in that order, with that of ``?rank=5`` first; invalid values are ignored.

    Without ``ranks`` those on the host of ``rank`` follow it, which share its hardware, and then the others.

    Args:
        ranks: of the trace.
    """
    host_of = dict(sorted(zip(ranks["rank"].tolist(), ranks["host"].tolist(), strict=True)))
    asked, unknown = parse_ranks(_text(arguments, "ranks"), list(host_of))
    first, _ = parse_ranks(_text(arguments, "rank"), list(host_of))
    marked = first[0] if len(first) == 1 else None
    wanted = asked or sorted(host_of, key=lambda rank: marked is not None and host_of[rank] != host_of[marked])
    shown = wanted if marked is None else [marked, *(rank for rank in wanted if rank != marked)]
    notes = [f"there is no rank {', '.join(unknown)}"] if unknown else []
    if len(asked) > MAX_RANKS:
        notes.append(f"{len(asked):,} were chosen, but only {MAX_RANKS} can be shown at a time")
    return RankChoice(shown=tuple(shown[:MAX_RANKS]), marked=marked, ranks=len(host_of), note="; ".join(notes))


def parse_ranks(text: str, known: Sequence[int]) -> tuple[list[int], list[str]]:
    """Read ranks and ranges of them, such as ``0-7, 12``.

    Args:
        known: the existing ranks.

    Returns:
        Each known rank once, in the order given; and the parts of the text that mean none.
    """
    found: dict[int, None] = {}
    unknown = []
    for part in re.split(r"[,\s]+", text):
        bounds = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if bounds is None:
            continue
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        meant = [rank for rank in known if first <= rank <= last]
        found.update(dict.fromkeys(meant))
        if not meant:
            unknown.append(part)
    return list(found), unknown


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in the form that ``parse_ranks`` reads: ``0-7, 12``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def suggest_ranks(ranks: pd.DataFrame) -> list[tuple[str, str]]:
    """Choices and their names: the ranks of each host, or if there is only one, as many at a time as can be shown."""
    if ranks["host"].nunique() > 1:
        by_host = ranks.sort_values("rank").groupby("host", sort=False)["rank"]
        return [(format_ranks(of_host.tolist()), str(host)) for host, of_host in by_host]
    known = sorted(ranks["rank"])
    return [(format_ranks(known[at : at + MAX_RANKS]), "") for at in range(0, len(known), MAX_RANKS)]


def _text(arguments: Arguments, name: str) -> str:
    return b",".join(arguments.get(name, [])).decode(errors="replace")
