"""What is known of each rank and each group before anything is concluded from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from overlapscope.trace.group_log import FAILED
from overlapscope.trace.signature import Signature

Liveness = Literal[
    "running", "sleeping", "stopped", "gone", "ended", "failed", "never started", "silent", "dumped", "unknown"
]
"""running, sleeping, stopped: what /proc says of a process that is there; gone: killed, or aborted, without a farewell;
ended: it came to its end; failed: it ended with an exception; silent: nothing is heard of it and nobody can look;
dumped: it was there when it wrote the dump of another tool, and nothing is known but what it had launched."""

Divergence = Literal["signature", "step", "batch", "names", "length"]
"""How entries differ first: in what all ranks must have in common; only in the step; only in the batch of data that
they belong to; in the order of names; not at all, but one rank's log is longer."""


UNKNOWN_STEP: Final = -1
"""``step`` where nobody counts steps, as in dumps of another tool."""

JOINING: Final = "joining"
"""``phase`` of a rank that waits for the others in ``init_process_group``."""


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """A line of the user's."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One collective in the log of one rank."""

    number: int
    """In its group, from 1."""
    signature: Signature
    step: int
    batch: int | None = None
    """Which batch of its data the rank was at; None if nobody knows."""
    phase: str | None = None
    call_site: CallSite | None = None
    flags: int = 0
    """See ``overlapscope.trace.group_log``."""
    announced_ns: int = 0
    launched_ns: int | None = None
    completed_ns: int | None = None

    @property
    def state(self) -> Literal["announced", "launched", "failed", "completed"]:
        """How far it has come; failed: it ended with an error of the backend."""
        if self.completed_ns is not None:
            return "failed" if self.flags & FAILED else "completed"
        return "announced" if self.launched_ns is None else "launched"


@dataclass(frozen=True, kw_only=True)
class GroupOrder:
    """The order of collectives in one process group, on all of its ranks that have left a log."""

    name: str
    ranks: tuple[int, ...]
    """Its members, whether or not they have left a log."""
    description: str = ""
    backend: str = ""
    newest: dict[int, int] = field(default_factory=dict)
    """By rank: the number of its newest entry."""
    first_divergence: int | None = None
    """Number of the first entry that is not the same on all ranks; None if there is none."""
    divergence: Divergence | None = None
    is_since_before: bool = False
    """The first difference lies before what is left of the logs: ``first_divergence`` is the oldest that is left."""
    windows: dict[int, tuple[Entry, ...]] = field(default_factory=dict)
    """By rank: its entries around the first divergence; without one, its newest entries."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The exception that ended a rank."""

    type: str
    message: str
    call_site: CallSite | None = None
    """The innermost line of the user's."""
    traceback: str = ""
    time_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a rank is, or was when it was last heard of."""

    step: int
    phase: str | None = None
    """data_wait, forward, backward, finalise, optimizer, evaluation; ``JOINING``; None outside a training step."""
    bucket: int | None = None
    """Of a backward: the bucket that is next to be launched."""
    call_site: CallSite | None = None
    since_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class UnreadyParameter:
    """A parameter whose gradient did not come in the newest backward."""

    model: int
    name: str
    module: str
    """Where it is in the module tree, with the class: ``layers.3.mlp (Linear)``."""
    bucket: int


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """What one rank gave to DistributedDataParallel."""

    model: int
    class_name: str
    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    """(name, shape, dtype) in order."""
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unreduced:
    """An optimizer stepped with gradients that had never been reduced."""

    model: int
    step: int
    call_site: CallSite | None


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What is known of one rank."""

    rank: int
    host: str = ""
    pid: int = -1
    liveness: Liveness = "unknown"
    has_log: bool = True
    failure: Failure | None = None
    standing: Standing | None = None
    steps_done: int = 0
    step_time_ns: int | None = None
    """The middle one of its steps so far."""
    idle_ns: int | None = None
    """How long nothing has happened on it: no phase, no collective, no step; of one that is gone, until it was last
    heard of."""
    heard_ns_ago: int | None = None
    """How long its watchdog has been silent; None without one."""
    cpu_share: float | None = None
    """Of one core, in the last second or so; None if nobody could look."""
    is_working: bool | None = None
    """It moves through its Python code, or reads and writes; None if nobody could look."""
    holds_gil: bool = False
    """Its process runs, while no thread of Python's does."""
    rss_bytes: int | None = None
    memory_limit_bytes: int | None = None
    unready: tuple[UnreadyParameter, ...] = ()
    models: tuple[ModelParameters, ...] = ()
    unreduced: Unreduced | None = None
    world_size: int | None = None
    """How many ranks it believes there are."""
    stacks: str = ""
    """Its Python threads, by faulthandler."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the watchdog of a rank has said while the job ran, and has not taken back."""

    rank: int
    time_ns: int
    kind: str
    """As in ``verdict.FaultKind``."""
    sentence: str
    blamed: tuple[int, ...] = ()
    step: int | None = None
    bucket: int | None = None
    call_sites: dict[int, CallSite] = field(default_factory=dict)
    """By rank: the line that matters."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that a verdict is made from."""

    expected_ranks: tuple[int, ...]
    ranks: dict[int, RankEvidence]
    """By rank; of the expected ones that have left nothing there is none."""
    groups: tuple[GroupOrder, ...]
    """Of collectives, by name."""
    conversations: tuple[GroupOrder, ...] = ()
    """Sends and receives between two ranks: ``newest`` and ``windows`` by rank."""
    is_live: bool = False
    """Of a job that runs, or is thought to."""
    reports: tuple[Report, ...] = ()
    """The newest of each rank's watchdog; only of a job that is looked at afterwards."""
