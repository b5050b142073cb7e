"""Messages between watchdogs, serialized as JSON (``overlapscope.diagnosis.plain``) like ``Card``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from overlapscope.diagnosis.difference import NO_POSITION, EntryDifference
from overlapscope.diagnosis.evidence import ExitCall, Failure
from overlapscope.diagnosis.replicas import PassSummary
from overlapscope.diagnosis.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class LogHead:
    """How far a rank is in a group's log, with the running hashes there."""

    latest: int
    hash: int
    names_hash: int
    batch: int = NO_POSITION
    """Batch number of the latest entry, if that is a bucket."""


@dataclass(frozen=True, kw_only=True)
class EntriesRequest:
    """A request to a neighbor for some of its log entries."""

    number: int
    """Number of the request, by which its reply is recognized."""
    group: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class EntriesReply:
    """The log entries that a neighbor has requested."""

    number: int
    rows: tuple[tuple[int, ...], ...]
    """Rows of the log, with the columns of ``COMPARED_DTYPE``."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The heartbeat: what a rank publishes for its neighbors periodically."""

    rank: int
    host: str
    host_id: str
    """Identity of the host: processes that have it in common see each other in /proc, and share a clock."""
    pid: int
    start_ticks: int
    """Start time of the process in clock ticks, which identifies it together with ``pid``."""
    time_ns: int
    step: int
    phase: str | None = None
    since_ns: int = 0
    step_time_ns: int | None = None
    how: Literal["runs", "ended", "failed"] = "runs"
    unrecorded_because: str | None = None
    failure: Failure | None = None
    exit_call: ExitCall | None = None
    rss_bytes: int = 0
    memory_limit_bytes: int | None = None
    dumps_stacks: bool = False
    """True if faulthandler dumps stacks on a signal in this process."""
    heads: dict[str, LogHead] = field(default_factory=dict)
    """Latest log entries, by group."""
    requests: dict[int, EntriesRequest] = field(default_factory=dict)
    """Requests to neighbors, by the rank that is asked."""
    replicas: dict[str, PassSummary] = field(default_factory=dict)
    """Latest fingerprints of each model, by key."""


@dataclass(frozen=True, kw_only=True)
class DivergenceLocation:
    """A divergence: the entry at which the ranks of a group begin to differ, found while the job was running."""

    group: str
    difference: EntryDifference


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A condition on one rank that makes all ranks investigate."""

    by: int
    why: Literal["failure", "not reduced", "stall", "patience", "difference", "replicas differ"]
    """Reason of the alarm; ``patience``: the stall is so long that the job may be aborted for it."""
    divergence: DivergenceLocation | None = None
    """Location of the divergence, if that is the reason."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an investigation, as published by the judge."""

    judge: int
    verdict: Verdict
    message: str
    """Complete text of the report."""
    listening: tuple[str, ...] = ()
    """Listening endpoints of all ranks, if the job may have to be aborted."""
    undecided_time_ns: int | None = None
    """Remaining time until a stall counts as a fault, if it doesn't by now: ``Facts.undecided_time_ns``."""
