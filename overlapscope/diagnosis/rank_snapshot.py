"""Snapshot of one rank for a diagnosis, made by its watchdog or from the files that it left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from overlapscope.diagnosis.collective_order import WINDOW_MARGIN
from overlapscope.diagnosis.evidence import CallSite, RankEvidence
from overlapscope.trace.collective_log import (
    ProcessGroup,
    ReadableLog,
    Signature,
    find_earlier_steps,
    oldest_incomplete,
)

_MAX_ENTRIES: Final = 12
_MAX_MESSAGES: Final = 64
"""Enough for a round in which every rank sends to every other, for example."""


@dataclass(frozen=True, kw_only=True)
class LogExcerpt:
    """An excerpt of one collective log."""

    group: ProcessGroup
    latest: int
    """Number of the latest entry of the log, whether or not it is among ``rows``."""
    rows: tuple[tuple[int, ...], ...]
    """Entries in order, fields as in ``collective_log.ENTRY_FIELDS``."""
    oldest_incomplete: tuple[tuple[int, ...], ...] = ()
    """The first entry of the trailing run of incomplete ones, if there is any."""
    steps_before: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Steps of the last entries before each of ``rows`` that are like it, by its number."""


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """A snapshot of a rank: its evidence, log excerpts, and the signatures and call sites that these refer to."""

    evidence: RankEvidence
    logs: tuple[LogExcerpt, ...] = ()
    signatures: dict[int, Signature] = field(default_factory=dict)
    call_sites: dict[int, CallSite] = field(default_factory=dict)
    listening: tuple[str, ...] = ()
    """Endpoints at which the process accepts connections, in case the job has to be stopped."""


def make_snapshot(
    evidence: RankEvidence,
    logs: Iterable[ReadableLog],
    *,
    signature_of: Callable[[int], Signature | None],
    call_site_of: Callable[[int], CallSite | None],
    differences: Mapping[str, int],
    listening: Iterable[str] = (),
) -> RankSnapshot:
    """Assemble the snapshot of a rank.

    Args:
        logs: the logs of all groups of the rank.
        signature_of: looks up a signature by number.
        call_site_of: looks up a call site by number.
        differences: by group, the number around which entries are wanted; the latest entries of all other groups.
    """
    excerpts = tuple(_excerpt(log, differences) for log in logs)
    rows = [row for one in excerpts for row in (*one.rows, *one.oldest_incomplete)]
    return RankSnapshot(
        evidence=evidence,
        logs=excerpts,
        signatures={n: known for n in sorted({row[1] for row in rows}) if (known := signature_of(n)) is not None},
        call_sites={n: site for n in sorted({row[2] for row in rows}) if (site := call_site_of(n)) is not None},
        listening=tuple(listening),
    )


def _excerpt(log: ReadableLog, differences: Mapping[str, int]) -> LogExcerpt:
    header, latest = log.header, log.latest
    first, last = latest - (_MAX_MESSAGES if header.point_to_point else _MAX_ENTRIES) + 1, latest
    if header.name in differences and not header.point_to_point:
        first, last = differences[header.name] - WINDOW_MARGIN, differences[header.name] + WINDOW_MARGIN
    rows = log.read(max(1, first), last)
    numbers = () if header.point_to_point else rows["number"].tolist()
    return LogExcerpt(
        group=header.group,
        latest=latest,
        rows=tuple(rows.tolist()),
        oldest_incomplete=tuple(oldest_incomplete(log).tolist()),
        steps_before={number: steps for number in numbers if (steps := find_earlier_steps(log, number))},
    )
