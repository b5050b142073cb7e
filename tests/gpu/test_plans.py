"""Choosing buckets on a real device: ``auto``, probing, and what ``calibrate`` measures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.calibrate import measure_all_sizes
from overlapscope.bucket_model.calibration import Calibration
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import DETAIL_VARIABLE, PROBE_VARIABLE
from overlapscope.trace.recording import read_trace
from tests.gpu.device import DEVICE, make_mlp, needs_a_device, results_of, run_on_device, train

pytestmark = needs_a_device

BACKENDS = [("nccl", 1), ("nccl", 2), ("gloo", 2)]


def train_and_sum(folder: str, options: dict, steps: int, probes: bool) -> list[float]:
    os.environ |= {DETAIL_VARIABLE: "parameters", PROBE_VARIABLE: "1" if probes else "0"}
    model = DistributedDataParallel(make_mlp(), device_ids=[0], trace=folder or None, **options)
    for _ in train(model, steps, dist.get_rank()):
        pass
    return [parameter.sum().item() for parameter in model.parameters()]


def described(folder: Path) -> dict:
    (model,) = json.loads((folder / "rank_0" / "run.json").read_text())["models"]
    return model


@pytest.mark.parametrize(("backend", "world_size"), BACKENDS)
def test_auto_decides_and_training_comes_to_the_same(tmp_path, backend, world_size):
    plain = results_of(run_on_device(train_and_sum, backend, world_size, "", {}, 90, False))
    auto = results_of(run_on_device(
        train_and_sum, backend, world_size, str(tmp_path), {"bucket_cap_mb": "auto"}, 90, False
    ))  # fmt: skip
    for own, other in zip(auto, plain, strict=True):
        assert own == pytest.approx(other, rel=1e-3, abs=1e-2)
    assert read_trace(tmp_path).errors == []
    if world_size > 1:
        assert described(tmp_path)["auto"]["decisions"]


@pytest.mark.parametrize(("backend", "world_size"), BACKENDS[1:])
def test_probing_tries_other_plans(tmp_path, backend, world_size):
    results_of(run_on_device(train_and_sum, backend, world_size, str(tmp_path), {}, 60, True))
    assert described(tmp_path)["probing"]["state"] == "done"
    assert read_trace(tmp_path).errors == []


def measured(largest_bytes: int) -> Calibration:
    return measure_all_sizes(dist.group.WORLD, DEVICE, largest_bytes)


@pytest.mark.parametrize(("backend", "world_size"), BACKENDS[1:])
def test_all_ranks_measure_the_same(backend, world_size):
    first, *others = results_of(run_on_device(measured, backend, world_size, 16 << 20))
    assert all(other == first for other in others)
    assert first.device == torch.cuda.get_device_name(0)
    assert all(min(sample.times_ns) > 0 for sample in first.samples)


STRATEGIES = ["naive", "per_parameter", "bucketed", "bf16", "power_sgd", "round_robin", "parameter_averaging"]
OVER_SENDS = ["ring", "tree", "direct", "parameter_server", "decoupled", "priority", "hierarchical", "one_bit"]


def train_with_each(folder: str, strategies: list[str]) -> dict[str, list[float]]:
    sums = {}
    for strategy in strategies:
        sizes = {} if strategy in ("naive", "per_parameter") else {"bucket_cap_mb": 4}
        sums[strategy] = train_and_sum(folder, {"strategy": strategy, **sizes}, 6, False)
    return sums


@pytest.mark.parametrize(("backend", "strategies"), [("nccl", [*STRATEGIES, *OVER_SENDS]), ("gloo", STRATEGIES)])
def test_strategies_train_on_a_device(tmp_path, backend, strategies):
    first, other = results_of(run_on_device(train_with_each, backend, 2, str(tmp_path), strategies))
    assert first == other
    assert read_trace(tmp_path).errors == []


@pytest.mark.parametrize("strategy", OVER_SENDS)
def test_what_gloo_can_not_send_from_a_device_is_refused(tmp_path, strategy):
    for error in run_on_device(train_with_each, "gloo", 2, str(tmp_path), [strategy]):
        assert isinstance(error, OverlapScopeError)
        assert "which gloo can't from cuda:0" in str(error)
