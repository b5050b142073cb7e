"""What is wrong and how it is said: for every kind of verdict, jobs with who is named and where, and their reports.

The wording is held by one golden file per kind, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any, NamedTuple, get_args

import pytest

from overlapscope.diagnosis.evidence import (
    JOINING,
    CreatedGroup,
    Evidence,
    ExitCall,
    Failure,
    InterruptedBackward,
    Liveness,
    ModelParameters,
    NonFiniteGradients,
    RankEvidence,
    RankSettings,
    RecordingGap,
    ReportedVerdict,
    UnreducedStep,
)
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.loop_facts import LoopFacts, MicroBatches, RepeatedReductions
from overlapscope.diagnosis.replica_drift import OUTSIDE_MODELS, EndComparison, StillParameters
from overlapscope.diagnosis.report_text import format_report
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.text import rank_list
from overlapscope.trace.collective_log import Signature
from tests.diagnosis.jobs import (
    AGAIN,
    ALIKE,
    ALIKE_UNDER_JOIN,
    BEFORE,
    BEFORE_SECOND,
    CLOSED,
    DIFFERENCE,
    DRIFTED,
    ENDED,
    HELD_UP,
    IN_LOADER,
    IN_QUEUE,
    INSIDE,
    LATE,
    OF_CHILD,
    OF_TASK,
    OF_THREAD,
    SECOND_NS,
    TIMED_OUT,
    TOLD_NS,
    UNREADY,
    WAITING,
    after_update,
    at_batches,
    caught,
    diverged,
    drifted,
    entry,
    failing,
    given_up,
    group,
    held_up,
    idle,
    in_steps,
    interrupt,
    job,
    launched,
    of_three,
    on_devices,
    rank,
    sgd,
    site,
    survivor,
    told,
    trained,
    without_gradients,
)
from tests.diagnosis.test_judge_new_group import MAKER, MEMBER, OTHER
from tests.diagnosis.test_judge_threads import mixed
from tests.diagnosis.test_segments import Jam, rounds_of
from tests.diagnosis.test_segments import evidence_of as evidence_of_jam
from tests.ordered import all_reduce, bucket

GIB = 1024**3
BAD_LABEL = Failure(type="ValueError", message="no such label\nsecond line", call_site=site(40))
NO_MEMORY = Failure(type="torch.OutOfMemoryError", message="CUDA out of memory.", call_site=site(7))
NO_STORE = Failure(
    type="torch.distributed.DistNetworkError",
    message="The client socket has timed out after 20000ms while trying to connect to (node0, 29500).",
    call_site=site(4),
)
LOOPBACK = Failure(
    type="RuntimeError",
    message="Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
    "connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:10143$0",
    call_site=site(4),
)
NO_ROUTE = Failure(
    type="torch.distributed.DistBackendError",
    message="NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call (e.g. socket, malloc) or external "
    "library call failed or device error.\nLast error:\nsocketStartConnect: Connect to 10.0.0.7<41235> failed : "
    "No route to host",
    call_site=site(4),
)
PORT_IN_USE = (
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use"
)
NO_ADDRESS = "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
ONE_DEVICE = Failure(
    type="torch.distributed.DistBackendError",
    message="NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, invalid usage (run with "
    "NCCL_DEBUG=WARN for details), NCCL version 2.19.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
    "library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
    call_site=site(4),
)
UNFINISHED = Failure(type="RuntimeError", message="Expected to have finished reduction ...", call_site=site(30))
PARAMETERS = tuple((name, (4, 4), "float32") for name in ("left.weight", "right.weight"))
BUFFERS = Signature(op="broadcast", elements=9, dtype="float32", role="buffers")
GONE = rank(1, "gone", phase="backward", step=2, rss_bytes=95 * GIB, memory_limit_bytes=100 * GIB)
GAP = RecordingGap(what="rank_1/collectives.log is missing", advice="Copy the folder of rank 1 as well.")
SPOILED = NonFiniteGradients(
    model=0,
    step=12,
    bucket=1,
    parameters=("head.weight", "head.bias"),
    tensors=6,
    has_nan=True,
    is_batch_finite=True,
    weights_after=("head.weight",),
)
SPREAD = replace(
    SPOILED,
    step=13,
    bucket=0,
    weights_before=("head.weight", "head.bias"),
    weights_after=(),
    finite_steps=tuple(range(13)),
)
LOST = UnreducedStep(model=0, step=2, call_site=site(7))
UNREDUCED = {
    "the reduction came first": replace(
        LOST, cause="no_sync", parameters=("a", "b"), parameter_count=2, backwards=3, reduced_backwards=1, last_step=2
    ),
    "under no_sync() alone": replace(LOST, cause="no_sync", updates=4, last_step=9),
    "of forwards before the reduction": replace(
        LOST, cause="late", call_sites=(site(7), site(8)), backwards=2, reduced_backwards=1, last_step=2
    ),
    "the module was moved": replace(
        LOST, cause="hooks lost", parameters=("a", "b", "c", "d"), parameter_count=9, updates=5, last_step=6
    ),
    "a bucket was never complete": replace(LOST, cause="incomplete", parameters=("a",), parameter_count=1, last_step=2),
}
BY_HAND: dict[str, UnreducedStep] = {
    "a loop without DDP leaves some out": replace(
        LOST, model=OUTSIDE_MODELS, cause="in part", parameters=("a",), parameter_count=1, updates=8, last_step=9
    ),
    "a loop without DDP left it out once": replace(
        LOST, model=OUTSIDE_MODELS, cause="left out", parameters=("a", "b"), parameter_count=2
    ),
}
PARTED = replace(DRIFTED, model=OUTSIDE_MODELS, difference=replace(DIFFERENCE, equal_step=2, differs_step=3))
BATCHES = tuple((number, str(number)) for number in range(5))
REMARKABLE = LoopFacts(
    repeated=(
        RepeatedReductions(model=0, by="user", step=4, updates=3, site="train.py:9 (main)", backwards=1),
        RepeatedReductions(model=0, by="backwards", step=0, updates=30, site="train.py:8 (main)", backwards=4),
    ),
    micro_batches=(MicroBatches(model=0, changes=((0, 4),), last_step=30),),
    batches=BATCHES,
)
UNEVEN = replace(
    REMARKABLE, repeated=(), micro_batches=(MicroBatches(model=0, changes=((0, 4), (7, 3)), last_step=30),)
)
STILL = StillParameters(rank=1, names=("head.bias", "head.weight"), step=12, is_since_start=False)
HARMLESS_NAN = replace(SPOILED, weights_after=())
IN_CALLBACK = (
    "Thread 0x00007f (most recent call first):\n"
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/hook.py", line 611 in compute\n'
    "\nThread 0x00007e (most recent call first):\n"
    '  File "/home/me/train.py", line 42 in main\n'
)
SEEN = ReportedVerdict(rank=0, time_ns=1, kind="stopped", sentence="Rank 1 is stopped.", blamed=(1,))
PIPELINE = (group({0: (entry(1, Signature(op="send", peer=1, elements=4, dtype="float32")),)}, ranks=(0, 1)),)


class Case(NamedTuple):
    """A job, and what a verdict on it says beside its kind."""

    what: str
    facts: str
    """As ``facts_of`` has them."""
    evidence: Evidence


def facts_of(verdict: Verdict) -> str:
    """Who is blamed or suspected, the step, the number of the collective, and whether something else is possible."""
    facts = [rank_list(verdict.named)] if verdict.named else []
    facts += [] if verdict.step is None else [f"step {verdict.step}"]
    facts += [] if verdict.number is None else [f"collective {verdict.number}"]
    return ", ".join([*facts, *(["likely"] if verdict.certainty == "likely" else [])])


def with_rank(evidence: Evidence, *others: RankEvidence) -> Evidence:
    """The same job, of which something else is known of these ranks."""
    return replace(evidence, ranks=evidence.ranks | {one.rank: one for one in others})


def with_models(*models: tuple[int, ...], frozen: tuple[str, ...] = ()) -> Evidence:
    """Each rank has these parameters in this order; these are frozen on rank 1."""
    of_ranks = [
        ModelParameters(
            model=0,
            class_name="Net",
            parameters=tuple(PARAMETERS[place] for place in places),
            frozen=frozen if number == 1 else (),
        )
        for number, places in enumerate(models)
    ]
    return job(*(rank(number, models=(one,)) for number, one in enumerate(of_ranks)))


def with_hook(hook: str, own: Signature, lines: tuple[int, ...] = (20, 20, 20)) -> Evidence:
    """Rank 1 has a hook that reduces something else."""
    windows = {n: (entry(1, all_reduce()), entry(2, one)) for n, one in enumerate([bucket(0), own, bucket(0)])}
    hooks = ("none", hook, "none")
    ranks = [
        rank(n, settings=(RankSettings(model=0, values={"wrapper": "torch", "comm_hook": one}, call_site=site(line)),))
        for n, (one, line) in enumerate(zip(hooks, lines, strict=True))
    ]
    return job(*ranks, groups=[group(windows, first_divergence=2, divergence="signature")])


def interleaved() -> Evidence:
    """Ranks 0 and 1 wait for each other in two groups."""
    rows = group({0: (entry(1, all_reduce("a"), is_done=False, line=10),)}, name="rows", ranks=(0, 1))
    columns = group({1: (entry(1, all_reduce("b"), is_done=False, line=20),)}, name="columns", ranks=(0, 1))
    return job(rank(0, phase=None), rank(1, phase=None), groups=[rows, columns])


def dumps(*launched: int, world: int | None = None, is_waiting: bool = True, **more: Any) -> Evidence:
    order = group(
        {n: trained(count, is_waiting=is_waiting) for n, count in enumerate(launched)},
        ranks=range(len(launched) if world is None else world),
        **more,
    )
    return job(*(rank(n, "dumped", phase=None) for n in range(len(launched))), groups=[order], world=world)


def failed(failure: Failure, **more: Any) -> Evidence:
    return job(rank(0, "failed", failure=CLOSED), rank(1, "failed", **({"step": 3, "failure": failure} | more)))


def unconnected(
    failure: Failure,
    other: Liveness = "unknown",
    *,
    error: Failure = BAD_LABEL,
    hosts: tuple[str, str] = ("", ""),
    world: int = 2,
) -> Evidence:
    """Rank 0 fails in init_process_group, where rank 1 waits unless it has failed by itself or is gone."""
    first = rank(0, "failed", phase=JOINING, failure=failure, host=hosts[0])
    second = rank(1, other, phase=JOINING, failure=error if other == "failed" else None, host=hosts[1])
    return job(first, second, world=world)


def exited(status: int, call: ExitCall | None) -> Evidence:
    """Rank 1 exited with this status; rank 0 was told to end then."""
    own = rank(1, "failed", phase="forward", step=2, exit_status=status, exit_call=call)
    return job(rank(0, "gone", **told(SIGTERM)), own, rank(2, "failed", failure=CLOSED), groups=[HELD_UP])


def killed(*ranks_gone: int, **more: Any) -> Evidence:
    ranks = [rank(n, "gone", **more) if n in ranks_gone else rank(n, "failed", failure=CLOSED) for n in range(3)]
    return job(*ranks, groups=[ALIKE])


def unanswered() -> Evidence:
    """Rank 0 receives from rank 1, which has sent nothing and waits for a bucket."""
    recv = entry(1, Signature(op="recv", dtype="float32", elements=5, peer=1), step=2, is_done=False, line=50)
    reduced = group({0: trained(6), 1: WAITING}, ranks=(0, 1))
    talk = group({0: (replace(recv, announced_ns=10**8),)}, ranks=(0, 1))
    return job(rank(0, step=2, phase=None), rank(1, step=2), groups=[reduced], point_to_point_orders=(talk,))


def message_cycle(*signatures: Signature) -> Evidence:
    """Each rank waits in a message until its timeout."""
    windows = {n: [entry(1, one, step=2, is_done=False, line=50 + n)] for n, one in enumerate(signatures)}
    ranks = [rank(n, "failed", step=2, phase=None, failure=TIMED_OUT) for n in windows]
    return replace(job(*ranks), point_to_point_orders=(group(windows),))


def message(op: str, peer: int, **more: Any) -> Signature:
    return Signature(op=op, dtype="float32", elements=5, bytes=20, peer=peer, **more)


def unlike_lists(*lists: tuple[int, ...], following: tuple[int, ...] | None = None) -> Evidence:
    """Each rank has made a group with such a list; those but the last another one after it."""
    made = [[CreatedGroup(name="1", ranks=one, backend="gloo", call_site=site(14))] for one in lists]
    for own in made[:-1] if following else ():
        own.append(CreatedGroup(name="2", ranks=following or (), backend="gloo", call_site=site(20)))
    return job(*(rank(n, phase=None, created_groups=tuple(own)) for n, own in enumerate(made)))


def left_out(*, has_failed: bool = False) -> Evidence:
    """Rank 1 is in the next step, and has not entered what rank 0 waits in."""
    waits = replace(entry(4, all_reduce("metric"), step=2, is_done=False, line=88), announced_ns=10**6)
    pair = group(
        {0: failing((waits,)) if has_failed else [waits], 1: [entry(3, all_reduce("metric"), step=1)]},
        name="pair",
        ranks=(0, 1),
    )
    later = [replace(entry(9, bucket(0), step=3, is_done=False), announced_ns=10**9)]
    everyone = group({0: trained(8), 1: later, 2: later}, ranks=(0, 1, 2))
    return job(rank(0, step=2, phase="loop"), rank(1, step=3), rank(2, step=3), groups=[everyone, pair])


def recreated() -> Evidence:
    old = group({n: trained(9, is_waiting=n != 1) for n in range(3)}, name="0")
    first = replace(entry(1, all_reduce(), is_done=False), announced_ns=10**7)
    again = group({1: [first]}, name="0 (2)", ranks=(0, 1, 2))
    return job(*(idle(rank(n, step=2), 30) for n in range(3)), groups=[old, again], is_live=True)


def at_other_lines() -> Evidence:
    """An extra forward of DDP on one rank: its buffers are first matched with those of the others' next forward."""
    others = [entry(n, one, line=80 + n) for n, one in enumerate([bucket(0), BUFFERS, bucket(0)], start=1)]
    own = [others[0], replace(others[1], call_site=site(99)), entry(3, BUFFERS, line=81)]
    order = group({0: others, 1: own, 2: others}, first_divergence=3, divergence="signature")
    return job(*(rank(n) for n in range(3)), groups=[order])


def with_batches(*batches: int, launched: Signature) -> Evidence:
    """Rank 1 has launched something else in step 2; ranks had reached these batches."""
    windows = {
        n: [
            replace(entry(1, bucket(0), step=1), batch=5),
            replace(entry(2, launched if n == 1 else bucket(0), step=2), batch=batch),
        ]
        for n, batch in enumerate(batches)
    }
    order = group(windows, first_divergence=2, divergence="signature")
    return job(*(rank(n) for n in range(len(batches))), groups=[order])


def unlike(x: int, y: int, **more: Any) -> Evidence:
    """Two ranks reduce different sizes."""
    windows = {n: [entry(number, all_reduce("x", size))] for n, (number, size) in enumerate(((1, x), (1, y)))}
    order = group(windows, first_divergence=1, divergence="signature", **more)
    return job(rank(0, "gone"), rank(1, "gone"), groups=[order])


def apart() -> Evidence:
    """Rank 1 is a step ahead before it launches something else."""
    windows = {n: [entry(1, all_reduce("x"), step=3 + n), entry(2, all_reduce("x", 1 + n), step=4)] for n in range(2)}
    order = group(windows, first_divergence=2, divergence="signature", predates_log=True)
    return job(rank(0, "gone"), rank(1, "gone"), groups=[order])


def late(**more: Any) -> Evidence:
    """The others wait for rank 1, which has not begun its third step."""
    seconds = more.pop("seconds", 60)
    one = rank(1, **({"phase": "forward", "step": 2, "since_ns": SECOND_NS} | more))
    return held_up(idle(one, seconds))


def at_position(**more: Any) -> Evidence:
    """The others wait for rank 1, which is between two steps, unless this says otherwise."""
    one = rank(1, phase="loop", step=2, since_ns=SECOND_NS)
    assert one.position is not None
    return held_up(idle(replace(one, position=replace(one.position, **more)), 60))


def live(evidence: Evidence) -> Evidence:
    return replace(evidence, is_live=True)


def in_call_of(file: str) -> str:
    return (
        "Current thread 0x00007f (most recent call first):\n"
        f'  File "{file}", line 320 in wait\n'
        '  File "/home/me/train.py", line 12 in main\n'
    )


def starting(**where: Any) -> Evidence:
    """Ranks 0 and 2 wait for the first bucket of rank 1."""
    own = rank(1, **({"phase": "forward", "since_ns": SECOND_NS} | where))
    assert own.position is not None
    own = replace(own, is_starting=True, idle_ns=6 * SECOND_NS, position=replace(own.position, call_site=site(7)))
    waiting = group({n: trained(1, is_waiting=True) for n in (0, 2)}, ranks=(0, 1, 2))
    return job(rank(0), own, rank(2), groups=[waiting], is_live=True)


def at_end(**more: Any) -> Evidence:
    found = {"differing": ("head.bias",), "sides": ((1, 2), (0,))} | more
    return drifted(replace(DRIFTED, difference=None, at_end=EndComparison(**found)))


def healthy_replicas(**more: Any) -> Evidence:
    return drifted(replace(DRIFTED, **({"difference": None} | more)))


def differing(**more: Any) -> Evidence:
    """Replicas of which this is different from what is usual here."""
    of_difference = {name: more.pop(name) for name in list(more) if hasattr(DIFFERENCE, name)}
    return drifted(replace(DRIFTED, difference=replace(DIFFERENCE, **of_difference), **more))


FROM_START = {"equal_at": None, "equal_step": None, "differs_at": 0, "differs_step": 0}
SAME_LR = (sgd((0, 0, 0.1)),) * 3
OTHER_LR = (sgd((0, 0, 0.1)), sgd((0, 0, 0.1), (20, 20, 0.01)), sgd((0, 0, 0.1)))

CASES: dict[str, list[Case]] = {
    "healthy": [
        Case("all ranks came to their end", "", job(*ENDED, groups=[ALIKE])),
        Case("the job runs", "", job(*(rank(n, "running", step=3) for n in range(3)), groups=[ALIKE], is_live=True)),
        Case("nothing was launched", "", job(*ENDED)),
        Case("only sends and receives", "", job(*ENDED[:2], point_to_point_orders=PIPELINE)),
        Case(
            "the folder of a rank is lost",
            "",
            job(*ENDED[:2], groups=[group({0: trained(9), 1: trained(9)}, ranks=range(3))], world=3),
        ),
        Case("SIGTERM was caught, and work was saved", "", of_three(*ENDED, number=SIGTERM, job_status=0)),
        Case("replicas are the same", "", healthy_replicas()),
        Case("replicas are the same at the end as well", "", at_end(differing=(), sides=((0, 1, 2),))),
        Case(
            "a rank may have loaded a checkpoint",
            "",
            at_end(differing=("stem.weight", "head.bias"), is_all_trained=True),
        ),
        Case("replicas are averaged now and then", "", differing(comm_hook="post_localSGD_hook")),
        Case("replicas had been made equal again before", "", differing(was_made_equal=True)),
        Case("replicas were made equal again", "", healthy_replicas(was_different=(3, 7))),
        Case("replicas have nothing in common", "", healthy_replicas(tensors=0, moments=0, latest_step=None)),
        Case(
            "buffers differ",
            "",
            healthy_replicas(buffers=replace(DIFFERENCE, kind="buffer", names=("norm.running_mean",))),
        ),
        Case(
            "with remarks",
            "",
            job(
                *(
                    replace(
                        one, loop=UNEVEN if one.rank == 1 else REMARKABLE, non_finite=(HARMLESS_NAN,) * (one.rank == 2)
                    )
                    for one in ENDED
                ),
                groups=[ALIKE],
                replicas=(
                    replace(DRIFTED, difference=None, still=(STILL, replace(STILL, step=0, is_since_start=True))),
                ),
            ),
        ),
    ],
    "models differ": [
        Case("another order on one rank", "rank 1", with_models((0, 1), (1, 0), (0, 1))),
        Case("two ranks, and one has a parameter more", "", with_models((0, 1), (0,))),
        Case(
            "a parameter is frozen on one rank", "rank 1", with_models((0, 1), (0,), (0, 1), frozen=("right.weight",))
        ),
    ],
    "settings differ": [
        Case(
            "a hook that reduces another type",
            "rank 1, step 0, collective 2",
            with_hook("fp16_compress_hook", replace(bucket(0), reduce_op="sum", dtype="float16")),
        ),
        Case(
            "a hook that reduces the same, registered elsewhere",
            "rank 1, step 0, collective 2, likely",
            with_hook("my_hook", replace(bucket(0), role="hook", reduce_op=""), lines=(20, 30, 20)),
        ),
    ],
    "different collectives": [
        Case(
            "another size on one rank",
            "rank 1, step 0, collective 2",
            diverged("signature", [all_reduce("x", 1001), bucket(2)], [all_reduce("x", 1000), bucket(2)]),
        ),
        Case("two ranks", "step 0, collective 1", unlike(1000, 1001)),
        Case("lists of ranks", "rank 2", unlike_lists((0, 1), (0, 1), (0, 2))),
        Case(
            "a recv that is too small",
            "step 2",
            message_cycle(replace(message("send", 1), elements=6, bytes=24), message("recv", 0)),
        ),
        Case("two threads", "step 0, collective 3", mixed(3, 4, 3)),
        Case("two threads, and an abort", "step 0, likely", mixed(3, 3, 3, exit_status=-6)),
        Case("older than the logs", "collective 1, likely", unlike(1000, 1001, predates_log=True, ranks=range(3))),
        Case("a step apart before", "collective 2, likely", apart()),
        Case("a forward begins where the others reduce", "rank 1, step 0, collective 3", at_other_lines()),
        Case("at other batches", "rank 1, step 2, collective 2", with_batches(6, 7, 6, launched=all_reduce())),
        Case(
            "an abort is a consequence, and a setting is not the cause",
            "rank 1, step 0, collective 2",
            with_rank(
                diverged("signature", [all_reduce("x", 1001)], [all_reduce("x", 1000)]),
                rank(0, "failed", failure=CLOSED, settings=(RankSettings(model=0, values={"static_graph": "False"}),)),
                rank(1, "gone", settings=(RankSettings(model=0, values={"static_graph": "True"}),)),
            ),
        ),
    ],
    "missing collective": [
        Case("recv against recv", "step 2, collective 1", message_cycle(message("recv", 1), message("recv", 0))),
        Case(
            "other tags", "step 2, collective 1", message_cycle(message("send", 1, tag=9), message("recv", 0, tag=10))
        ),
        Case("a list of ranks left out", "rank 2", unlike_lists((0, 1), (0, 1), (0, 1, 2), following=(0, 1, 2))),
        Case(
            "one too many",
            "rank 1, step 0, collective 2",
            diverged("signature", [all_reduce(), bucket(1), bucket(2)], [bucket(1), bucket(2), bucket(0)]),
        ),
        Case(
            "one short",
            "rank 1, step 0, collective 2",
            diverged("signature", [bucket(2), bucket(0)], [all_reduce(), bucket(2), bucket(0)]),
        ),
        Case(
            "matched with that of the next step",
            "rank 1, step 1, collective 4",
            replace(
                job(*ENDED),
                groups=(
                    group(
                        {n: [entry(4, all_reduce("metric"), step=2 if n == 1 else 1)] for n in range(3)},
                        first_divergence=4,
                        divergence="step",
                    ),
                ),
            ),
        ),
        Case(
            "new_group on one rank only",
            "rank 0, step 1, collective 4, likely",
            job(
                MAKER,
                MEMBER,
                OTHER,
                groups=[group({0: trained(3), 1: trained(4, is_waiting=True), 2: trained(4, is_waiting=True)})],
                is_live=True,
            ),
        ),
        Case("all finished, one without the latest", "rank 1, step 2, collective 7", job(*ENDED, groups=[HELD_UP])),
        Case("in the next step without it", "rank 1, step 2, collective 4", left_out()),
        Case("it failed because of that", "rank 1, step 2, collective 4", left_out(has_failed=True)),
        Case("nothing was sent", "step 2, collective 1", unanswered()),
        Case("the default group was made again", "step 0, collective 1, likely", recreated()),
    ],
    "swapped collectives": [
        Case(
            "of two names",
            "rank 1, step 0, collective 2",
            diverged("names", [all_reduce("a"), all_reduce("b")], [all_reduce("b"), all_reduce("a")]),
        )
    ],
    "step behind": [
        Case("no bucket in a step", "rank 1, step 1, collective 4", in_steps((0, 1), (0, 2), (0, 1))),
        Case("the step before is not known", "rank 1, step 1, collective 4", in_steps((1,), (2,), (1,))),
        Case("reduced again in a step", "rank 1, step 1, collective 4", in_steps((1, 2), (1, 1), (1, 2))),
        Case("something else where the others reduce", "rank 1, step 7, collective 3", after_update(7, [all_reduce()])),
        Case(
            "under no_sync()",
            "rank 1, step 1, collective 4",
            with_rank(in_steps((0, 1), (0, 2), (0, 1)), rank(1, no_sync_since=1, steps_done=3)),
        ),
    ],
    "batch skipped": [
        Case("on one rank", "rank 1, step 2, collective 2", at_batches((5, 5), (5, 6), (5, 5))),
        Case(
            "after an exception",
            "rank 1, step 2, collective 2, likely",
            with_rank(at_batches((5, 5), (5, 6)), rank(1, "ended", caught=(BEFORE_SECOND,))),
        ),
    ],
    "gradients never ready": [
        Case("after the backward", "rank 1, step 2, collective 8", without_gradients()),
        Case(
            "of two buckets",
            "rank 1, step 2, collective 8",
            without_gradients(unready=(UNREADY[0], replace(UNREADY[1], bucket=2))),
        ),
        Case(
            "the backward may still run",
            "rank 1, step 2, collective 7, likely",
            live(held_up(idle(without_gradients(phase="backward").ranks[1], 5))),
        ),
        Case(
            "all ranks skip a branch",
            "step 12",
            job(
                *(
                    replace(
                        without_gradients(phase="forward", step=13).ranks[1],
                        rank=n,
                        liveness="failed",
                        failure=UNFINISHED,
                    )
                    for n in range(3)
                )
            ),
        ),
        Case(
            "an exception came out of the backward",
            "rank 1, step 2, collective 8",
            without_gradients(
                phase="forward", interrupted_backwards=(InterruptedBackward(step=2, call_site=site(30)),)
            ),
        ),
        Case(
            "frozen after it was wrapped",
            "rank 1, step 2, collective 8",
            without_gradients(unready=tuple(replace(one, frozen_in=2) for one in without_gradients().ranks[1].unready)),
        ),
    ],
    "not finite": [
        Case(
            "a loss of one rank",
            "rank 1, step 12",
            job(*(replace(one, non_finite=(SPOILED if one.rank == 1 else SPREAD,)) for one in ENDED), groups=[ALIKE]),
        ),
        Case(
            "a batch of one rank",
            "rank 1, step 12",
            job(
                *(
                    replace(one, non_finite=(replace(SPOILED, is_batch_finite=False) if one.rank == 1 else SPREAD,))
                    for one in ENDED
                ),
                groups=[ALIKE],
            ),
        ),
        Case(
            "everywhere",
            "step 12",
            job(*(replace(one, non_finite=(SPOILED,)) for one in ENDED), groups=[ALIKE]),
        ),
        Case(
            "only seen in the weights",
            "step 12",
            job(*(replace(one, non_finite=(SPREAD,)) for one in ENDED), groups=[ALIKE]),
        ),
        Case(
            "only seen in the weights, some steps later",
            "step 9",
            job(*(replace(one, non_finite=(replace(SPREAD, unseen_since_step=9),)) for one in ENDED), groups=[ALIKE]),
        ),
        Case(
            "a rank did not look",
            "step 12",
            job(
                *(
                    replace(one, non_finite=(SPOILED if one.rank == 1 else replace(SPREAD, finite_steps=(0, 8)),))
                    for one in ENDED
                ),
                groups=[ALIKE],
            ),
        ),
        Case(
            "from the start",
            "step 0",
            job(*(replace(one, non_finite=(replace(SPREAD, step=0),)) for one in ENDED), groups=[ALIKE]),
        ),
    ],
    "not reduced": [
        Case(
            "on one rank",
            "rank 1, step 2",
            job(
                *(replace(one, steps_done=3, unreduced=(LOST,) if one.rank == 1 else ()) for one in ENDED),
                groups=[ALIKE],
            ),
        ),
        Case(
            "on one rank, before the others got there",
            "step 2",
            job(
                *(
                    replace(one, steps_done=2 + (one.rank == 1), unreduced=(LOST,) if one.rank == 1 else ())
                    for one in ENDED
                ),
                groups=[ALIKE],
            ),
        ),
        *(
            Case(
                what,
                "step 2" + ", likely" * ("alone" in what),
                job(*(replace(one, unreduced=(lost,)) for one in ENDED), groups=[ALIKE]),
            )
            for what, lost in UNREDUCED.items()
        ),
        *(
            Case(
                what,
                "step 2" + ", likely" * (lost.cause == "in part"),
                job(*(replace(one, unreduced=(lost,)) for one in ENDED), groups=[ALIKE], replicas=(PARTED,)),
            )
            for what, lost in BY_HAND.items()
        ),
        Case(
            "a loop without DDP left it out before it was compared",
            "step 2, likely",
            job(
                *(replace(one, unreduced=tuple(BY_HAND.values())[1:]) for one in ENDED),
                groups=[ALIKE],
                replicas=(
                    replace(PARTED, difference=replace(DIFFERENCE, equal_at=None, equal_step=None, differs_step=3)),
                ),
            ),
        ),
        Case(
            "for a cause of a later version",
            "step 2, likely",
            job(*(replace(one, unreduced=(replace(LOST, cause="teleported"),)) for one in ENDED), groups=[ALIKE]),  # type: ignore[arg-type]
        ),
        Case(
            "at another batch since then",
            "rank 1, step 2, collective 2",
            with_rank(
                at_batches((1, 2, 3), (1, 3, 4), (1, 2, 3)),
                *(rank(n, "ended", steps_done=4, unreduced=(LOST,) * (n == 1)) for n in range(3)),
            ),
        ),
        Case(
            "never out of no_sync()",
            "rank 1, step 2, collective 7",
            late(phase="loop", step=4, no_sync_since=2, steps_done=4),
        ),
    ],
    "replicas differ": [
        Case("since a step", "rank 1, step 12", differing()),
        Case("since a step or before", "rank 1", differing(equal_step=None)),
        Case(
            "others have not been compared since",
            "rank 1, step 12",
            drifted(replace(DRIFTED, tensors=5, difference=replace(DIFFERENCE, uncompared=("a", "b", "c")))),
        ),
        Case(
            "one parameter since one of several steps, settings are the same",
            "rank 1, step 12",
            drifted(
                replace(DRIFTED, difference=replace(DIFFERENCE, names=("head.bias",), differs_step=29)),
                settings=SAME_LR,
            ),
        ),
        Case(
            "a setting explains it",
            "rank 1, step 20",
            drifted(replace(DRIFTED, difference=replace(DIFFERENCE, differs_step=29)), settings=OTHER_LR),
        ),
        Case("from the start", "rank 1", differing(**FROM_START)),
        Case("from the start, with init_sync=False", "rank 1", differing(**FROM_START, init_sync=False)),
        Case(
            "two ranks, of three",
            "step 12",
            differing(sides=((0,), (1,)), left_out=(("embedding", "its layout is sparse"),)),
        ),
        Case(
            "other processors, and a hook",
            "rank 1, step 12, likely",
            differing(processors={"EPYC": (0, 2), "Xeon": (1,)}, comm_hook="my_hook"),
        ),
        Case("frozen parameters", "rank 1, step 12, likely", differing(kind="frozen")),
        Case("under join()", "rank 1, step 12", replace(differing(), groups=(ALIKE_UNDER_JOIN,))),
        Case("when the recording ended", "rank 0, step 45, likely", at_end(equal_step=45)),
    ],
    "uneven inputs": [
        Case("it ended", "rank 1, step 2, collective 7", late(liveness="ended", phase="loop", steps_done=2)),
        Case(
            "it called sys.exit, after an exception out of a backward",
            "rank 1, step 2, collective 7",
            late(
                liveness="ended",
                phase="loop",
                exit_call=ExitCall(status=0, call_site=site(50)),
                interrupted_backwards=(InterruptedBackward(step=1, call_site=site(20)),),
            ),
        ),
        Case(
            "it is past its loop",
            "rank 1, step 2, collective 7, likely",
            live(late(phase="loop", stacks=in_call_of("/torch/distributed/x.py").replace("in wait", "in barrier"))),
        ),
    ],
    "groups interleaved": [Case("two ranks", "step 0, collective 1, likely", interleaved())],
    "waits for data": [
        Case(
            "for a while",
            "rank 1, step 2, collective 7, likely",
            live(late(phase="loop", stacks=IN_LOADER, seconds=20)),
        )
    ],
    "stuck": [
        Case(
            "until the others' time was up",
            "rank 1, step 2, collective 7",
            given_up(idle(rank(1, "gone", phase="forward", step=2, signaled_at_ns=1), 16)),
        ),
        Case(
            "it went on, and the others' time was up",
            "rank 1, step 2, collective 7",
            given_up(idle(rank(1, "running", phase="forward", step=2, is_working=True), 0.1), is_live=True),
        ),
        Case("in forward", "rank 1, step 2, collective 7, likely", late()),
        *(
            Case(what, f"rank 1, step {step}, collective 7, likely", at_position(**where))
            for what, step, where in (
                ("after an update", 1, {"has_begun_next_iteration": False}),
                ("in the next iteration", 2, {"has_begun_next_iteration": True}),
                ("after a backward", 2, {"is_after_update": False}),
                ("in an evaluation", 2, {"phase": "evaluation"}),
                ("before a bucket", 2, {"phase": "backward", "is_after_update": False, "bucket": 1}),
            )
        ),
        Case("unreachable", "rank 1, step 2, collective 7, likely", late(liveness="silent")),
        Case(
            "busy, and perhaps gone",
            "rank 1, step 2, collective 7, likely",
            late(liveness="unknown", is_working=True, cpu_share=0.98),
        ),
        *(
            Case(
                f"in {file.rpartition('/')[2]}",
                "rank 1, step 2, collective 7, likely",
                live(late(phase="loop", stacks=in_call_of(file))),
            )
            for file in (
                "/usr/lib/python3.11/threading.py",
                "/usr/lib/python3.11/socket.py",
                "/usr/lib/python3.11/subprocess.py",
                "/venv/lib/python3.11/site-packages/torch/serialization.py",
                "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
                "/home/me/model.py",
            )
        ),
        Case(
            "as its watchdog reported",
            "rank 1",
            job(*(rank(n, "gone") for n in range(3)), reports=(replace(SEEN, kind="stuck", sentence="Rank 1 hangs."),)),
        ),
        Case(
            "all are in it",
            "step 2, collective 9, likely",
            job(*(rank(n, step=2) for n in range(3)), groups=[group(dict.fromkeys(range(3), WAITING))]),
        ),
        Case(
            "all are in it, and callbacks hold the backend's threads",
            "step 2, collective 9, likely",
            job(
                *(rank(n, step=2, stacks=IN_CALLBACK) for n in range(3)),
                groups=[group(dict.fromkeys(range(3), WAITING))],
            ),
        ),
        Case(
            "all hosts have launched it",
            "step 2, collective 7, likely",
            on_devices(launched(None), launched(None), seconds=70),
        ),
        Case("all devices are in it", "step 2, collective 7, likely", on_devices(INSIDE, INSIDE, seconds=70)),
        Case("no device is in it", "step 2, collective 7, likely", on_devices(BEFORE, BEFORE, seconds=70)),
        Case(
            "a device is late",
            "rank 1, step 2, collective 7, likely",
            on_devices(INSIDE, BEFORE, INSIDE, seconds=120, is_live=True),
        ),
        Case("dumps: not launched", "rank 1, collective 7", dumps(9, 6, 9)),
        Case(
            "dumps: the other side of a send",
            "collective 1",
            job(
                *(rank(n, "dumped", phase=None) for n in range(2)),
                groups=[group({0: trained(6), 1: trained(6)})],
                point_to_point_orders=(
                    group(
                        {
                            0: [
                                replace(
                                    entry(1, Signature(op="send", peer=1, elements=4, dtype="float32"), is_done=False),
                                    announced_ns=SECOND_NS,
                                )
                            ]
                        },
                        ranks=(0, 1),
                    ),
                ),
            ),
        ),
        Case("dumps: none of a rank that takes part", "collective 9", dumps(9, 9, world=3)),
        Case(
            "a message is lost",
            "step 7, collective 1, likely",
            evidence_of_jam(Jam(rounds_of("ring", 3), lost=(0, 1, 0, 3))),
        ),
    ],
    "stopped": [
        Case("in forward", "rank 1, step 2", late(liveness="stopped", since_ns=0, silent_for_ns=5 * SECOND_NS)),
        Case(
            "in a round of a ring", "rank 1, step 7", evidence_of_jam(Jam(rounds_of("ring", 3), victim=1, stops_at=2))
        ),
        Case("in a tree", "rank 1, step 7", evidence_of_jam(Jam(rounds_of("tree", 3), victim=1, stops_at=0))),
        Case("as its watchdog reported", "rank 1, step 0", job(*(rank(n, "gone") for n in range(3)), reports=(SEEN,))),
        Case("replicas differ as well", "rank 1, step 2", replace(late(liveness="stopped"), replicas=(DRIFTED,))),
    ],
    "holds the GIL": [
        Case(
            "in forward",
            "rank 1, step 2",
            held_up(rank(1, "running", phase="forward", step=2, holds_gil=True, silent_for_ns=9 * SECOND_NS)),
        ),
        Case(
            "while the job runs",
            "rank 1, step 2, likely",
            live(held_up(rank(1, "running", phase="forward", step=2, holds_gil=True, silent_for_ns=9 * SECOND_NS))),
        ),
    ],
    "killed": [
        Case(
            "near its memory limit",
            "rank 1, step 2",
            job(rank(0, "failed", failure=CLOSED), GONE, rank(2, "failed", failure=CLOSED), groups=[HELD_UP]),
        ),
        Case(
            "by a signal",
            "rank 1, step 2",
            job(rank(0, "failed", failure=CLOSED), replace(GONE, exit_status=-SIGKILL, rss_bytes=None)),
        ),
        Case("it aborted", "rank 1, step 0", killed(1, stacks="Fatal Python error: Aborted\n", phase="backward")),
        Case(
            "another one later",
            "rank 1, step 2",
            job(
                rank(0, "failed", failure=CLOSED, step=2),
                replace(GONE, rss_bytes=None),
                rank(2, "gone", step=2),
                groups=[HELD_UP],
            ),
        ),
        Case(
            "two at once, elsewhere",
            "ranks 0, 1, step 2",
            job(
                rank(0, "gone", phase="forward", step=2), rank(1, "gone", phase="loop", step=3), rank(2), groups=[ALIKE]
            ),
        ),
        Case("all", "step 0", job(rank(0, "gone"), rank(1, "gone"))),
        Case(
            "all were ended, and the folder of one is lost",
            "step 0",
            job(
                *(rank(n, "gone", **told(SIGTERM)) for n in (0, 1)),
                groups=[group({n: trained(9) for n in (0, 1)}, ranks=range(3))],
                world=3,
            ),
        ),
        Case("while Python shut down", "rank 1", job(ENDED[0], replace(ENDED[1], exit_status=-6))),
        Case(
            "while Python shut down, and the others because of that",
            "rank 1",
            job(replace(ENDED[0], liveness="gone", **told(SIGTERM)), replace(ENDED[1], exit_status=-6), groups=[ALIKE]),
        ),
        Case(
            "after Ctrl-C",
            "rank 1, step 0",
            of_three(
                rank(0, "gone", **told(SIGTERM)),
                rank(1, "gone", exit_status=-9),
                rank(2, "gone", **told(SIGTERM)),
                number=SIGINT,
            ),
        ),
    ],
    "out of memory": [
        Case("on a device", "rank 1, step 3", failed(NO_MEMORY, rss_bytes=95 * GIB, memory_limit_bytes=100 * GIB)),
        Case("it was caught", "rank 1, step 2", exited(1, ExitCall(status=1, call_site=site(90), caught=NO_MEMORY))),
    ],
    "failed": [
        Case("each rank by itself", "step 3", job(*(rank(n, "failed", step=3, failure=BAD_LABEL) for n in range(2)))),
        Case("an exception", "rank 1, step 3", failed(BAD_LABEL)),
        Case("in a script without steps", "rank 1, step 0", failed(BAD_LABEL, step=0, phase=None)),
        *(
            Case(f"ends with {message[-5:]!r}", "rank 1, step 3", failed(Failure(type="ValueError", message=message)))
            for message in ("no such file: '../x'", "2 .. 4 labels", "no such label.", "loading ...", "word " * 100)
        ),
        Case(
            "in a thread",
            "rank 1, step 2, collective 7, likely",
            held_up(survivor(OF_THREAD, stacks=IN_QUEUE), is_live=True),
        ),
        Case("in a task", "rank 1, step 2, collective 7, likely", held_up(survivor(OF_TASK))),
        Case(
            "in a child process", "rank 1, step 2, collective 7, likely", held_up(survivor(OF_CHILD, stacks=IN_QUEUE))
        ),
        Case("again and again", "rank 1, step 2, collective 7, likely", held_up(survivor(AGAIN), is_live=True)),
        Case(
            "again and again until the end",
            "rank 1, step 2, collective 7, likely",
            held_up(survivor(AGAIN, liveness="gone")),
        ),
        Case(
            "caught, and the loop left",
            "rank 1, step 2, collective 7, likely",
            held_up(survivor(caught("forward"), liveness="ended", idle_ns=None)),
        ),
        Case(
            "an exception, after one in a child process",
            "rank 1, step 3",
            failed(BAD_LABEL, caught=(replace(OF_CHILD, last_ns=0),)),
        ),
        Case(
            "caught, and a status",
            "rank 1, step 2",
            exited(3, ExitCall(status=3, call_site=site(50), caught=BAD_LABEL)),
        ),
        Case(
            "a text given to exit",
            "rank 1, step 2",
            exited(1, ExitCall(status=1, call_site=site(9), text="no such data set: /x\nsee the manual")),
        ),
        Case("a status without a word", "rank 1, step 2", exited(3, None)),
        Case("the store can't be reached", "", unconnected(NO_STORE, world=3)),
        Case("each host's own address", "", unconnected(LOOPBACK, hosts=("node0", "node1"))),
        Case("each host's own address, with the folders of one host", "likely", unconnected(LOOPBACK, world=3)),
        Case("another rank can't be reached", "", unconnected(NO_ROUTE)),
        Case(
            "another rank can't be reached, of an unknown address",
            "",
            unconnected(replace(LOOPBACK, message=NO_ADDRESS)),
        ),
        Case("two ranks of one device", "", unconnected(ONE_DEVICE, "failed", error=ONE_DEVICE)),
        Case("a port that is taken", "rank 1", failed(replace(NO_STORE, message=PORT_IN_USE), phase=JOINING)),
        Case(
            "another one has not come yet",
            "rank 1",
            job(rank(0, phase=JOINING), rank(1, "failed", phase=JOINING, failure=BAD_LABEL), world=3, is_live=True),
        ),
        Case("its own error is the cause", "rank 1", unconnected(NO_ROUTE, "failed")),
        Case("another rank can't be reached, and one is gone", "likely", unconnected(NO_ROUTE, "gone")),
    ],
    "never started": [
        Case("two of four", "likely", job(rank(0, phase=None), rank(1, phase=None), world=4)),
        Case(
            "not so far",
            "rank 2, likely",
            job(*(idle(rank(n, phase=JOINING), 11) for n in (0, 1)), world=3, is_live=True),
        ),
        Case(
            "others are in their first collective",
            "likely",
            job(
                rank(0),
                rank(1),
                groups=[group({n: trained(1, is_waiting=True) for n in (0, 1)}, ranks=range(3))],
                world=3,
            ),
        ),
    ],
    "wrong world size": [
        Case("on one rank", "rank 1", job(*(rank(n, world_size=size) for n, size in enumerate((3, 2, 3))))),
        Case("a rank beyond it", "rank 2", job(rank(0, world_size=2), rank(2, world_size=2, pid=7))),
        Case(
            "in a second init_process_group, which one rank alone got past",
            "rank 1",
            job(
                *(rank(n, world_size=size, init_calls=2) for n, size in enumerate((2, 3, 2))),
                groups=[group({0: WAITING}, name="default (2)", ranks=range(2))],
            ),
        ),
    ],
    "slow": [
        Case("in forward", "step 2", live(late(seconds=2))),
        Case("busy", "step 2, likely", live(late(seconds=5, is_working=True))),
        Case("a device", "step 2, likely", on_devices(INSIDE, BEFORE, INSIDE, is_live=True)),
        Case(
            "it goes on",
            "step 2",
            job(
                idle(rank(0, step=2), 3.1),
                idle(rank(1, phase="loop", step=2), 0.4),
                groups=[group({0: WAITING, 1: LATE})],
                is_live=True,
            ),
        ),
        Case("in the first step", "step 0", starting()),
        Case("before the first step", "step 0", starting(phase=None)),
    ],
    "interrupted": [
        Case(
            "Ctrl-C",
            "step 3",
            of_three(*(rank(n, "failed", step=3, **interrupt(TOLD_NS + n)) for n in range(3)), number=SIGINT),
        ),
        Case(
            "KeyboardInterrupt",
            "step 3",
            of_three(*(rank(n, "failed", step=3, **interrupt(TOLD_NS + n)) for n in range(3))),
        ),
        Case(
            "SIGTERM to the command",
            "step 3",
            of_three(*(rank(n, "gone", step=3, **told(SIGTERM)) for n in range(3)), number=SIGTERM),
        ),
        Case("by the launcher", "step 3", of_three(*(rank(n, "gone", step=3, **told(SIGTERM)) for n in range(3)))),
        Case("SIGTERM to all", "step 3", of_three(*(rank(n, "gone", step=3, exit_status=-SIGTERM) for n in range(3)))),
    ],
    "cannot tell": [
        Case("nothing is left", "", job()),
        Case("a part is missing", "", job(*ENDED, groups=[ALIKE], gaps=(GAP,))),
        Case(
            "many parts are missing, of several groups",
            "",
            job(
                *(rank(n, "ended") for n in range(4)),
                groups=[group({n: trained(5), n + 1: trained(3)}, name="pair") for n in (0, 2)],
                gaps=tuple(RecordingGap(f"rank_0/{n}: damaged", "Copy it again.") for n in range(60)),
            ),
        ),
        Case("the command failed", "", job(*ENDED, groups=[ALIKE], job_status=1)),
        Case(
            "a rank was recorded in part",
            "",
            job(ENDED[0], replace(ENDED[1], unrecorded_because="the disk is full"), groups=[ALIKE]),
        ),
        Case(
            "a rank was recorded in part, and others wait",
            "",
            late(liveness="unknown", unrecorded_because="the disk is full"),
        ),
        Case(
            "a part is missing of a job that was interrupted",
            "step 0",
            of_three(*(rank(n, "failed", **interrupt(TOLD_NS)) for n in range(3)), number=SIGINT, gaps=(GAP,)),
        ),
        Case(
            "a rank was recorded in part of a job that was interrupted",
            "step 0",
            of_three(
                *(rank(n, "failed", unrecorded_because="disk" if n else None, **interrupt(TOLD_NS)) for n in range(3)),
                number=SIGINT,
            ),
        ),
        Case(
            "interrupted after a long silence",
            "step 3",
            of_three(
                *(rank(n, "failed", step=3, **interrupt(60 * SECOND_NS)) for n in range(3)),
                number=SIGINT,
                job_signaled_ns=60 * SECOND_NS,
            ),
        ),
        Case("dumps of some agree", "", dumps(9, 9, world=3, is_waiting=False, backend="gloo")),
        Case(
            "a timeout, one is gone, one elsewhere",
            "",
            job(
                rank(0, "failed", failure=replace(CLOSED, message="Timed out")),
                rank(1, "gone"),
                rank(2, "unknown"),
                groups=[ALIKE],
            ),
        ),
    ],
}


@pytest.mark.parametrize("kind", get_args(FaultKind))
def test_a_verdict_is_right_and_reads_as_its_golden_file_says(kind: str, golden: Callable[[str, str], None]) -> None:
    verdicts = [(case, judge(case.evidence)) for case in CASES[kind]]
    assert [(case.what, one.kind, facts_of(one)) for case, one in verdicts] == [
        (what, kind, facts) for what, facts, _ in CASES[kind]
    ]
    reports = [f"=== {case.what} ===\n{format_report(one, case.evidence)}" for case, one in verdicts]
    golden(f"verdict/{kind.replace(' ', '_')}", "\n\n".join(reports))
