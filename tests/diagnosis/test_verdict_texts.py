"""The wording of every kind of verdict: complete reports, held by one golden file per kind and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from signal import SIGINT, SIGKILL, SIGTERM
from typing import get_args

import pytest

from overlapscope.diagnosis.evidence import (
    Evidence,
    ExitCall,
    Failure,
    ModelParameters,
    RankSettings,
    RecordingGap,
    UnreadyParameter,
    UnreducedStep,
)
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report_text import format_report
from overlapscope.diagnosis.verdict import FaultKind
from overlapscope.trace.collective_log import REACHED, UNREACHED
from tests.diagnosis.jobs import (
    CLOSED,
    HELD_UP,
    IN_LOADER,
    LATE,
    WAITING,
    entry,
    group,
    held_up,
    idle,
    job,
    rank,
    site,
    trained,
)
from tests.diagnosis.test_judge_new_group import MAKER, MEMBER, OTHER
from tests.diagnosis.test_judge_order import diverged
from tests.diagnosis.test_judge_replicas import DIFFERENCE, DRIFTED
from tests.ordered import all_reduce, bucket

GIB = 1024**3
ALIKE = group(dict.fromkeys(range(3), trained(9)))
ENDED = tuple(rank(number, "ended", step=3) for number in range(3))
BAD_LABEL = Failure(type="ValueError", message="no such label", call_site=site(40))
PARAMETERS = tuple((name, (4, 4), "float32") for name in ("left.weight", "right.weight"))
UNREADY = tuple(UnreadyParameter(model=0, name=f"branch.{name}", module="branch (Linear)", bucket=1) for name in "wb")
BRANCHED = ModelParameters(
    model=0, class_name="Net", parameters=tuple((f"{name}", (2,), "float32") for name in ("branch.w", "branch.b", "c"))
)


def model(*places: int) -> tuple[ModelParameters, ...]:
    return (ModelParameters(model=0, class_name="Net", parameters=tuple(PARAMETERS[place] for place in places)),)


def in_steps(*steps: int) -> Evidence:
    """Each rank is in one of these steps at its fourth collective."""
    windows = {n: (entry(3, bucket(0)), entry(4, bucket(0), step=step)) for n, step in enumerate(steps)}
    order = group(windows, first_divergence=4, divergence="step")
    return job(*(rank(n, "ended") for n in range(len(steps))), groups=[order])


def at_batches(*batches: int) -> Evidence:
    first = entry(1, bucket(0))
    windows = {n: (first, replace(entry(2, bucket(0), step=1), batch=batch)) for n, batch in enumerate(batches)}
    order = group(windows, first_divergence=2, divergence="batch")
    return job(*(rank(n, "ended") for n in range(len(batches))), groups=[order])


def with_settings() -> Evidence:
    """Rank 1 has a hook that reduces something else."""
    launched = [bucket(0), replace(bucket(0), reduce_op="sum", dtype="float16"), bucket(0)]
    windows = {n: (entry(1, all_reduce()), entry(2, one)) for n, one in enumerate(launched)}
    hooks = ("none", "fp16_compress_hook", "none")
    ranks = [
        rank(n, settings=(RankSettings(model=0, values={"wrapper": "torch", "comm_hook": hook}, call_site=site(20)),))
        for n, hook in enumerate(hooks)
    ]
    return job(*ranks, groups=[group(windows, first_divergence=2, divergence="signature")])


def interleaved() -> Evidence:
    """Ranks 0 and 1 wait for each other in two groups."""
    rows = group({0: (entry(1, all_reduce("a"), is_done=False, line=10),)}, name="rows", ranks=(0, 1))
    columns = group({1: (entry(1, all_reduce("b"), is_done=False, line=20),)}, name="columns", ranks=(0, 1))
    return job(rank(0, phase=None), rank(1, phase=None), groups=[rows, columns])


def devices(seconds: float) -> Evidence:
    """The device of rank 1 has not reached what the others wait in."""
    flags = {0: UNREACHED | REACHED, 1: UNREACHED, 2: UNREACHED | REACHED}
    windows = {n: (*trained(6), replace(entry(7, bucket(0), step=2, is_done=False), flags=f)) for n, f in flags.items()}
    ranks = [idle(rank(n, "running", phase="loop", step=3, since_ns=10**9, is_working=True), seconds) for n in flags]
    return job(*ranks, groups=[group(windows, backend="nccl")], is_live=True)


def dumps(*launched: int) -> Evidence:
    order = group({n: trained(count, is_waiting=True) for n, count in enumerate(launched)})
    return job(*(rank(n, "dumped", phase=None) for n in range(len(launched))), groups=[order])


def failed(failure: Failure, **more: int) -> Evidence:
    return job(rank(0, "failed", failure=CLOSED), rank(1, "failed", step=3, failure=failure, **more), groups=[])


def left(number: int, **more: object) -> Evidence:
    exit_call = ExitCall(status=3, call_site=site(50), caught=BAD_LABEL)
    return job(rank(0, "failed", failure=CLOSED), rank(number, "ended", exit_status=3, exit_call=exit_call, **more))  # type: ignore[arg-type]


def told(number: int) -> Evidence:
    ranks = [replace(one, exit_status=-number, signaled_at_ns=10**9, signal_received=number) for one in ENDED]
    return job(*ranks, groups=[ALIKE], job_signal=number, job_signaled_ns=10**9, job_status=1)


GONE = rank(1, "gone", phase="backward", step=2, rss_bytes=95 * GIB, memory_limit_bytes=100 * GIB)
GAP = RecordingGap(what="rank_1/collectives.log is missing", advice="Copy the folder of rank 1 as well.")
LOST = UnreducedStep(model=0, step=2, call_site=site(7))

CASES: dict[str, list[Evidence]] = {
    "healthy": [
        job(*ENDED, groups=[ALIKE]),
        job(*(rank(n, "running", step=3) for n in range(3)), groups=[ALIKE], is_live=True),
        job(*ENDED, groups=[ALIKE], replicas=(replace(DRIFTED, difference=None),)),
    ],
    "models differ": [
        job(*(rank(n, models=model(*((1, 0) if n == 1 else (0, 1)))) for n in range(3))),
        job(rank(0, models=model(0, 1)), rank(1, models=model(0))),
    ],
    "settings differ": [with_settings()],
    "different collectives": [
        diverged("signature", [all_reduce("x", 1001), bucket(2)], [all_reduce("x", 1000), bucket(2)])
    ],
    "missing collective": [
        diverged("signature", [all_reduce(), bucket(1), bucket(2)], [bucket(1), bucket(2), bucket(0)]),
        job(
            MAKER,
            MEMBER,
            OTHER,
            groups=[group({0: trained(3), 1: trained(4, is_waiting=True), 2: trained(4, is_waiting=True)})],
            is_live=True,
        ),
        job(*ENDED, groups=[group({0: WAITING, 1: LATE, 2: WAITING})]),
    ],
    "swapped collectives": [diverged("names", [all_reduce("a"), all_reduce("b")], [all_reduce("b"), all_reduce("a")])],
    "step behind": [in_steps(1, 2, 1)],
    "batch skipped": [at_batches(5, 6, 5)],
    "gradients never ready": [
        held_up(idle(rank(1, phase="loop", step=2, since_ns=10**9, unready=UNREADY, models=(BRANCHED,)), 60)),
        held_up(rank(1, phase="backward", step=2, unready=UNREADY, models=(BRANCHED,))),
    ],
    "not reduced": [
        job(*(replace(one, unreduced=LOST if one.rank == 1 else None) for one in ENDED), groups=[ALIKE]),
        held_up(idle(rank(1, phase="loop", step=4, since_ns=10**9, no_sync_since=2, steps_done=4), 60)),
    ],
    "replicas differ": [
        job(*ENDED, groups=[ALIKE], replicas=(DRIFTED,)),
        job(*ENDED, groups=[ALIKE], replicas=(replace(DRIFTED, difference=replace(DIFFERENCE, equal_step=None)),)),
    ],
    "uneven inputs": [held_up(rank(1, "ended", phase="loop", step=2, steps_done=2))],
    "groups interleaved": [interleaved()],
    "waits for data": [
        held_up(idle(rank(1, phase="loop", step=2, since_ns=10**9, stacks=IN_LOADER), 20), is_live=True)
    ],
    "stuck": [
        held_up(idle(rank(1, phase="forward", step=2, since_ns=10**9), 60)),
        held_up(idle(rank(1, "silent", phase="forward", step=2, since_ns=10**9), 60)),
        job(*(rank(n, step=2) for n in range(3)), groups=[group(dict.fromkeys(range(3), WAITING))]),
        devices(120),
        dumps(9, 6, 9),
    ],
    "stopped": [held_up(rank(1, "stopped", phase="forward", step=2, silent_for_ns=5 * 10**9))],
    "holds the GIL": [held_up(rank(1, "running", phase="forward", step=2, holds_gil=True, silent_for_ns=9 * 10**9))],
    "killed": [
        job(rank(0, "failed", failure=CLOSED), GONE, rank(2, "failed", failure=CLOSED), groups=[HELD_UP]),
        job(rank(0, "failed", failure=CLOSED), replace(GONE, exit_status=-SIGKILL, rss_bytes=None)),
        job(rank(0, "gone"), rank(1, "gone")),
        job(ENDED[0], replace(ENDED[1], exit_status=-6)),
    ],
    "out of memory": [failed(Failure(type="torch.OutOfMemoryError", message="CUDA out of memory.", call_site=site(7)))],
    "failed": [failed(BAD_LABEL), left(1)],
    "never started": [
        job(rank(0, phase=None), rank(1, phase=None), world=4),
        job(idle(rank(0, phase=None), 12), world=2, is_live=True),
    ],
    "wrong world size": [
        job(rank(0, world_size=3), rank(1, world_size=2), rank(2, world_size=3)),
        job(rank(0, world_size=2), rank(2, world_size=2)),
    ],
    "slow": [held_up(idle(rank(1, phase="forward", step=2, since_ns=10**9), 2), is_live=True), devices(5)],
    "interrupted": [told(SIGINT), told(SIGTERM)],
    "cannot tell": [
        job(),
        job(*ENDED, groups=[ALIKE], gaps=(GAP,)),
        job(*ENDED, groups=[ALIKE], job_status=1),
        job(ENDED[0], replace(ENDED[1], unrecorded_because="the disk is full"), groups=[ALIKE]),
        held_up(rank(1, "unknown", phase="forward", step=2, unrecorded_because="the disk is full")),
    ],
}


@pytest.mark.parametrize("kind", get_args(FaultKind))
def test_a_verdict_reads_as_its_golden_file_says(kind: str, golden: Callable[[str, str], None]) -> None:
    verdicts = [(judge(evidence), evidence) for evidence in CASES[kind]]
    assert {verdict.kind for verdict, _ in verdicts} == {kind}
    golden(f"verdict/{kind.replace(' ', '_')}", "\n\n----\n\n".join(format_report(*each) for each in verdicts))
