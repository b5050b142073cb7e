"""A recorded step never synchronizes the device, and says when things happened on it although the host is ahead."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp import DistributedDataParallel, attach
from overlapscope.trace.recording import read_trace
from tests.gpu.device import make_mlp, needs_a_device, results_of, run_on_device, sleep_on_device, train

pytestmark = needs_a_device

WARM_UP_STEPS, STEPS = 4, 8
"""In the second one ranks compare their gradient orders, for which they have to wait."""
BEHIND_MS = 100
STEPS_BEHIND = 4
"""The device takes about a thousand launches before the host has to wait for it."""


def train_where_waiting_is_an_error(folder: str, wrapper: str, options: dict[str, bool]) -> None:
    if wrapper == "stock":
        attach(folder)
        model = TorchDDP(make_mlp(), device_ids=[0], bucket_cap_mb=4, **options)
    else:
        model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, trace=folder, **options)
    for step in train(model, WARM_UP_STEPS + STEPS):
        if step == WARM_UP_STEPS:
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("wrapper", ["ours", "stock"])
def test_no_step_synchronizes_the_device(tmp_path, wrapper, options):
    results_of(run_on_device(train_where_waiting_is_an_error, "nccl", 1, str(tmp_path), wrapper, options))
    assert read_trace(tmp_path).errors == []


def host_ms_behind_a_busy_device(folder: str) -> list[float]:
    """What the host takes for each step whose device does nothing else for a while first."""
    model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, trace=folder)
    sleep_on_device(1)
    begun_s = []
    for step in train(model, WARM_UP_STEPS + STEPS_BEHIND):
        if step >= WARM_UP_STEPS:
            begun_s.append(time.perf_counter())
            sleep_on_device(BEHIND_MS)
    torch.cuda.synchronize()
    return [1e3 * (after - before) for before, after in pairwise(begun_s)]


def test_times_are_the_devices_although_the_host_is_far_ahead(tmp_path):
    [host_ms] = results_of(run_on_device(host_ms_behind_a_busy_device, "nccl", 1, str(tmp_path)))
    trace = read_trace(tmp_path)
    assert trace.errors == []
    steps = trace.steps.query("step >= @WARM_UP_STEPS")
    # Each contains what its device slept; the host has enqueued all of them long before the device was there.
    assert ((steps["end_ns"] - steps["start_ns"]) > 0.8e6 * BEHIND_MS).all()
    assert sum(host_ms) < BEHIND_MS
    phases = trace.phases.merge(steps, on=["rank", "step"], suffixes=("", "_of_step"))
    assert len(phases) > 0
    assert (phases["start_ns"] >= phases["start_ns_of_step"] - 1000).all()
    assert (phases["end_ns"] <= phases["end_ns_of_step"] + 1000).all()
