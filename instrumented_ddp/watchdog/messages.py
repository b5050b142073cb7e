"""What watchdogs say to each other, as JSON (``overlapscope.diagnosis.plain``) like ``Card``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from overlapscope.diagnosis.difference import NOWHERE, Difference
from overlapscope.diagnosis.evidence import ExitCall, Failure
from overlapscope.diagnosis.replicas import Newest
from overlapscope.diagnosis.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Head:
    """How far a rank is in a group."""

    newest: int
    hash: int
    names_hash: int
    batch: int = NOWHERE
    """Of the newest entry, if that is a bucket."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """To a neighbour: what some of its entries are."""

    number: int
    """Of the question, so that its answer is known again."""
    group: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a neighbour has asked for."""

    number: int
    rows: tuple[tuple[int, ...], ...]
    """As in ``COMPARED_DTYPE``."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank tells its neighbours all the time."""

    rank: int
    host: str
    host_id: str
    """Processes that have it in common see each other in /proc, and share a clock."""
    pid: int
    start_ticks: int
    """With ``pid``: which process it is."""
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
    writes_stacks: bool = False
    """faulthandler answers a signal in this process."""
    heads: dict[str, Head] = field(default_factory=dict)
    """By group."""
    questions: dict[int, Question] = field(default_factory=dict)
    """By the rank that is asked."""
    replicas: dict[str, Newest] = field(default_factory=dict)
    """What was last taken of each model, by key."""


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """Where the ranks of a group begin to differ, found while the job went on."""

    group: str
    difference: Difference


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something is amiss on a rank."""

    by: int
    why: Literal["failure", "not reduced", "stall", "patience", "difference", "replicas differ"]
    """``patience``: it has stood still for so long that the job may be ended for it."""
    pointer: Pointer | None = None
    """Where the difference is, if that is why."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the judge of an inquiry has found."""

    judge: int
    verdict: Verdict
    message: str
    """All that people are told."""
    listening: tuple[str, ...] = ()
    """Endpoints of all ranks, if the job may have to be stopped."""
    undecided_for_ns: int | None = None
    """If nothing is wrong by now, how long until it is, unless the job goes on: ``Facts.undecided_for_ns``."""
