"""Evidence about the ranks and process groups of a job: the input of a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from overlapscope.diagnosis.loop_facts import LoopFacts
from overlapscope.diagnosis.replica_drift import ComparedReplicas, OptimizerHyperparameters, Replica
from overlapscope.machine.evidence import MachineState
from overlapscope.trace.collective_log import AFTER_UPDATE, FAILED, REACHED, UNREACHED, Signature

Liveness = Literal[
    "running", "sleeping", "stopped", "gone", "ended", "failed", "never started", "silent", "dumped", "unknown"
]
"""State of a process.

running, sleeping, stopped: according to /proc; gone: killed or aborted without recording an end; ended: ran to its
end; failed: ended with an exception; silent: no reply, and nobody can check; dumped: was alive when it wrote the dump
of another tool, and only its launches are known.
"""

LIVE_STATES: Final[tuple[Liveness, ...]] = ("running", "sleeping", "stopped")
"""States of a process that exists."""

Divergence = Literal["signature", "step", "batch", "names"]
"""Kind of the first difference between entries.

signature: in what all ranks must agree on; step: only in the step; batch: only in the batch of data they belong to;
names: only in the order of tensor names.
"""


UNKNOWN_STEP: Final = -1
"""Value of ``step`` if steps are not counted, as in dumps of another tool."""

UNKNOWN_OP: Final = "unknown"
"""Operation of an entry if the line that describes it is lost."""
STARTING: Final = "starting"
"""Value of ``phase`` for a rank that has not called ``init_process_group``."""

JOINING: Final = "joining"
"""Value of ``phase`` for a rank that waits for the others in ``init_process_group``."""

Parameters = tuple[tuple[str, tuple[int, ...], str], ...]
"""(name, shape, dtype) of the parameters, in order."""


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
    """Number of optimizer updates its rank had made; ranks are compared by it."""
    batch: int | None = None
    """Batch of its data that the rank was at; None if unknown, or inside ``join()``, where it is meaningless."""
    phase: str | None = None
    call_site: CallSite | None = None
    flags: int = 0
    """Flags of the entry, defined in ``overlapscope.trace.collective_log``."""
    announced_ns: int = 0
    launched_ns: int | None = None
    completed_ns: int | None = None

    @property
    def loop_step(self) -> int:
        """Return the iteration of the user's loop, from 0: what follows the update of step 12 still belongs to it."""
        return self.step - 1 if self.flags & AFTER_UPDATE and self.step > 0 else self.step

    @property
    def state(self) -> Literal["announced", "launched", "failed", "completed"]:
        """Return the progress of the collective; failed: it ended with an error of the backend."""
        if self.completed_ns is not None:
            return "failed" if self.flags & FAILED else "completed"
        return "announced" if self.launched_ns is None else "launched"

    @property
    def is_reached(self) -> bool | None:
        """Return True if the rank's device has reached it (hosts continue after the launch); None if unknown."""
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
    latest: dict[int, int] = field(default_factory=dict)
    """Number of the latest entry, by rank."""
    first_divergence: int | None = None
    """Number of the first entry that is not the same on all ranks; None if there is none."""
    divergence: Divergence | None = None
    predates_log: bool = False
    """True if ranks differ, or may differ, since before what is left of the logs or was compared."""
    windows: dict[int, tuple[Entry, ...]] = field(default_factory=dict)
    """Entries of each rank around the first divergence; without one, its latest entries."""
    steps_before: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Steps in which a rank, before the first divergence, launched at the same line what it launched there."""
    oldest_incomplete: dict[int, Entry] = field(default_factory=dict)
    """First incomplete entry of each rank whose latest entry is incomplete, if there is no divergence.

    It may be far behind the latest, because hosts run ahead of their devices.
    """
    uncertain: frozenset[int] = frozenset()
    """Ranks that may have launched more than is known, because their logs are lost or damaged."""

    def entries_at(self, number: int | None) -> dict[int, Entry]:
        """Return the entry with this number on each rank whose window has it."""
        return {rank: one for rank, window in sorted(self.windows.items()) for one in window if one.number == number}

    def windows_of(self, ranks: Iterable[int]) -> dict[int, tuple[Entry, ...]]:
        """Return the windows of some ranks, in order, as far as they have one."""
        return {rank: self.windows[rank] for rank in sorted({*ranks} & self.windows.keys())}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The exception that ended a rank."""

    type: str
    message: str
    call_site: CallSite | None = None
    """Innermost line of the user's code."""
    traceback: str = ""
    time_ns: int = 0
    has_begun_next_iteration: bool | None = None
    """As in ``RankPosition``."""


HowCaught = Literal["caught", "backward", "forward", "future", "process", "thread"]
"""What became of an exception that did not end its rank.

caught: it was logged or printed; backward, forward: it came out of one, of a wrapped model; future: it is the result
of a task; process, thread: it ended a child process or a thread.
"""


@dataclass(frozen=True, kw_only=True)
class CaughtError:
    """A distinct exception that did not end its rank."""

    how: HowCaught
    failure: Failure
    """What it was when it was raised first."""
    thread: str = ""
    """Name of the thread; empty for the main thread."""
    process: str = ""
    """Name of the child process in which it was raised; empty for the rank's own."""
    step: int | None = None
    """Number of updates that its rank had made when it was raised first; unknown in a child process."""
    last_step: int | None = None
    """The same when it was raised last."""
    last_ns: int = 0
    """When it was raised last."""
    count: int = 1
    """How often it was raised, at least."""
    count_in_step: int = 1
    """How often of that in ``last_step``."""


@dataclass(frozen=True, kw_only=True)
class ExitCall:
    """The last call of ``sys.exit`` of a rank."""

    status: int
    call_site: CallSite | None = None
    caught: Failure | None = None
    """The exception that was being handled."""
    text: str = ""
    """Message passed instead of a status, which Python prints."""
    has_begun_next_iteration: bool | None = None
    """As in ``RankPosition``."""


@dataclass(frozen=True, kw_only=True)
class RankPosition:
    """The position of a rank: current, or last known."""

    step: int
    phase: str | None = None
    """loop, forward, backward, finalize, optimizer, evaluation; ``STARTING``, ``JOINING``; None outside a step."""
    bucket: int | None = None
    """Next bucket to be launched in a backward."""
    call_site: CallSite | None = None
    since_ns: int = 0
    is_after_update: bool = False
    """True if no training forward has begun since the update of the previous step."""
    has_begun_next_iteration: bool | None = None
    """If so, True if the user's loop is in its next iteration nevertheless; None if unknown."""

    @property
    def loop_step(self) -> int:
        """Return the iteration of the user's loop, as in ``Entry``.

        Between two steps, if the iteration is unknown, it is the one whose data the rank may be waiting for.
        """
        is_in_step_before = self.is_after_update and self.has_begun_next_iteration is False
        return self.step - 1 if is_in_step_before and self.step > 0 else self.step


@dataclass(frozen=True, kw_only=True)
class UnreadyParameter:
    """A parameter that got no gradient in the latest backward."""

    model: int
    name: str
    module: str
    """Location in the module tree, with the class: ``layers.3.mlp (Linear)``."""
    bucket: int
    frozen_in: int | None = None
    """Step in which its ``requires_grad`` was found to be False; None if that was not observed."""


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """The parameters that one rank passed to DistributedDataParallel."""

    model: int
    class_name: str
    parameters: Parameters
    """Trained parameters."""
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The settings of one rank: of its process, or of one of its DDP instances."""

    model: int | None = None
    """Number of the DDP instance; None: the process."""
    values: dict[str, str]
    """Values by name, as Python prints them."""
    call_site: CallSite | None = None
    """Line that created the instance."""
    hook_call_site: CallSite | None = None
    """Line that registered its communication hook."""


UnreducedCause = Literal["bypassed", "no_sync", "late", "incomplete", "hooks lost", "outside", "in part", "left out"]
"""Why an update used gradients that were not reduced.

bypassed: the module was called and not its wrapper; no_sync: a backward under ``no_sync()`` came last; late: a backward
of a forward from before the reduction came after it; incomplete: a bucket lacked gradients; hooks lost: the module was
cast or moved; outside: the parameters are in no DDP instance, and nobody reduced their gradients. In a loop that
reduces gradients by itself, in part: it leaves out some; left out: before nearly all updates it reduced all of them.
"""


@dataclass(frozen=True, kw_only=True)
class UnreducedStep:
    """The first optimizer step with gradients that were never reduced, for one cause."""

    model: int
    step: int
    call_site: CallSite | None
    """Line of the first backward that was not reduced, or that accessed the module."""
    cause: UnreducedCause = "bypassed"
    parameters: tuple[str, ...] = ()
    """Names of the parameters whose gradients were not reduced; of many only the first."""
    parameter_count: int = 0
    """Number of all of them."""
    call_sites: tuple[CallSite, ...] = ()
    """Lines of all backwards that were not reduced, each once."""
    backwards: int = 0
    """Number of these backwards."""
    reduced_backwards: int = 0
    """Number of backwards of the same step that were reduced."""
    updates: int = 1
    """Number of such updates so far."""
    last_step: int | None = None
    """Step of the latest of them."""
    is_averaged_by_user: bool = False
    """True if the user's own collectives have since reduced as much as the parameters hold, as when models are
    averaged."""


@dataclass(frozen=True, kw_only=True)
class InterruptedBackward:
    """A backward that raised an exception that was caught, so that training continued."""

    step: int
    call_site: CallSite | None
    """Line that called backward."""


@dataclass(frozen=True, kw_only=True)
class CreatedGroup:
    """A process group that a rank has begun to make, with a list of ranks that has to be the same on all ranks."""

    name: str
    """Name that torch gives it, by counting the groups of the process."""
    ranks: tuple[int, ...]
    """Its members, sorted, according to this rank."""
    backend: str = ""
    """Backend of the default group."""
    call_site: CallSite | None = None


@dataclass(frozen=True, kw_only=True)
class NonFiniteGradients:
    """Steps in a row in which gradients of one rank were not finite before they were averaged with the others'."""

    model: int
    step: int
    """First of these steps in which that was seen."""
    bucket: int
    """First bucket in that step."""
    parameters: tuple[str, ...] = ()
    """Their parameters in that step, in the order of the buckets; the first few."""
    tensors: int = 0
    """Number of all of them."""
    last_step: int | None = None
    """Last of these steps, if gradients were finite again."""
    has_nan: bool = False
    """True if there was a NaN, and not only infinities."""
    is_batch_finite: bool | None = None
    """False if what the model was given in that step was not finite; None if unknown."""
    weights_before: tuple[str, ...] = ()
    """Parameters that were not finite themselves before the update of that step; the first few."""
    weights_after: tuple[str, ...] = ()
    """Parameters that were not finite after it, if they were before; the first few."""
    unseen_since_step: int | None = None
    """First step before it in which nobody looked, since the latest look at finite gradients; None if there is none."""
    finite_steps: tuple[int, ...] = ()
    """Steps before it in which gradients were finite where they were looked at; the latest few."""

    @property
    def earliest_step(self) -> int:
        """Return the first step that can have been the first of these steps."""
        return self.step if self.unseen_since_step is None else min(self.unseen_since_step, self.step)

    @property
    def is_used(self) -> bool:
        """Return True if the weights are not finite: no update was left out."""
        return bool(self.weights_before or self.weights_after)


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """Evidence about one rank."""

    rank: int
    host: str = ""
    pid: int = -1
    liveness: Liveness = "unknown"
    unrecorded_because: str | None = None
    """Why recording ended before the rank did; None if it did not. What the rank did afterwards is unknown."""
    off_since: int | None = None
    """First step that was not recorded because recording was off, until the end; None if it was on then. Collectives
    are logged all the same."""
    failure: Failure | None = None
    exit_status: int | None = None
    """Exit status of its process; -N if signal N killed it; None if nobody observed it."""
    exit_call: ExitCall | None = None
    signaled_at_ns: int | None = None
    """When its parent process sent it a signal before it ended; None if it did not."""
    signal_received: int | None = None
    """That signal; None also if unknown."""
    ended_ns: int | None = None
    """When it ended, if it recorded its end."""
    is_end_lost: bool = False
    """True if it recorded how it ended but the record is missing or unreadable."""
    is_launched: bool = False
    """True if torchrun started it, which ends all ranks when one has ended."""
    position: RankPosition | None = None
    steps_done: int = 0
    step_time_ns: int | None = None
    """Median duration of its steps so far."""
    longest_recovered_stall_ns: int | None = None
    """Longest time without activity after which it continued."""
    is_starting: bool = False
    """True if it runs and has done too few steps to estimate its step time: first steps may take minutes."""
    idle_ns: int | None = None
    """Time without any activity (phase, collective, step); if it is gone, until it was last heard from."""
    silent_for_ns: int | None = None
    """Time since the last sign of life of its watchdog; None if it has none."""
    cpu_share: float | None = None
    """CPU use as a share of one core, in about the last second before it was last heard from; None if unknown."""
    is_working: bool | None = None
    """True if its Python code progressed, or it did I/O, in that second; None if unknown."""
    holds_gil: bool = False
    """True if its process runs but none of its Python threads does."""
    rss_bytes: int | None = None
    memory_limit_bytes: int | None = None
    unready: tuple[UnreadyParameter, ...] = ()
    models: tuple[ModelParameters, ...] = ()
    settings: tuple[RankSettings, ...] = ()
    replicas: tuple[Replica, ...] = ()
    hyperparameters: tuple[OptimizerHyperparameters, ...] = ()
    unreduced: tuple[UnreducedStep, ...] = ()
    """By model and cause."""
    interrupted_backwards: tuple[InterruptedBackward, ...] = ()
    """The latest of them, in order."""
    non_finite: tuple[NonFiniteGradients, ...] = ()
    """The first of them, in order."""
    loop: LoopFacts = field(default_factory=LoopFacts)
    """What its loop does with gradients and data."""
    no_sync_since: int | None = None
    """Step since which all backwards of completed steps ran under ``no_sync()``.

    None if the latest was reduced, or if unknown.
    """
    new_group_calls: int | None = None
    """Number of process groups whose creation it has begun, including the default one; None if unknown."""
    creating_group: tuple[int, ...] = ()
    """Members of the group that it is creating in ``new_group``; empty if it is in no such call."""
    caught: tuple[CaughtError, ...] = ()
    """Exceptions that did not end it; that which was raised last is the last."""
    created_groups: tuple[CreatedGroup, ...] = ()
    """The groups that it has begun to make, in order; while the job runs the latest of them."""
    world_size: int | None = None
    """World size passed to this rank, in its latest call of ``init_process_group``."""
    init_calls: int = 1
    """Number of its calls of ``init_process_group``: more than one if it has destroyed its groups in between."""
    machine: MachineState = field(default_factory=MachineState)
    """What it has sampled of the machine; of sources that ranks share, one of them has."""
    stacks: str = ""
    """Stacks of its Python threads, from faulthandler."""

    @property
    def was_signaled(self) -> bool:
        """Return True if its parent process sent it a signal before it ended."""
        return self.signaled_at_ns is not None


@dataclass(frozen=True, kw_only=True)
class ReportedVerdict:
    """A verdict that a rank's watchdog reported while the job ran and did not retract. Fields as in ``Verdict``."""

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
    """Relevant line of code, by rank."""


@dataclass(frozen=True)
class RecordingGap:
    """A missing or damaged part of the recording, in which a fault may hide."""

    what: str
    """Description: part of a sentence, without a full stop."""
    advice: str
    """Advice: a sentence."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All evidence that a verdict is based on."""

    expected_ranks: tuple[int, ...]
    ranks: dict[int, RankEvidence]
    """Evidence by rank; an expected rank that left nothing is missing here."""
    groups: tuple[GroupOrder, ...]
    """Order of collectives by group, sorted by name."""
    point_to_point_orders: tuple[GroupOrder, ...] = ()
    """Sends and receives between ranks: ``latest`` and ``windows`` by rank."""
    replicas: tuple[ComparedReplicas, ...] = ()
    """Comparison of the replicas of each model; empty if they were not compared."""
    is_live: bool = False
    """True if the job runs, or is assumed to."""
    reports: tuple[ReportedVerdict, ...] = ()
    """The latest report of each rank's watchdog; empty while the job runs."""
    gaps: tuple[RecordingGap, ...] = ()
    """Missing or damaged parts of the recording."""
    job_status: int | None = None
    """Exit status of the command that was recorded, -N if signal N killed it; None if unknown."""
    job_signaled_ns: int | None = None
    """When the command was sent Ctrl-C or SIGTERM, on a clock that all ranks share; None if not applicable."""
    job_signal: int | None = None
    """That signal; also known without such a clock."""
