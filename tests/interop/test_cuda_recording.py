"""A training on a real GPU that was recorded by us and by torch.profiler (CUPTI) at once.

Stock DDP of torch 2.11 trained a small GPT on two ranks over NCCL, which shared one H200. ``data/stock_ddp_nccl`` holds
both: our recording of ten steps, the profiler's of four of them.
"""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from overlapscope.advice.advice import advise
from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import BLOCKS, compute_breakdown
from overlapscope.cli.main import main
from overlapscope.report.buckets import describe_basis
from overlapscope.trace.recording import Trace, read_trace

DATA = Path(__file__).parent / "data" / "stock_ddp_nccl"
FIRST, STEPS = 5, 4
"""Of those that were profiled, as they were recorded."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("recorded")
    for rank in range(2):
        shutil.copytree(DATA / f"rank_{rank}", folder / f"rank_{rank}")
    return read_trace(folder)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("imported") / "traces"
    profiles = [str(DATA / f"profile_{rank}.json.gz") for rank in range(2)]
    assert main(["import", *profiles, "-o", str(folder)]) == 0
    return read_trace(folder)


def kernels_ns(rank: int) -> npt.NDArray[np.int64]:
    """(2, n) starts and ends of NCCL's all-reduces, as CUPTI saw them."""
    profile = json.loads(gzip.decompress((DATA / f"profile_{rank}.json.gz").read_bytes()))
    found = [
        (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        for event in profile["traceEvents"]
        if event.get("cat") == "kernel" and event["name"].startswith("ncclDevKernel_AllReduce")
    ]
    return np.array(sorted(found), dtype=np.int64).T


def steps_ns(trace: Trace, rank: int, first: int, *blocks: str) -> npt.NDArray[np.int64]:
    """(STEPS,) of a rank, what some blocks come to together; without any, the whole."""
    breakdown = compute_breakdown(trace)
    which = (breakdown.rank == rank) & (breakdown.step >= first) & (breakdown.step < first + STEPS)
    return breakdown.ns[which][:, [BLOCKS.index(name) for name in blocks or BLOCKS]].sum(axis=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_are_recorded_as_cupti_saw_their_kernels(recorded: Trace, rank: int) -> None:
    own = recorded.collectives.query("rank == @rank and bucket >= 0 and step >= @FIRST").sort_values("start_ns")
    kernels = kernels_ns(rank)
    own = own.head(kernels.shape[1])
    longer_ns = (own["end_ns"] - own["start_ns"]).to_numpy(np.int64) - (kernels[1] - kernels[0])
    error_ns = np.maximum(0.02 * (kernels[1] - kernels[0]), 20_000)
    assert (longer_ns >= -error_ns).all()
    # The first of a step is wanted some time before it is there: the others are sent while they are launched.
    assert (longer_ns <= error_ns)[own["bucket"] > 0].all()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_imported_is_what_was_recorded(recorded: Trace, imported: Trace, rank: int) -> None:
    """But for what is where: to a profiler the backward of the loss is in the backward, which we see to begin when the
    module's output gets its gradient; and it sees stock DDP's copies out of buckets, which nobody else does.
    """
    for blocks in ((), ("forward", "inter_phase", "backward"), ("exposed", "bucket_copies"), ("optimizer",)):
        # The profiler's first step begins when it does.
        ours_ns, theirs_ns = steps_ns(recorded, rank, FIRST, *blocks)[1:], steps_ns(imported, rank, 0, *blocks)[1:]
        assert (np.abs(ours_ns - theirs_ns) <= np.maximum(0.03 * ours_ns, 50_000)).all(), blocks


def test_how_far_hosts_are_ahead_of_their_device_changes_nothing(recorded: Trace) -> None:
    """Here by a few milliseconds, while somebody looked on; else by as much as CUDA lets them."""
    reduced = recorded.collectives
    assert (reduced["launch_ns"] < reduced["ready_ns"]).sum() > len(reduced) / 2
    ahead = reduced.assign(launch_ns=reduced[["launch_ns", "ready_ns"]].min(axis=1) - 500_000_000)
    usual, other = compute_breakdown(recorded), compute_breakdown(replace(recorded, collectives=ahead))
    of_whole = usual.step >= FIRST
    assert np.abs(other.ns - usual.ns)[of_whole].max() < 50_000
    assert (usual.ns[of_whole, BLOCKS.index("exposed")] > 0.1 * usual.ns[of_whole].sum(axis=1)).all()


def test_buckets_of_stock_ddp_are_found_in_the_profile(recorded: Trace, imported: Trace) -> None:
    sizes = [
        trace.collectives.query("rank == 0 and bucket >= 0 and step == @step")
        .sort_values("bucket")["elements"]
        .tolist()
        for trace, step in ((recorded, FIRST + 1), (imported, 1))
    ]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) > 3


def test_advice_can_be_had_of_a_recording_of_a_device(recorded: Trace) -> None:
    advice = advise(Analysis(recorded), None)
    assert advice.recommendation.now.step_ns.value == pytest.approx(np.median(steps_ns(recorded, 0, 3)), rel=0.5)
    # The plan of the construction was in force as well, in a step that is left out.
    assert len(advice.fitted.observations.plans) == 2
    assert "of 2 ranks" in describe_basis(advice)
    assert "1 bucket plan" in describe_basis(advice)
