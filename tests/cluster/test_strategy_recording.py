"""What is recorded of other ways to sum gradients: bytes as their formulas say, rounds, sums and settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dashboards.recording import Rounds
from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.session import get_current_session
from instrumented_ddp.strategies.all_reduces import Hierarchical
from instrumented_ddp.strategies.strategy import Strategy
from overlapscope.trace.recording import read_trace
from tests.cluster.collective_logs import logged
from tests.cluster.ranks import Ranks, run_ranks
from tests.cluster.test_strategies import Weights, make

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def _ring(rank: int, ranks: int, parts: list[int]) -> int:
    """A rank leaves out one part in each half: that of its right neighbor, and that which its neighbor ends with."""
    total = sum(parts)
    return (total - parts[rank]) + (total - parts[(rank + 1) % ranks])


def _tree(rank: int, ranks: int, total: int) -> int:
    children = sum(child < ranks for child in (2 * rank + 1, 2 * rank + 2))
    return total * (children + (rank > 0))


def _double_tree(rank: int, ranks: int, parts: list[int]) -> int:
    return _tree(rank, ranks, parts[0]) + _tree(ranks - 1 - rank, ranks, parts[1])


def _of_servers(rank: int, ranks: int, parts: list[int]) -> int:
    return sum(parts) - parts[rank] + (ranks - 1) * parts[rank]


SENT: dict[str, Callable[[int, int, list[int], list[int]], int]] = {
    "ring": lambda rank, ranks, of_ranks, _: _ring(rank, ranks, of_ranks),
    "tree": lambda rank, ranks, of_ranks, _: _tree(rank, ranks, sum(of_ranks)),
    "double_tree": lambda rank, ranks, _, halves: _double_tree(rank, ranks, halves),
    "direct": lambda _rank, ranks, of_ranks, _: (ranks - 1) * sum(of_ranks),
    "direct_two_shot": lambda rank, ranks, of_ranks, _: _of_servers(rank, ranks, of_ranks),
    "parameter_server": lambda rank, ranks, of_ranks, _: _of_servers(rank, ranks, of_ranks),
}
"""Elements that a rank sends of a bucket: from its number, that of all, and elements of their parts and of halves."""


def train_recorded(strategy: str, folder: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(17, 33), nn.Linear(33, 65), nn.Linear(65, 3))
    ddp = make(strategy, net, trace=folder)
    for _ in range(3):
        ddp(torch.ones(2, 17)).sum().backward()
    close_recording()


def close_recording() -> None:
    """So that the same ranks can make another one."""
    dist.barrier()
    session = get_current_session()
    assert session is not None
    session.close()
    dist.barrier()


def split(elements: int, parts: int) -> list[int]:
    """As ``torch.tensor_split``."""
    return [elements // parts + (part < elements % parts) for part in range(parts)]


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("strategy", SENT)
def test_as_many_bytes_are_sent_as_the_formula_says(
    ranks_of_module: Callable[[int], Ranks], tmp_path: Path, strategy: str, world_size: int
) -> None:
    ranks_of_module(world_size).call(train_recorded, strategy, str(tmp_path))
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    buckets = trace.collectives.query("op == 'all_reduce' and rank == 0")["elements"]
    sent = {}
    for rank in range(world_size):
        entries = [what for what, _ in logged(tmp_path, rank) if what.op == "send"]
        assert {what.role for what in entries} == {"segment"}
        sent[rank] = sum(what.bytes for what in entries)
        expected = sum(
            SENT[strategy](rank, world_size, split(elements, world_size), split(elements, 2)) for elements in buckets
        )
        assert sent[rank] == 4 * expected
        assert trace.segments.query("rank == @rank")["sent_bytes"].sum() == sent[rank]
    assert trace.segments["received_bytes"].sum() == sum(sent.values())
    if strategy in ("ring", "tree", "double_tree"):
        assert sum(sent.values()) == 2 * (world_size - 1) * 4 * buckets.sum()


def test_a_ring_only_talks_to_its_neighbors(ranks_of_module: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks_of_module(4).call(train_recorded, "ring", str(tmp_path))
    for rank in range(4):
        peers = {(what.op, what.peer) for what, _ in logged(tmp_path, rank) if what.op in ("send", "recv")}
        assert peers == {("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)}


def test_each_round_of_a_ring_is_with_its_neighbors_and_has_its_number(
    ranks_of_module: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks_of_module(4).call(train_recorded, "ring", str(tmp_path))
    segments = read_trace(tmp_path).segments
    assert (segments["sent_to"].astype(int) == (segments["rank"] + 1) % 4).all()
    assert (segments["received_from"].astype(int) == (segments["rank"] - 1) % 4).all()
    for _, one in segments.groupby(["rank", "step", "bucket"]):
        numbered = [(phase, number, 3) for phase in ("reduce-scatter", "all-gather") for number in (1, 2, 3)]
        of_sum = one.sort_values("start_ns")
        # Until the buckets are rebuilt, one is reduced three times in a step: no optimizer ends it.
        assert list(of_sum[["phase", "round", "rounds"]].itertuples(index=False, name=None)) == numbered * (
            len(one) // 6
        )
        assert (of_sum["end_ns"].to_numpy()[:-1] <= of_sum["start_ns"].to_numpy()[1:]).all()


@pytest.mark.parametrize("strategy", ["ring", "double_tree", "hierarchical", "parameter_server"])
def test_the_rounds_of_a_sum_lie_within_its_all_reduce(
    ranks_of_module: Callable[[int], Ranks], tmp_path: Path, strategy: str
) -> None:
    ranks_of_module(3).call(train_recorded, strategy, str(tmp_path))
    trace = read_trace(tmp_path)
    table = Rounds(trace).table
    assert (table["row"] >= 0).all()
    all_reduces = trace.collectives.iloc[table["row"]]
    assert set(table["row"]) == set(np.flatnonzero(trace.collectives["op"] == "all_reduce"))
    assert (all_reduces["launch_ns"].to_numpy() <= table["start_ns"].to_numpy()).all()
    assert (table["end_ns"].to_numpy() <= all_reduces["end_ns"].to_numpy(dtype=np.int64)).all()


@pytest.mark.parametrize("strategy", ["ring", "double_tree"])
def test_in_the_collective_log_a_sum_is_an_all_reduce_by_its_strategy(
    ranks_of_module: Callable[[int], Ranks], tmp_path: Path, strategy: str
) -> None:
    ranks_of_module(2).call(train_recorded, strategy, str(tmp_path))
    reduced = read_trace(tmp_path).collectives.query("op == 'all_reduce'")
    for rank in range(2):
        sums = [(what, entry) for what, entry in logged(tmp_path, rank) if what.role == "bucket"]
        assert {(what.op, what.strategy) for what, _ in sums} == {("all_reduce", strategy)}
        of_rank = reduced.query("rank == @rank").sort_values("launch_ns")
        assert [what.bucket for what, _ in sums] == of_rank["bucket"].tolist()
        assert all(entry["announced_ns"] <= entry["launched_ns"] <= entry["completed_ns"] for _, entry in sums)
        segments = [what for what, _ in logged(tmp_path, rank) if what.role == "segment"]
        assert all(what.strategy == strategy and what.phase and what.round for what in segments)


def train_on_two_hosts(folder: str) -> Weights:
    """Ranks 0 and 1 are on one, 2 and 3 on the other."""
    host = str(dist.get_rank() // 2)
    strategy = Strategy(name="two hosts", all_reduce=Hierarchical(host=lambda: host))
    net = nn.Linear(101, 7)
    ddp = make(strategy, net, trace=folder)
    ddp(torch.ones(2, 101) * dist.get_rank()).sum().backward()
    return [parameter.grad.numpy().copy() for parameter in net.parameters()]


def test_between_hosts_only_a_part_of_the_buffer_travels(tmp_path: Path) -> None:
    for weight, bias in run_ranks(train_on_two_hosts, 4, str(tmp_path)):
        assert np.allclose(weight, 2 * 1.5)  # two rows, and the mean of the ranks' numbers
        assert np.allclose(bias, 2)
    elements = 102 * 7
    between = [
        what.elements
        for rank in range(4)
        for what, _ in logged(tmp_path, rank)
        if what.op == "send" and what.peer is not None and what.peer // 2 != rank // 2 and what.dtype == "float32"
    ]
    assert sum(between) == 2 * elements  # each half once there and once back: 2 (N - 1) of it with two hosts


def train_with_one_bit(folder: str) -> None:
    ddp = DistributedDataParallel(nn.Linear(640, 10), strategy="one_bit", trace=folder)
    ddp(torch.ones(2, 640)).sum().backward()
    close_recording()


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_bit_sends_a_bit_an_element_and_a_scale(
    ranks_of_module: Callable[[int], Ranks], tmp_path: Path, world_size: int
) -> None:
    ranks_of_module(world_size).call(train_with_one_bit, str(tmp_path))
    part = math.ceil(6410 / world_size / 8) + 4
    for rank in range(world_size):
        sent = [what.bytes for what, _ in logged(tmp_path, rank) if what.op == "send"]
        assert sent == [part] * 2 * (world_size - 1)


@pytest.mark.parametrize(("strategy", "recorded"), [("ring", "ring"), ("overlapped", None)])
def test_a_strategy_is_a_setting_of_the_model_unless_it_is_the_usual_one(
    ranks_of_module: Callable[[int], Ranks], tmp_path: Path, strategy: str, recorded: str | None
) -> None:
    ranks_of_module(2).call(train_recorded, strategy, str(tmp_path))
    (line,) = (tmp_path / "rank_0" / "parameters.jsonl").read_text().splitlines()
    assert json.loads(line)["settings"].get("strategy") == recorded


def train_with_power_sgd(folder: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    ddp = DistributedDataParallel(net, strategy="power_sgd", bucket_cap_mb=0.02, trace=folder)
    for _ in range(30):
        ddp(torch.randn(4, 64)).square().mean().backward()


def test_what_a_hook_launches_is_a_part_of_the_sum_whichever_thread_launches_it(tmp_path):
    run_ranks(train_with_power_sgd, 2, str(tmp_path))
    for rank in range(2):
        assert "user" not in {what.role for what, _ in logged(tmp_path, rank)}
