"""Evidence written by hand: what a few ranks are known to have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlapscope.diagnosis.evidence import (
    CallSite,
    CaughtError,
    Entry,
    Evidence,
    Failure,
    GroupOrder,
    Liveness,
    ModelParameters,
    RankEvidence,
    RankPosition,
    UnreadyParameter,
)
from overlapscope.diagnosis.replica_drift import (
    ComparedReplicas,
    HyperparameterChange,
    OptimizerHyperparameters,
    ReplicaDifference,
)
from overlapscope.trace.collective_log import FAILED, REACHED, UNEVEN_INPUTS, UNREACHED, Signature
from tests.ordered import bucket

CLOSED = Failure(
    type="RuntimeError", message="[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
)
TIMED_OUT = Failure(
    type="RuntimeError", message="[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms"
)


def site(line: int) -> CallSite:
    return CallSite(file="train.py", line=line, function="main")


def entry(number: int, signature: Signature, *, step: int = 0, is_done: bool = True, line: int = 42) -> Entry:
    """Announced 100 us after the one before it."""
    announced_ns = number * 100_000
    return Entry(
        number=number,
        signature=signature,
        step=step,
        batch=step,
        call_site=site(line),
        announced_ns=announced_ns,
        launched_ns=announced_ns + 1_000,
        completed_ns=announced_ns + 50_000 if is_done else None,
    )


def trained(collectives: int, *, buckets: int = 3, is_waiting: bool = False) -> tuple[Entry, ...]:
    """So many all-reduces of buckets; the newest has not completed if the rank waits in it."""
    return tuple(
        entry(
            number,
            bucket((number - 1) % buckets),
            step=(number - 1) // buckets,
            is_done=number < collectives or not is_waiting,
        )
        for number in range(1, collectives + 1)
    )


def group(
    windows: Mapping[int, Sequence[Entry]], *, name: str = "default", ranks: Sequence[int] | None = None, **more: Any
) -> GroupOrder:
    """What its ranks did in a group."""
    return GroupOrder(
        name=name,
        ranks=tuple(ranks if ranks is not None else sorted(windows)),
        latest={rank: window[-1].number for rank, window in windows.items()},
        windows={rank: tuple(window) for rank, window in windows.items()},
        oldest_incomplete={
            rank: next(entry for entry in window if entry.state != "completed")
            for rank, window in windows.items()
            if window[-1].state != "completed"
        },
        **more,
    )


def rank(
    number: int,
    liveness: Liveness = "sleeping",
    *,
    phase: str | None = "finalize",
    step: int = 0,
    since_ns: int = 0,
    **more: Any,
) -> RankEvidence:
    """A rank in some phase; since before its first collective, unless said otherwise."""
    is_after_update = phase in ("loop", "evaluation")
    position = RankPosition(step=step, phase=phase, since_ns=since_ns, is_after_update=is_after_update)
    return RankEvidence(rank=number, liveness=liveness, position=position, **more)


def job(*ranks: RankEvidence, groups: Sequence[GroupOrder] = (), world: int | None = None, **more: Any) -> Evidence:
    """All that is known of a job; of ``world`` ranks, by default those that are known."""
    size = len(ranks) if world is None else world
    return Evidence(
        expected_ranks=tuple(range(size)), ranks={one.rank: one for one in ranks}, groups=tuple(groups), **more
    )


def idle(one: RankEvidence, seconds: float, step_s: float = 0.1) -> RankEvidence:
    """It has done nothing for so long."""
    return replace(one, idle_ns=round(seconds * 1e9), step_time_ns=round(step_s * 1e9))


IN_LOADER = (
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/home/me/train.py", line 7 in __getitem__\n'
    '  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 50 in fetch\n'
    '  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 700 in __next__\n'
    '  File "/home/me/train.py", line 12 in main\n'
)
"""Stacks of a rank whose data loader reads an example."""

WAITING = trained(9, is_waiting=True)
LATE = trained(6)
HELD_UP = group({0: WAITING, 1: LATE, 2: WAITING})
"""Rank 1 has not begun its third step, the others wait for its buckets."""


GAVE_UP = (
    *WAITING[:-1],
    replace(WAITING[-1], flags=FAILED, completed_ns=WAITING[-1].announced_ns + 15 * 10**9),
)
"""A rank that waited for 15 s, until its time was up."""


def given_up(late: RankEvidence, **more: object) -> Evidence:
    """The others waited for rank 1, of which this is known, until their time was up."""
    others = [idle(rank(number, "failed", step=2, failure=TIMED_OUT), 0) for number in (0, 2)]
    order = group({0: GAVE_UP, 1: LATE, 2: GAVE_UP})
    return job(others[0], late, others[1], groups=[order], **more)  # type: ignore[arg-type]


def held_up(one: RankEvidence, **more: object) -> Evidence:
    """The others wait for rank 1, of which this is known."""
    return job(rank(0, step=2), one, rank(2, step=2), groups=[HELD_UP], **more)  # type: ignore[arg-type]


def failing(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The last one ended with an error of the backend."""
    return (*entries[:-1], replace(entries[-1], flags=FAILED, completed_ns=entries[-1].announced_ns + 1))


ALIKE = group(dict.fromkeys(range(3), trained(9)))
ALIKE_UNDER_JOIN = group(dict.fromkeys(range(3), tuple(replace(one, flags=UNEVEN_INPUTS) for one in trained(9))))
ENDED = tuple(rank(number, "ended", step=3) for number in range(3))

# Ranks that launched different things.


def diverged(kind: str, mine: list[Signature], theirs: list[Signature]) -> Evidence:
    """Rank 1 has launched others than ranks 0 and 2, from the second on."""
    same = [entry(1, bucket(0))]
    usual = (*same, *(entry(number, one) for number, one in enumerate(theirs, start=2)))
    other = (*same, *(entry(number, one, line=88) for number, one in enumerate(mine, start=2)))
    order = group({0: usual, 1: other, 2: usual}, first_divergence=2, divergence=kind)
    return job(*(rank(n, "gone") for n in range(3)), groups=[order])


def in_steps(*windows: tuple[int, ...]) -> Evidence:
    """Ranks have launched the same bucket in these steps, the last time as their fourth collective."""
    order = group(
        {
            n: [entry(5 - len(steps) + turn, bucket(0), step=step) for turn, step in enumerate(steps)]
            for n, steps in enumerate(windows)
        },
        first_divergence=4,
        divergence="step",
    )
    return job(*(rank(n, "ended") for n in range(len(windows))), groups=[order])


def at_batches(*windows: tuple[int | None, ...], number: int = 2) -> Evidence:
    """Ranks have launched the same bucket in steps 1, 2 ... for these batches; they differ from this number on."""
    order = group(
        {
            n: [replace(entry(turn, bucket(0), step=turn), batch=batch) for turn, batch in enumerate(batches, start=1)]
            for n, batches in enumerate(windows)
        },
        first_divergence=number,
        divergence="batch",
    )
    return job(*(rank(n, "ended") for n in range(len(windows))), groups=[order])


def after_update(step: int, rank_1: list[Signature]) -> Evidence:
    """Ranks 0 and 2 reduce in a step in which rank 1 has launched something else, after its update."""
    same = tuple(entry(number, bucket(number - 1), step=step - 1) for number in (1, 2))
    usual = (*same, *(entry(number, bucket(number - 3), step=step) for number in (3, 4)))
    other = (*same, *(entry(number, one, step=step + 1, line=88) for number, one in enumerate(rank_1, start=3)))
    order = group({0: usual, 1: other, 2: usual}, first_divergence=3, divergence="signature")
    return job(*(rank(n, "gone") for n in range(3)), groups=[order])


# Ranks whose gradients never came.

UNREADY = tuple(
    UnreadyParameter(model=0, name=f"branch.{name}", module="branch (Linear)", bucket=1) for name in ("weight", "bias")
)
BRANCHED = ModelParameters(
    model=0,
    class_name="Net",
    parameters=tuple((name, (2,), "float32") for name in ("branch.weight", "branch.bias", "c")),
)


def without_gradients(**more: Any) -> Evidence:
    """The others wait for bucket 1 of rank 1, whose backward is over unless this says otherwise."""
    one = rank(
        1, **{"phase": "optimizer", "step": 2, "since_ns": 10**9, "unready": UNREADY, "models": (BRANCHED,)} | more
    )
    return job(rank(0, step=2), one, rank(2, step=2), groups=[group({0: WAITING, 1: trained(7), 2: WAITING})])


# Ranks that have survived an exception.

STEP_NS = 10**9
"""When rank 1 has begun its step, if an exception follows in it."""
IN_QUEUE = (
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
    '  File "/usr/lib/python3.11/queue.py", line 171 in get\n'
    '  File "/home/me/train.py", line 12 in main\n'
)


def caught(how: str = "caught", *, step: int | None = 2, message: str = "bad shard", **more: Any) -> CaughtError:
    failure = Failure(type="ValueError", message=message, call_site=site(31), time_ns=STEP_NS + 1)
    fields = {"failure": failure, "step": step, "last_step": step, "last_ns": STEP_NS + 1}
    return CaughtError(how=how, **(fields | more))  # type: ignore[arg-type, call-overload]


def survivor(*errors: CaughtError, **more: Any) -> RankEvidence:
    """Rank 1, which the others wait for, has survived these."""
    fields = {"phase": "loop", "step": 2, "since_ns": STEP_NS, "caught": errors}
    return idle(rank(1, **(fields | more)), 5)


BEFORE_SECOND = caught("forward", failure=replace(caught().failure, time_ns=150_000))
"""Caught in step 2 before the second collective was launched."""
OF_THREAD = caught("thread", thread="loader")
OF_TASK = caught("future", thread="ThreadPoolExecutor-0_0")
OF_CHILD = caught("process", step=None, process="reader")
AGAIN = caught(count=20, count_in_step=20)


# Devices that are behind their hosts.


def launched(*is_reached: bool | None, done: int = 6) -> tuple[Entry, ...]:
    """So many have completed; then these, of which it is known, or not, whether the device has come to them."""
    flags = {None: 0, True: UNREACHED | REACHED, False: UNREACHED}
    numbers = range(done + 1, done + 1 + len(is_reached))
    ahead = (entry(n, bucket((n - 1) % 3), step=(n - 1) // 3, is_done=False) for n in numbers)
    return trained(done) + tuple(replace(one, flags=flags[each]) for one, each in zip(ahead, is_reached, strict=True))


def on_devices(*windows: tuple[Entry, ...], seconds: float = 5, **more: Any) -> Evidence:
    """Hosts have launched these over NCCL, and ask their devices again and again."""
    ranks = [
        idle(rank(n, "running", phase="loop", step=3, since_ns=10**9, is_working=True), seconds)
        for n in range(len(windows))
    ]
    return job(*ranks, groups=[group(dict(enumerate(windows)), backend="nccl")], **more)


INSIDE, BEFORE = launched(True, False, False), launched(False, False, False)

# Replicas that differ.

DIFFERENCE = ReplicaDifference(
    names=("stem.weight", "head.bias"),
    kind="trained",
    sides=((0, 2), (1,)),
    equal_at=12,
    equal_step=12,
    differs_at=13,
    differs_step=13,
    is_at_once=True,
)
DRIFTED = ComparedReplicas(
    model=0,
    class_name="Net",
    ranks=(0, 1, 2),
    tensors=2,
    moments=40,
    latest_step=50,
    difference=DIFFERENCE,
    buckets={"stem.weight": 1, "head.bias": 0},
    processors={"EPYC": (0, 1, 2)},
)


def sgd(*changes: tuple[int, int, float], key: str = "a", updates: int = 40) -> tuple[OptimizerHyperparameters, ...]:
    """From (update, step, lr)."""
    told = tuple(HyperparameterChange(update=update, step=step, values=(lr, 0.9)) for update, step, lr in changes)
    return (
        OptimizerHyperparameters(key=key, class_name="SGD", names=("lr", "momentum"), changes=told, updates=updates),
    )


def drifted(
    *compared: ComparedReplicas, settings: Sequence[tuple[OptimizerHyperparameters, ...]] = ((), (), ())
) -> Evidence:
    """A job that came to its end, with these replicas and settings of each rank's optimizer."""
    ranks = [replace(one, hyperparameters=own) for one, own in zip(ENDED, settings, strict=True)]
    return job(*ranks, groups=[ALIKE], replicas=compared)


# Jobs that were ended from outside.

SECOND_NS = 10**9
TOLD_NS = 2 * SECOND_NS
"""Ranks have launched their latest collective after 0.9 ms, and one that is told here has hung."""


def interrupt(time_ns: int) -> dict[str, Any]:
    return {"failure": Failure(type="KeyboardInterrupt", message="", time_ns=time_ns), "ended_ns": time_ns}


def told(number: int, status: int | None = None) -> dict[str, Any]:
    return {"signaled_at_ns": TOLD_NS, "signal_received": number, "exit_status": -number if status is None else status}


def of_three(*ends: RankEvidence, number: int | None = None, **more: Any) -> Evidence:
    """Of a command that was sent this signal, if any."""
    sent = {} if number is None else {"job_signal": number, "job_signaled_ns": TOLD_NS, "job_status": 1}
    return job(*ends, **({"groups": [ALIKE]} | sent | more))
