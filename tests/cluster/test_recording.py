"""Recordings of real runs: what the ranks did is what the trace says."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.breakdown.breakdown import BLOCKS, compute_breakdown, tabulate_breakdown
from overlapscope.breakdown.critical_path import compute_job_breakdown
from overlapscope.breakdown.steady_steps import select_steady_steps
from overlapscope.trace.event_log import read_log
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import EVENTS_FILE, rank_folder
from tests.cluster.ranks import run_ranks

pytestmark = pytest.mark.cluster

STEPS = 6
ROOT = Path(__file__).parents[2]


def train_recorded(trace: str) -> list[tuple[int, int]]:
    """Train, and time every wait for a bucket from outside; one list of (launched, over) per bucket."""
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), bucket_cap_mb=0.5, trace=trace
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
    return [(model.bucket_plan.parameters[bucket[0]].elements, len(bucket)) for bucket in model.bucket_plan.buckets]


def test_a_real_run_is_recorded_whole_and_in_order(tmp_path):
    plan, _ = run_ranks(train_recorded, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    assert list(trace.ranks["rank"]) == [0, 1]
    assert list(trace.ranks["clock"]) == ["same boot", "same boot"]
    assert trace.run["world_size"] == 2
    reduced = trace.collectives.query("op == 'all_reduce'")
    assert reduced.groupby(["rank", "step"]).size().loc[:, 1:].eq(len(plan)).all()
    assert reduced["end_ns"].notna().all()
    assert (reduced["ready_ns"] <= reduced["launch_ns"]).all()
    assert (reduced["launch_ns"] <= reduced["end_ns"]).all()
    # No all-reduce can end before its last rank has entered it.
    ends = reduced.groupby(["step", "plan_epoch", "bucket"])["end_ns"].min()
    arrivals = reduced.groupby(["step", "plan_epoch", "bucket"])["launch_ns"].max()
    assert (ends >= arrivals).all()
    # Launched in plan order, on every rank.
    in_order = reduced.sort_values("launch_ns").groupby(["rank", "step"])["bucket"].apply(lambda b: list(b))
    assert all(buckets == sorted(buckets) for buckets in in_order)


def test_the_parts_of_a_real_step_add_up(tmp_path):
    run_ranks(train_recorded, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    breakdown = compute_breakdown(trace)
    figures = tabulate_breakdown(breakdown)
    assert len(figures) == 2 * STEPS
    assert figures[[f"{name}_ns" for name in BLOCKS]].sum(axis=1).tolist() == figures["step_time_ns"].tolist()
    assert (figures["backward_ns"] > 0).all()
    assert (figures["hidden_ns"] + figures["exposed_ns"] == figures["communication_ns"]).all()
    assert (figures["communication_ns"] > 0).all()
    job = compute_job_breakdown(trace, breakdown, select_steady_steps(trace, breakdown))
    assert job is not None
    assert job.ns.sum(axis=1).tolist() == (job.end_ns - job.start_ns).tolist()


KILLS = 2
TRAINING_TO_BE_KILLED = ROOT / "tests" / "cluster" / "training_to_be_killed.py"


@pytest.mark.slow
def test_a_rank_killed_at_a_random_moment_leaves_a_log_that_ends_at_most_one_record_before(tmp_path):
    chance = random.Random(4)
    with subprocess.Popen(
        [
            sys.executable,
            TRAINING_TO_BE_KILLED,
            str(tmp_path),
            str(KILLS),
            *[f"{chance.uniform(0.02, 0.4):.4f}" for _ in range(KILLS)],
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as trials:
        try:
            output, _ = trials.communicate(timeout=240)
        finally:
            trials.kill()
    announced = [int(line) for line in output.split()]
    assert len(announced) == KILLS
    for trial, begun in enumerate(announced):
        _, records, problems = read_log(rank_folder(tmp_path / str(trial), 1) / EVENTS_FILE)
        assert [problem.severity for problem in problems] == ["note"], "not closed, and nothing else"
        np.testing.assert_array_equal(records["sequence"], np.arange(1, len(records) + 1))
        assert begun - 1 <= len(records) <= begun
