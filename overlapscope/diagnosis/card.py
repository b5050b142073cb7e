"""What one rank tells of itself when something is amiss: by its own watchdog, or from the files that it has left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from overlapscope.diagnosis.evidence import CallSite, RankEvidence
from overlapscope.diagnosis.order import AROUND
from overlapscope.trace.group_log import GroupHeader, Readable, oldest_open
from overlapscope.trace.signature import Signature

_NEWEST: Final = 12
_NEWEST_MESSAGES: Final = 64
"""Of a round in which everybody sends to everybody, say."""


class Log(Readable, Protocol):
    """A collective log: one that is being written, or a file."""

    @property
    def header(self) -> GroupHeader:
        """Which group it is of."""


@dataclass(frozen=True, kw_only=True)
class LogExcerpt:
    """Some entries of one log."""

    name: str
    ranks: tuple[int, ...]
    is_point_to_point: bool
    description: str
    backend: str
    newest: int
    """Of the log, whether or not it is among ``rows``."""
    rows: tuple[tuple[int, ...], ...]
    """In order, fields as in ``group_log.ENTRY_FIELDS``."""
    oldest_open: tuple[tuple[int, ...], ...] = ()
    """The first that is not over, of those at the end, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """All that is known of a rank, and the collectives that are asked for, with the lines that these refer to."""

    evidence: RankEvidence
    logs: tuple[LogExcerpt, ...] = ()
    signatures: dict[int, Signature] = field(default_factory=dict)
    call_sites: dict[int, CallSite] = field(default_factory=dict)
    listening: tuple[str, ...] = ()
    """Endpoints at which the process accepts connections, if the job may have to be stopped."""


def make_card(
    evidence: RankEvidence,
    logs: Iterable[Log],
    *,
    signature_of: Callable[[int], Signature | None],
    call_site_of: Callable[[int], CallSite | None],
    differences: Mapping[str, int],
    listening: Iterable[str] = (),
) -> Card:
    """Put together what a rank tells.

    Args:
        logs: of all its groups.
        signature_of: by number.
        call_site_of: by number.
        differences: by group, the number around which collectives are wanted; of others the newest are.
    """
    excerpts = tuple(_excerpt(log, differences) for log in logs)
    rows = [row for one in excerpts for row in (*one.rows, *one.oldest_open)]
    return Card(
        evidence=evidence,
        logs=excerpts,
        signatures={n: known for n in sorted({row[1] for row in rows}) if (known := signature_of(n)) is not None},
        call_sites={n: site for n in sorted({row[2] for row in rows}) if (site := call_site_of(n)) is not None},
        listening=tuple(listening),
    )


def _excerpt(log: Log, differences: Mapping[str, int]) -> LogExcerpt:
    header, newest = log.header, log.newest
    first, last = newest - (_NEWEST_MESSAGES if header.point_to_point else _NEWEST) + 1, newest
    if header.name in differences and not header.point_to_point:
        first, last = differences[header.name] - AROUND, differences[header.name] + AROUND
    return LogExcerpt(
        name=header.name,
        ranks=header.ranks,
        is_point_to_point=header.point_to_point,
        description=header.description,
        backend=header.backend,
        newest=newest,
        rows=tuple(log.read(max(1, first), last).tolist()),
        oldest_open=tuple(oldest_open(log).tolist()),
    )
