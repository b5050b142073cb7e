"""What real trainings leave in their collective logs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.session import open_session
from overlapscope.trace.collective_log import (
    ENTRY_DTYPE,
    HEADER_BYTES,
    SHADOW,
    UNEVEN_INPUTS,
    CollectiveLogHeader,
    Signature,
    group_file,
)
from overlapscope.trace.json_files import from_dict
from overlapscope.trace.schema import PARAMETERS_FILE, SIGNATURES_FILE, UNREDUCED_FILE, rank_folder
from tests.cluster.ranks import run_ranks

pytestmark = pytest.mark.cluster


@dataclass
class Log:
    header: CollectiveLogHeader
    entries: Any
    signatures: list[Signature]

    def of_role(self, role: str) -> list[tuple[Signature, Any]]:
        return [(s, e) for s, e in zip(self.signatures, self.entries, strict=True) if s.role == role]


def read(traces: Path, rank: int, group: int = 0, *, point_to_point: bool = False) -> Log:
    """Read a log that has not wrapped, with nothing of the reader that is to be used for it."""
    folder = rank_folder(traces, rank)
    lines = map(json.loads, (folder / SIGNATURES_FILE).read_text().splitlines())
    signatures = {line["signature"]: from_dict(Signature, line) for line in lines}
    path = folder / group_file(group, point_to_point=point_to_point)
    data = path.read_bytes()
    entries = np.frombuffer(data[HEADER_BYTES:], dtype=ENTRY_DTYPE)
    entries = entries[entries["number"] > 0]
    assert list(entries["number"]) == list(range(1, len(entries) + 1))
    return Log(
        CollectiveLogHeader.unpack(data[:HEADER_BYTES], path), entries, [signatures[n] for n in entries["signature"]]
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.stem(x)))


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()


def train_with_everything(traces: str) -> None:
    train(DistributedDataParallel(Net(), trace=traces, find_unused_parameters=True, bucket_cap_mb=1e-4), 3)


def test_everything_that_ddp_launches_is_there_with_what_it_is_for(tmp_path):
    run_ranks(train_with_everything, 2, str(tmp_path))
    log, other = read(tmp_path, 0), read(tmp_path, 1)
    roles = [signature.role for signature in log.signatures]
    first_step = roles.index("buffers")
    assert set(roles[:first_step]) == {"construction"}
    buckets = max(signature.bucket for signature, _ in log.of_role("bucket")) + 1
    assert buckets > 1
    step = ["buffers", "buffers", *["bucket"] * buckets, "bitmap"]
    assert roles[first_step:] == 3 * step
    assert [signature.op for signature, _ in log.of_role("bitmap")] == 3 * ["all_reduce"]
    assert [int(entry["step"]) for _, entry in log.of_role("bucket")] == [s for s in range(3) for _ in range(buckets)]
    assert [s.hash for s in log.signatures] == [s.hash for s in other.signatures]
    assert log.entries["hash"].tolist() == other.entries["hash"].tolist(), "ranks agree, so their sums do"
    assert (log.entries["announced_ns"] <= log.entries["launched_ns"]).all()
    assert (log.entries["launched_ns"] <= log.entries["completed_ns"]).all()


def test_parameters_are_written_down_with_their_modules(tmp_path):
    run_ranks(train_with_everything, 2, str(tmp_path))
    line = json.loads((rank_folder(tmp_path, 1) / PARAMETERS_FILE).read_text())
    assert [name for name, _, _ in line["parameters"]] == [name for name, _ in Net().named_parameters()]
    assert line["modules"]["norm"] == "BatchNorm1d"


def use_plain_collectives(traces: str) -> None:
    rank = dist.get_rank()
    session = open_session(Path(traces), rank)
    pair = dist.new_group([0, 2], group_desc="pair")
    loss = torch.ones(1)
    metrics = {"accuracy": torch.zeros(3), "perplexity": torch.zeros(3)}
    dist.all_reduce(loss)
    for values in metrics.values():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    dist.broadcast(loss, src=1)
    dist.barrier()
    if rank != 1:
        dist.all_reduce(loss, group=pair)
    if rank == 0:
        dist.send(loss, 2, tag=7)
    if rank == 2:
        dist.recv(loss, 0, tag=7)
    with torch.inference_mode():
        dist.all_gather_object([None] * 3, {"rank": rank})
    session.close()
    dist.all_reduce(loss)


def test_plain_collectives_are_there_with_group_tensor_and_line(tmp_path):
    run_ranks(use_plain_collectives, 3, str(tmp_path))
    log = read(tmp_path, 0)
    assert log.header.ranks == (0, 1, 2)
    assert [(s.op, s.reduce_op, s.elements, s.peer) for s in log.signatures] == [
        ("all_reduce", "sum", 1, None),
        ("all_reduce", "max", 3, None),
        ("all_reduce", "max", 3, None),
        ("broadcast", "", 1, 1),
        ("barrier", "", 0, None),
        ("all_gather", "", 1, None),
        ("all_gather", "", log.signatures[-1].elements, None),
    ], "also under inference_mode; nothing of what comes after the log is closed"
    assert "loss" in log.signatures[0].names
    assert "metrics['accuracy']" in log.signatures[1].names
    assert "metrics['perplexity']" in log.signatures[2].names
    sites = [json.loads(line) for line in (rank_folder(tmp_path, 0) / "call_sites.jsonl").read_text().splitlines()]
    by_number = {site["call_site"]: site for site in sites}
    assert all(by_number[n]["file"] == __file__ for n in log.entries["call_site"])
    source = Path(__file__).read_text().splitlines()
    assert "src=1" in source[by_number[log.entries["call_site"][3]]["line"] - 1]


def reduce_gradients_by_hand(traces: str) -> None:
    session = open_session(Path(traces), dist.get_rank())
    model = Net()
    model(torch.randn(4, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    session.close()


def test_gradients_that_are_reduced_by_hand_are_called_after_their_parameters(tmp_path):
    run_ranks(reduce_gradients_by_hand, 2, str(tmp_path))
    names = [signature.names for signature in read(tmp_path, 0).signatures]
    assert names == [(f"{name}.grad",) for name, _ in Net().named_parameters()]


def test_each_group_has_a_log_and_so_have_its_sends_and_receives(tmp_path):
    run_ranks(use_plain_collectives, 3, str(tmp_path))
    pair = read(tmp_path, 2, 1)
    assert (pair.header.ranks, pair.header.description) == ((0, 2), "pair")
    assert [s.op for s in pair.signatures] == ["all_reduce"]
    sent, received = (read(tmp_path, rank, point_to_point=True).signatures[0] for rank in (0, 2))
    assert (sent.op, sent.peer, sent.tag) == ("send", 2, 7)
    assert (received.op, received.peer, received.tag) == ("recv", 0, 7)


def join_unevenly(traces: str) -> None:
    model = DistributedDataParallel(Net(), trace=traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()


def test_a_rank_that_has_joined_shadows_the_others_and_still_agrees_with_them(tmp_path):
    run_ranks(join_unevenly, 2, str(tmp_path))
    joined, training = read(tmp_path, 0), read(tmp_path, 1)
    flags = [int(entry["flags"]) for _, entry in joined.of_role("bucket")]
    assert flags == 3 * [UNEVEN_INPUTS] + 2 * [UNEVEN_INPUTS | SHADOW]
    assert joined.entries["hash"].tolist() == training.entries["hash"].tolist()
    assert {one.role for one in joined.signatures} == {"construction", "buffers", "bucket", "plan", "join"}


def one_rank_skips(traces: str, what: str) -> None:
    model = DistributedDataParallel(Net(), trace=traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(torch.randn(32, 4), batch_size=4) if what == "loader" else list(torch.randn(8, 4, 4))
    for step, batch in enumerate(batches):
        if step == 5 and what != "sync" and dist.get_rank() == 1:
            continue
        if step == 7 and dist.get_rank() == 0:
            break
        model.require_backward_grad_sync = not (what == "sync" and step == 5 and dist.get_rank() == 1)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("what", ["loader", "loop"])
def test_a_rank_that_skips_a_batch_is_ahead_in_its_data_from_then_on(tmp_path, what):
    run_ranks(one_rank_skips, 2, str(tmp_path), what)
    ahead = [
        int(there["batch"]) - int(here["batch"])
        for (_, here), (_, there) in zip(
            read(tmp_path, 0).of_role("bucket"), read(tmp_path, 1).of_role("bucket"), strict=True
        )
    ]
    assert ahead == [0] * 5 + [1, 1]


def test_a_rank_that_leaves_out_a_reduction_is_a_step_ahead_in_its_buckets(tmp_path):
    run_ranks(one_rank_skips, 2, str(tmp_path), "sync")
    here, there = read(tmp_path, 0), read(tmp_path, 1)
    steps = [[int(entry["step"]) for _, entry in log.of_role("bucket")] for log in (here, there)]
    assert steps[0][:6] == [0, 1, 2, 3, 4, 5]
    assert steps[1][:6] == [0, 1, 2, 3, 4, 6]
    differing = np.flatnonzero(here.entries["hash"][: len(there.entries)] != there.entries["hash"][: len(here.entries)])
    assert here.signatures[differing[0]].role == "bucket"
    assert here.entries["step"][differing[0]] == 5


def bypass_the_wrapper(traces: str, how: str) -> None:
    model = DistributedDataParallel(Net(), trace=traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        if how == "no_sync" and step == 2:
            with model.no_sync():
                model(torch.randn(4, 4)).sum().backward()
        elif how == "evaluation" and step == 2:
            with torch.no_grad():
                model.module(torch.randn(4, 4))
        inner = model if how in ("no_sync", "evaluation") or step < 2 else model.module
        inner(torch.randn(4, 4)).sum().backward()  # the line
        if how == "by hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()


def test_an_update_with_gradients_of_this_rank_alone_is_written_down_with_the_line(tmp_path):
    run_ranks(bypass_the_wrapper, 2, str(tmp_path), "training")
    for rank in (0, 1):
        unreduced = json.loads((rank_folder(tmp_path, rank) / UNREDUCED_FILE).read_text().splitlines()[0])
        assert unreduced["step"] == 2
        site = unreduced["call_site"]
        assert "# the line" in Path(site["file"]).read_text().splitlines()[site["line"] - 1]


@pytest.mark.parametrize("how", ["by hand", "no_sync", "evaluation"])
def test_gradients_that_are_reduced_otherwise_or_later_are_no_fault(tmp_path, how):
    run_ranks(bypass_the_wrapper, 2, str(tmp_path), how)
    assert not (rank_folder(tmp_path, 0) / UNREDUCED_FILE).exists()
