"""What is known of each rank and each group before anything is concluded from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from overlapscope.diagnosis.hyperparameters import Hyperparameters
from overlapscope.diagnosis.replicas import ComparedReplicas, Replica
from overlapscope.trace.group_log import AFTER_UPDATE, FAILED, REACHED, UNREACHED
from overlapscope.trace.signature import Signature

Liveness = Literal[
    "running", "sleeping", "stopped", "gone", "ended", "failed", "never started", "silent", "dumped", "unknown"
]
"""State of a process. running, sleeping, stopped: as /proc says; gone: killed or aborted, with no recorded end; ended:
it ran to its end; failed: it ended with an exception; silent: nothing is heard from it and nobody can look; dumped: it
was there when it wrote the dump of another tool, and only what it had launched is known."""

Divergence = Literal["signature", "step", "batch", "names"]
"""How entries differ first: in what all ranks must have in common; only in the step; only in the batch of data that
they belong to; in the order of names."""


UNKNOWN_STEP: Final = -1
"""``step`` where nobody counts steps, as in dumps of another tool."""

JOINING: Final = "joining"
"""``phase`` of a rank that waits for the others in ``init_process_group``."""

Parameters = tuple[tuple[str, tuple[int, ...], str], ...]
"""(name, shape, dtype) of parameters in order."""


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One collective in the log of one rank."""

    number: int
    """Number in its group, from 1."""
    signature: Signature
    step: int
    """How many updates its rank had made: what ranks are compared by."""
    batch: int | None = None
    """Batch of its data that the rank was at; None if unknown, or where it says nothing: inside ``join()``."""
    phase: str | None = None
    call_site: CallSite | None = None
    flags: int = 0
    """Flags of the entry, defined in ``overlapscope.trace.group_log``."""
    announced_ns: int = 0
    launched_ns: int | None = None
    completed_ns: int | None = None

    @property
    def loop_step(self) -> int:
        """Iteration of the user's loop, from 0: what follows the update of step 12 still belongs to it."""
        return self.step - 1 if self.flags & AFTER_UPDATE and self.step > 0 else self.step

    @property
    def state(self) -> Literal["announced", "launched", "failed", "completed"]:
        """How far the collective has come; failed: it ended with an error of the backend."""
        if self.completed_ns is not None:
            return "failed" if self.flags & FAILED else "completed"
        return "announced" if self.launched_ns is None else "launched"

    @property
    def is_reached(self) -> bool | None:
        """Whether the rank's device has come to it, where a host goes on when it has launched; None if unknown."""
        if self.state == "completed" or self.flags & REACHED:
            return True
        return False if self.flags & UNREACHED else None


@dataclass(frozen=True, kw_only=True)
class GroupOrder:
    """The order of collectives in one process group, on all of its ranks that left a log."""

    name: str
    ranks: tuple[int, ...]
    """Members of the group, whether or not they left a log."""
    description: str = ""
    backend: str = ""
    newest: dict[int, int] = field(default_factory=dict)
    """Number of the newest entry, by rank."""
    first_divergence: int | None = None
    """Number of the first entry that is not the same on all ranks; None if there is none."""
    divergence: Divergence | None = None
    is_since_before: bool = False
    """The first difference lies before what is left of the logs: ``first_divergence`` is the oldest that is left."""
    windows: dict[int, tuple[Entry, ...]] = field(default_factory=dict)
    """Entries of each rank around the first divergence; without one, its newest entries."""
    oldest_open: dict[int, Entry] = field(default_factory=dict)
    """Of ranks whose newest entry is not over, where there is no divergence: the first that is not.

    It may be far behind the newest, where hosts run ahead of their devices."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The exception that ended a rank."""

    type: str
    message: str
    call_site: CallSite | None = None
    """The innermost line of the user's code."""
    traceback: str = ""
    time_ns: int = 0
    has_begun_next: bool | None = None
    """As in ``Standing``."""


@dataclass(frozen=True, kw_only=True)
class ExitCall:
    """A call of ``sys.exit``, the last one of a rank."""

    status: int
    call_site: CallSite | None = None
    caught: Failure | None = None
    """The exception that was being handled."""
    text: str = ""
    """What it was given in place of a status, which Python prints."""
    has_begun_next: bool | None = None
    """As in ``Standing``."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a rank is, or was when last heard from."""

    step: int
    phase: str | None = None
    """loop, forward, backward, finalise, optimizer, evaluation; ``JOINING``; None outside a training step."""
    bucket: int | None = None
    """Next bucket to be launched in a backward."""
    call_site: CallSite | None = None
    since_ns: int = 0
    is_after_update: bool = False
    """Whether no training forward has begun since the update of the step before."""
    has_begun_next: bool | None = None
    """If so, whether the user's loop is in its next iteration all the same; None if that is not known."""

    @property
    def loop_step(self) -> int:
        """As of an ``Entry``; between two steps, and nobody knows in which, that of the data it may be waiting for."""
        is_in_step_before = self.is_after_update and self.has_begun_next is False
        return self.step - 1 if is_in_step_before and self.step > 0 else self.step


@dataclass(frozen=True, kw_only=True)
class UnreadyParameter:
    """A parameter that got no gradient in the newest backward."""

    model: int
    name: str
    module: str
    """Where it is in the module tree, with the class: ``layers.3.mlp (Linear)``."""
    bucket: int
    frozen_in: int | None = None
    """The step in which it was seen that its ``requires_grad`` is False now; None if that was not seen."""


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """What one rank gave to DistributedDataParallel."""

    model: int
    class_name: str
    parameters: Parameters
    """Those that are trained."""
    frozen: tuple[str, ...] = ()
    has_checksum: bool = field(default=False, compare=False)
    """Whether this is certainly what the rank has written down: older recordings have no checksums."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one rank was set up: its process, or one of its DDP instances."""

    model: int | None = None
    """Number of the instance; None: the process."""
    values: dict[str, str]
    """By name, as Python writes them."""
    call_site: CallSite | None = None
    """Where the instance was made."""
    hook_call_site: CallSite | None = None
    """Where its communication hook was registered."""


@dataclass(frozen=True, kw_only=True)
class Unreduced:
    """An optimizer step with gradients that had never been reduced."""

    model: int
    step: int
    call_site: CallSite | None


@dataclass(frozen=True, kw_only=True)
class LeftBackward:
    """A backward that an exception has come out of, and that the training went on after."""

    step: int
    call_site: CallSite | None
    """Where backward was called."""


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What is known of one rank."""

    rank: int
    host: str = ""
    pid: int = -1
    liveness: Liveness = "unknown"
    unrecorded_because: str | None = None
    """Why its recording ended before it did; None if it did not. What the rank has done since is unknown."""
    failure: Failure | None = None
    exit_status: int | None = None
    """With which its process exited; -N if signal N killed it; None if nobody has seen it."""
    exit_call: ExitCall | None = None
    told_ns: int | None = None
    """When the process that had started it sent it a signal, before it came to its end; None if it did not."""
    told_signal: int | None = None
    """That signal; None too if that is not known."""
    ended_ns: int | None = None
    """When it came to its end, if it has said so."""
    is_end_lost: bool = False
    """Whether it has written how it ended, and that can't be read."""
    standing: Standing | None = None
    steps_done: int = 0
    step_time_ns: int | None = None
    """Median time of its steps so far."""
    longest_pause_ns: int | None = None
    """The longest time in which nothing happened on it, and after which it went on."""
    is_starting: bool = False
    """Whether it runs and has not done enough to say what it usually takes: first steps may take minutes."""
    idle_ns: int | None = None
    """How long nothing has happened on it: no phase, no collective, no step; if it is gone, until it was last heard
    from."""
    heard_ns_ago: int | None = None
    """How long its watchdog has been silent; None if it has none."""
    cpu_share: float | None = None
    """CPU use as a share of one core, in the last second or so in which it was heard of; None if unknown."""
    is_working: bool | None = None
    """Whether it moved through its Python code then, or read and wrote; None if unknown."""
    holds_gil: bool = False
    """Whether its process runs while none of its Python threads does."""
    rss_bytes: int | None = None
    memory_limit_bytes: int | None = None
    unready: tuple[UnreadyParameter, ...] = ()
    models: tuple[ModelParameters, ...] = ()
    settings: tuple[Settings, ...] = ()
    replicas: tuple[Replica, ...] = ()
    hyperparameters: tuple[Hyperparameters, ...] = ()
    unreduced: Unreduced | None = None
    left_backwards: tuple[LeftBackward, ...] = ()
    """The newest of them, in order."""
    no_sync_since: int | None = None
    """The step from which on all of its steps that are over had their backwards under ``no_sync()``; None if the newest
    was reduced, or that is not known."""
    new_groups: int | None = None
    """How many process groups it has begun to make, the default one included; None if unknown."""
    making_group: tuple[int, ...] = ()
    """The members of the group that it is in ``new_group`` for, if it is."""
    world_size: int | None = None
    """Number of ranks that it was told there are."""
    stacks: str = ""
    """Stacks of its Python threads, from faulthandler."""

    @property
    def was_told_to_end(self) -> bool:
        """Whether the process that had started it sent it a signal before it came to its end."""
        return self.told_ns is not None


@dataclass(frozen=True, kw_only=True)
class EarlierVerdict:
    """What the watchdog of a rank has said while the job ran, and has not taken back. Fields as in ``Verdict``."""

    rank: int
    time_ns: int
    kind: str
    """One of ``verdict.FaultKind``."""
    sentence: str
    alternative: str = ""
    blamed: tuple[int, ...] = ()
    suspected: tuple[int, ...] = ()
    step: int | None = None
    bucket: int | None = None
    call_sites: dict[int, CallSite] = field(default_factory=dict)
    """The line that matters, by rank."""


@dataclass(frozen=True)
class Gap:
    """Something that is missing or damaged of what the ranks left: a fault may hide in it."""

    what: str
    """Part of a sentence, without a full stop."""
    advice: str
    """What to do about it: a sentence."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that a verdict is based on."""

    expected_ranks: tuple[int, ...]
    ranks: dict[int, RankEvidence]
    """Evidence by rank; an expected rank that left nothing is missing here."""
    groups: tuple[GroupOrder, ...]
    """Order of collectives by group, sorted by name."""
    conversations: tuple[GroupOrder, ...] = ()
    """Sends and receives between two ranks: ``newest`` and ``windows`` by rank."""
    replicas: tuple[ComparedReplicas, ...] = ()
    """Of each model; only where they were compared."""
    is_live: bool = False
    """Of a job that runs, or is thought to."""
    reports: tuple[EarlierVerdict, ...] = ()
    """The newest of each rank's watchdog; only of a job that is looked at afterwards."""
    gaps: tuple[Gap, ...] = ()
    """What is missing or damaged of a recording."""
    job_status: int | None = None
    """Exit status of the command that was recorded, -N if signal N killed it; None if that is not known."""
    job_told_ns: int | None = None
    """When the command was sent Ctrl-C or SIGTERM, on a clock that all ranks share; None if not so."""
    job_signal: int | None = None
    """That signal; also known without such a clock."""
