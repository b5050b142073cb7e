"""Replicas of real ranks, compared: what is healthy is not accused, and what is not is named to the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.session import get_current_session
from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.replica_drift import ComparedReplicas
from overlapscope.trace.schema import REPORTS_FILE
from tests.cluster import replicated
from tests.cluster.ranks import Ranks, run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KINDS = {"ours": DistributedDataParallel, "stock": TorchDDP}


def train_healthily(folder: Path) -> None:
    attach(folder)
    replicated.healthy(tuple(KINDS.values()))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "traces"
    assert run_ranks(train_healthily, 2, folder) == [None, None]
    return folder


def test_nothing_is_reported_of_healthy_loops(healthy: Path) -> None:
    evidence, problems = read_evidence(healthy)
    verdict = judge(evidence)
    assert (verdict.kind, problems) == ("healthy", [])
    assert not list(healthy.glob(f"rank_*/{REPORTS_FILE}"))


def test_the_parameters_of_all_of_them_were_compared_at_every_step(healthy: Path) -> None:
    evidence, _ = read_evidence(healthy)
    averaged_on_purpose = [one for one in evidence.replicas if one.comm_hook]
    # One of the loops has two models, one wraps its module twice, and one is run last.
    models = len(KINDS) * (len(replicated.HEALTHY) + 3)
    assert len(evidence.replicas) == models
    assert len(averaged_on_purpose) == len(KINDS)
    for one in evidence.replicas:
        assert one.moments >= 5, one
        assert one.tensors in (8, 9), one  # all of them, or without the one that DDP ignores
        assert one in averaged_on_purpose or one.difference is one.was_different is None, one
    assert sum(one.buffers is not None for one in evidence.replicas) == 2 * len(KINDS)


@pytest.fixture(scope="module")
def ranks() -> object:
    with Ranks(3) as ranks:
        yield ranks


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Record what is trained inside, on ranks that stay for other recordings."""
    dist.barrier()
    attach(folder)
    yield
    session = get_current_session()
    assert session is not None
    session.close()
    dist.barrier()


def train_with_fault(folder: Path, ddp: str, fault: str) -> None:
    with recorded(folder):
        replicated.one_fault(KINDS[ddp], fault)


def train_with_momentum_after_join(folder: Path, ddp: str) -> None:
    with recorded(folder), replicated.at_any_cost():
        replicated.joined(KINDS[ddp], momentum=0.9)


@pytest.mark.parametrize("ddp", KINDS)
def test_momentum_that_join_has_left_different_parts_replicas(ranks: Ranks, tmp_path: Path, ddp: str) -> None:
    assert ranks.call(train_with_momentum_after_join, tmp_path, ddp) == [None] * 3
    evidence, _ = read_evidence(tmp_path)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.certainty) == ("replicas differ", "certain")
    assert any("join()" in said for said in verdict.evidence)


def train_and_change_at_the_end(folder: Path, ddp: str) -> None:
    with recorded(folder):
        model = KINDS[ddp](replicated.net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            replicated.loss(model).backward()
            optimizer.step()
        if dist.get_rank() == replicated.FAULTY_RANK:
            with torch.no_grad():
                model.module.branch.bias[0] += 1


@pytest.mark.parametrize("ddp", KINDS)
def test_what_differs_only_after_the_last_forward_is_told(ranks: Ranks, tmp_path: Path, ddp: str) -> None:
    assert ranks.call(train_and_change_at_the_end, tmp_path, ddp) == [None] * 3
    evidence, _ = read_evidence(tmp_path)
    (one,) = evidence.replicas
    assert one.at_end is not None
    assert (one.at_end.differing, one.at_end.sides) == (("branch.bias",), ((0, 2), (1,)))
    verdict = judge(evidence)
    assert (verdict.kind, verdict.certainty, verdict.suspected) == ("replicas differ", "likely", (1,))


def difference_of(evidence: Evidence) -> ComparedReplicas:
    (one,) = evidence.replicas
    assert one.difference is not None
    return one


@pytest.mark.parametrize("ddp", KINDS)
@pytest.mark.parametrize(
    "fault", ["other weights", "other rate", "other rate under join", "other state", "flipped bit", "frozen"]
)
def test_a_fault_is_named_with_its_step_rank_and_parameters(ranks: Ranks, tmp_path: Path, ddp: str, fault: str) -> None:
    assert ranks.call(train_with_fault, tmp_path, ddp, fault) == [None] * 3
    evidence, _ = read_evidence(tmp_path)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.named) == ("replicas differ", (replicated.FAULTY_RANK,))
    assert verdict.step == (None if fault == "other weights" else replicated.FAULT_STEP)
    assert verdict.certainty == ("likely" if fault == "frozen" else "certain")
    names = {"flipped bit": ("branch.weight",), "frozen": ("frozen",)}.get(fault)
    assert names in (None, verdict.parameters)
    if fault.startswith("other rate"):
        assert "lr of SGD is 0.01" in verdict.sentence
    if fault == "other state":
        assert any("settings of the optimizers" in said for said in verdict.evidence)
