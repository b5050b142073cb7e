"""Steps that are missing in a recording because recording was off: which, and how that is said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlapscope.text import rank_list
from overlapscope.trace.recording_modes import OFF

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class OffSteps:
    """Steps that were not recorded because recording was off."""

    ranks: tuple[int, ...]
    first: int
    end: int | None
    """First step that was recorded again; None if recording was still off at the end."""


def find_off_spans(begun: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int | None]]:
    """Return where recording was off: rank, start and end; no end if it was off at the end.

    Args:
        begun: rank, start (a time or a step) and ``every`` of each mode that a rank has begun, in order for each rank.
    """
    spans: list[tuple[int, int, int | None]] = []
    off_since: dict[int, int] = {}
    for rank, start, every in begun:
        if every == OFF:
            off_since.setdefault(rank, start)
        elif rank in off_since:
            spans.append((rank, off_since.pop(rank), start))
    return spans + [(rank, start, None) for rank, start in off_since.items()]


def find_off_steps(begun: Iterable[tuple[int, int, int]]) -> list[OffSteps]:
    """Return the steps that were not recorded, by their first step.

    Args:
        begun: rank, first step and ``every`` of each mode that a rank has begun, in order for each rank.
    """
    found: dict[tuple[int, int | None], list[int]] = {}
    for rank, first, end in find_off_spans(begun):
        if first != end:
            found.setdefault((first, end), []).append(rank)
    spans = [OffSteps(ranks=tuple(ranks), first=first, end=end) for (first, end), ranks in found.items()]
    return sorted(spans, key=lambda span: (span.first, span.ranks))


@dataclass(frozen=True, kw_only=True)
class OffSpan:
    """A time span in which recording was off."""

    start_ns: int
    end_ns: int | None
    """None if recording was still off at the end."""
    steps: str
    """The steps that are missing, from ``describe_off_steps``."""


def list_off_spans(modes: pd.DataFrame) -> list[OffSpan]:
    """Return the time spans in which recording was off on the lowest rank on which it was.

    Args:
        modes: A table like ``trace.modes``.
    """
    own = modes[modes["rank"] == modes.loc[modes["every"] == OFF, "rank"].min()]
    rank, step, every, time_ns = (own[name].tolist() for name in ("rank", "step", "every", "time_ns"))
    times, steps = (find_off_spans(zip(rank, starts, every, strict=True)) for starts in (time_ns, step))
    return [
        OffSpan(
            start_ns=start_ns,
            end_ns=end_ns,
            steps=describe_off_steps(OffSteps(ranks=(own_rank,), first=first, end=end), [own_rank]),
        )
        for (own_rank, start_ns, end_ns), (_, first, end) in zip(times, steps, strict=True)
    ]


def describe_off_steps(span: OffSteps, ranks: Sequence[int]) -> str:
    """Say which steps were not recorded: ``in steps 120-179``, ``from step 120 on, on rank 3``.

    Args:
        ranks: ranks of which some steps were not recorded; they are named if these are others.
    """
    if span.end is None:
        steps = f"from step {span.first} on"
    elif span.end == span.first + 1:
        steps = f"in step {span.first}"
    else:
        steps = f"in steps {span.first}-{span.end - 1}"
    return steps if len(span.ranks) == len(ranks) else f"{steps}, on {rank_list(span.ranks)}"


def describe_all_off_steps(modes: pd.DataFrame) -> list[str]:
    """Say which steps were not recorded because recording was off, as ``describe_off_steps`` does.

    Args:
        modes: A table like ``trace.modes``.
    """
    begun = list(zip(modes["rank"].tolist(), modes["step"].tolist(), modes["every"].tolist(), strict=True))
    ranks = modes["rank"].unique().tolist()
    return [describe_off_steps(span, ranks) for span in find_off_steps(begun)]
