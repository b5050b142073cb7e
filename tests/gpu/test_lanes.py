"""What is recorded of collectives on a device, beside what CUPTI saw of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.trace.recording import read_trace
from tests.gpu import profiled
from tests.gpu.device import SHARED_CLOCK_ERROR_NS, needs_a_device, results_of, run_on_device
from tests.gpu.profiled import MB, SIZES_MB, STEPS

pytestmark = needs_a_device


def spans(path: Path, is_meant: Callable[[dict[str, Any]], bool]) -> pd.DataFrame:
    """start_ns and end_ns of events of a profile, by start."""
    profile = json.loads(path.read_text())
    base_ns = int(profile.get("baseTimeNanoseconds", 0))
    found = [
        (base_ns + round(event["ts"] * 1000), base_ns + round((event["ts"] + event["dur"]) * 1000))
        for event in profile["traceEvents"]
        if "cat" in event and is_meant(event)
    ]
    return pd.DataFrame(sorted(found), columns=["start_ns", "end_ns"])


def is_all_reduce(event: dict[str, Any]) -> bool:
    return event["cat"] == "kernel" and event["name"].startswith("ncclDevKernel_AllReduce")


def is_copy_of_bucket(event: dict[str, Any]) -> bool:
    """From the host back to the device."""
    return event["cat"] == "gpu_memcpy" and "HtoD" in event["name"] and event["args"]["bytes"] >= MB


def recorded_of(folder: Path, said: dict[str, Any], rank: int) -> pd.DataFrame:
    """Collectives of a rank while it was profiled."""
    recorded = read_trace(folder).collectives.query("bucket >= 0 and rank == @rank and step > @said['before']")
    return recorded.sort_values("launch_ns").head(STEPS * len(SIZES_MB)).reset_index(drop=True)


@pytest.mark.parametrize("wrapper", ["ours", "stock"])
def test_recorded_collectives_are_as_long_as_their_kernels(tmp_path, wrapper):
    results = results_of(run_on_device(profiled.train_profiled, "nccl", 2, str(tmp_path), wrapper))
    for rank, said in enumerate(results):
        recorded = recorded_of(tmp_path, said, rank)
        seen = spans(tmp_path / f"profile_{rank}.json", is_all_reduce) - said["ahead_ns"]
        assert len(seen) == len(recorded)
        kernel_ns = seen["end_ns"] - seen["start_ns"]
        longer_ns = recorded["end_ns"] - recorded["start_ns"] - kernel_ns
        error_ns = np.maximum(0.02 * kernel_ns, 20_000)
        assert (longer_ns >= -error_ns).all()
        # The first of a step may have to wait for its process's turn on the device.
        assert (longer_ns <= error_ns)[recorded["bucket"] > 0].all()
        assert ((recorded["end_ns"] - seen["end_ns"]).abs() < SHARED_CLOCK_ERROR_NS).all()


@pytest.mark.parametrize("world_size", [2, 4])
def test_over_gloo_no_end_is_before_the_copy_back_to_the_device(tmp_path, world_size):
    results = results_of(run_on_device(profiled.train_profiled, "gloo", world_size, str(tmp_path), "ours"))
    for rank, said in enumerate(results):
        backs_ns = spans(tmp_path / f"profile_{rank}.json", is_copy_of_bucket)["end_ns"] - said["ahead_ns"]
        ends_ns = recorded_of(tmp_path, said, rank)["end_ns"]
        assert len(ends_ns) == len(backs_ns)
        # Two are under way at a time, so that they may end in another order.
        assert (
            np.sort(ends_ns.to_numpy(np.int64)) >= np.sort(backs_ns.to_numpy(np.int64)) - SHARED_CLOCK_ERROR_NS
        ).all()
    breakdown = compute_breakdown(read_trace(tmp_path))
    assert (breakdown.ns >= 0).all()
    assert (breakdown.ns.sum(axis=1) == breakdown.end_ns - breakdown.start_ns).all()
