"""Buckets in another order: what is launched when, and where a strategy has no say in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class Crossed(nn.Module):
    """Uses its layers in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) -> (B, 8)."""
        return self.third(self.second(self.first(x)))


def in_order() -> nn.Module:
    """Registers its layers in the order in which it uses them."""
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))


ORDERS = {"overlapped": (2, 0, 1), "reverse_order": (2, 1, 0), "forward_order": (0, 1, 2)}
"""Of the parameters second, first and third."""


def train(make: Callable[[], nn.Module], strategy: str, folder: str) -> list[tuple[int, ...]]:
    ddp = DistributedDataParallel(make(), strategy=strategy, bucket_cap_mb=0.0001, trace=folder)
    for _ in range(4):
        ddp(torch.ones(2, 8)).sum().backward()
    return list(ddp.bucket_plan.buckets)


@pytest.mark.parametrize("strategy", ORDERS)
def test_buckets_come_in_the_order_of_the_strategy(tmp_path: Path, strategy: str) -> None:
    expected = [(number,) for number in ORDERS[strategy]]
    assert run_ranks(train, 2, Crossed, strategy, str(tmp_path)) == [expected, expected]


def test_in_the_order_of_the_forward_nothing_is_launched_before_all_gradients_are_there(tmp_path: Path) -> None:
    run_ranks(train, 2, in_order, "forward_order", str(tmp_path))
    buckets = read_trace(tmp_path).collectives.query("bucket >= 0 and step > 0")
    for _, of_pass in buckets.groupby(["rank", "step", "plan_epoch"]):
        turns = of_pass.groupby("bucket").cumcount()
        for _, one in of_pass.groupby(turns):
            assert one["launch_ns"].min() >= one["ready_ns"].max()


def ask() -> list[str]:
    said = []
    for more in ({"bucket_plan": "plan.json"}, {"find_unused_parameters": True}):
        try:
            DistributedDataParallel(Crossed(), strategy="forward_order", **more)  # type: ignore[arg-type]
        except OverlapScopeError as error:
            said.append(str(error))
    return said


def test_where_a_strategy_has_no_say_in_the_order_it_is_refused_in_one_line(golden: Callable[[str, str], None]) -> None:
    (said,) = run_ranks(ask, 1)
    golden("refused/bucket_order", "\n".join(said))
