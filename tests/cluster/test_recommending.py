"""From a real training over gloo to the advice, and from the advice back into a training."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.advice.advice import advise
from overlapscope.analysis import Analysis
from overlapscope.bucket_model.plan_file import write_plan
from overlapscope.trace.environment import DETAIL_VARIABLE, PROBE_VARIABLE
from overlapscope.trace.recording import read_trace
from tests.cli.command_line import overlapscope_process as overlapscope
from tests.cluster.ranks import run_ranks

pytestmark = pytest.mark.cluster

WIDTH, LAYERS, STEPS = 192, 8, 32


def make_model() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def train(trace: str, plan: str | None) -> list[list[str]]:
    """Train, with probing where no plan is given; the names in each bucket at the end."""
    os.environ[PROBE_VARIABLE] = "0" if plan else "1"
    os.environ[DETAIL_VARIABLE] = "parameters"
    model = DistributedDataParallel(make_model(), trace=trace, bucket_plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()
    names = [parameter.name for parameter in model.bucket_plan.parameters]
    return [[names[number] for number in bucket] for bucket in model.bucket_plan.buckets]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recommending") / "probed"
    run_ranks(train, 2, str(folder), None)
    return folder


def test_a_probed_training_is_advised_and_takes_the_plan_that_it_is_given(probed, tmp_path):
    trace = read_trace(probed)
    advice = advise(Analysis(trace))
    found, observations = advice.recommendation, advice.fitted.observations
    assert len(set(observations.plan.tolist())) > 2, "several plans were probed"
    assert observations.has_common_clock
    assert not {"sizes", "compute slowdown"} & set(found.missing)
    assert found.best.step_ns.value > 0
    path = tmp_path / "plan.json"
    write_plan(path, advice.plan_file())
    wanted = json.loads(path.read_text())["buckets"]
    trained, _ = run_ranks(train, 2, str(tmp_path / "planned"), str(path))
    assert trained == wanted


def test_the_command_reads_it(probed):
    ran = overlapscope("recommend", probed)
    assert ran.returncode == 0, ran.stderr
    assert "16 gradients of 1.13 MB" in ran.stdout
