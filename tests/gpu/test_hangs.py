"""What watchdogs and ``diagnose`` say when a device is stuck, or a rank never comes to a collective on it."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp import DistributedDataParallel
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError
from tests.cluster.collective_logs import reports_of
from tests.gpu.device import DEVICE, make_mlp, needs_a_device, results_of, run_on_device, sleep_on_device, train

pytestmark = [*needs_a_device, pytest.mark.slow]

HEALTHY_STEPS = 30
STUCK_S = 25


def train_until(folder: str, fault: str) -> list[dict]:
    """The reports that this rank has written when it is over."""
    model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, trace=folder)
    rank = dist.get_rank()
    sleep_on_device(1)
    for step in train(model, HEALTHY_STEPS + 1, rank):
        if step < HEALTHY_STEPS:
            torch.cuda.synchronize()
            time.sleep(0.01)
        elif fault == "stuck stream" and rank == 1:
            sleep_on_device(1000 * STUCK_S)
        elif fault == "late host" and rank == 1:
            time.sleep(STUCK_S)
    torch.cuda.synchronize()
    return reports_of(Path(folder), rank)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_whose_host_is_late_is_named(tmp_path, backend):
    results = results_of(run_on_device(train_until, backend, 2, str(tmp_path), "late host"))
    reports = [report["verdict"] for own in results for report in own]
    assert {report["kind"] for report in reports} == {"stuck"}
    assert {rank for report in reports for rank in (*report["blamed"], *report["suspected"])} == {1}


def verdicts_until(ranks: Future[list], folder: Path) -> list[Verdict]:
    """What is said of a job again and again while it runs."""
    verdicts = []
    while not ranks.done():
        time.sleep(1)
        with suppress(OverlapScopeError):  # nothing is recorded yet
            verdicts.append(judge(read_evidence(folder)[0]))
    return verdicts


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_whose_device_is_late_is_named_although_its_host_has_launched_everything(tmp_path, backend):
    """It may be at something that takes half a minute once, so that it is only called slow."""
    with ThreadPoolExecutor() as thread:
        ranks = thread.submit(run_on_device, train_until, backend, 2, str(tmp_path), "stuck stream")
        verdicts = verdicts_until(ranks, tmp_path)
    results_of(ranks.result())
    named = {rank for verdict in verdicts for rank in verdict.named}
    assert named <= {1}, verdicts  # which is true, if the wait has become long enough to say so
    slow = [verdict for verdict in verdicts if verdict.kind == "slow" and "device of rank" in verdict.sentence]
    assert {(verdict.concerned, verdict.step) for verdict in slow} == {((1,), HEALTHY_STEPS)}, verdicts


def train_until_time_is_up(folder: str) -> None:
    """Rank 1's device never comes to an all-reduce that its host has launched."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, process_group=group, trace=folder)
    for step in train(model, HEALTHY_STEPS + 3, dist.get_rank()):
        if step < HEALTHY_STEPS:
            torch.cuda.synchronize()
        elif step == HEALTHY_STEPS and dist.get_rank() == 1:
            sleep_on_device(1000 * STUCK_S)
    torch.cuda.synchronize()


def test_the_device_that_others_waited_for_until_nccl_gave_up_is_named(tmp_path):
    with suppress(RuntimeError):  # NCCL's watchdog ends the processes
        run_on_device(train_until_time_is_up, "nccl", 2, str(tmp_path))
    verdict = judge(read_evidence(tmp_path)[0])
    assert (verdict.kind, verdict.named, verdict.step) == ("stuck", (1,), HEALTHY_STEPS), verdict


def never_synchronizing(folder: str) -> None:
    """Rank 1 leaves out a synchronous all-reduce, which has no work since torch 2.8."""
    model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, trace=folder)
    for step in train(model, HEALTHY_STEPS + 1):
        if step < HEALTHY_STEPS:
            torch.cuda.synchronize()
        if step < HEALTHY_STEPS or dist.get_rank() == 0:
            dist.all_reduce(torch.ones(7, device=DEVICE))
        time.sleep(0.01)
    time.sleep(STUCK_S)  # both devices are stuck: rank 0's with the all-reduce, rank 1's with a bucket
    os._exit(0)  # NCCL would wait for its kernels


def test_a_synchronous_collective_that_one_rank_left_out_is_named(tmp_path):
    with suppress(RuntimeError):  # NCCL may notice that sizes differ, and end the processes
        run_on_device(never_synchronizing, "nccl", 2, str(tmp_path))
    verdict = judge(read_evidence(tmp_path)[0])
    assert verdict.kind in ("missing collective", "different collectives")  # that of rank 0 may be its last
    assert (verdict.step, verdict.concerned) == (HEALTHY_STEPS - 1, (0, 1))
    line = verdict.call_sites[0]
    assert "dist.all_reduce(torch.ones(7" in Path(line.file).read_text().splitlines()[line.line - 1]
