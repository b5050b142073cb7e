"""What watchdogs and ``diagnose`` say when a device is stuck, or a rank never comes to a collective on it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp import DistributedDataParallel
from overlapscope.diagnosis.from_logs import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.format import REPORTS_FILE, rank_folder
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
    path = rank_folder(Path(folder), rank) / REPORTS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(("fault", "named"), [("late host", {1}), ("stuck stream", set())])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_rank_is_accused_of_what_its_host_did_not_launch(tmp_path, backend, fault, named):
    """Of devices it is not known how far they have come."""
    results = results_of(run_on_device(train_until, backend, 2, str(tmp_path), fault))
    reports = [report["verdict"] for own in results for report in own]
    assert {report["kind"] for report in reports} == {"stuck"}
    assert {rank for report in reports for rank in (*report["blamed"], *report["suspected"])} == named


def never_synchronising(folder: str) -> None:
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
        run_on_device(never_synchronising, "nccl", 2, str(tmp_path))
    verdict = judge(read_evidence(tmp_path)[0])
    assert verdict.kind in ("missing collective", "different collectives")  # that of rank 0 may be its last
    assert (verdict.step, verdict.concerned) == (HEALTHY_STEPS - 1, (0, 1))
    line = verdict.call_sites[0]
    assert "dist.all_reduce(torch.ones(7" in Path(line.file).read_text().splitlines()[line.line - 1]
