"""Stock DDP, recorded: what its reducer does in C++ is written down as what ours does in Python, and is not changed."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp import DistributedDataParallel, attach
from overlapscope.trace.environment import TRACE_VARIABLE
from overlapscope.trace.event_log import read_log
from overlapscope.trace.live_files import read_is_ready
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import INTERRUPTED_BACKWARDS_FILE, Kind
from tests.cluster.collective_logs import logged
from tests.cluster.ranks import run_ranks

SMALL_BUCKETS_MB = 0.003
LAUNCHED_BY_DDP = ("bucket", "bitmap", "buffers", "hook")


class Net(nn.Module):
    """With a branch that may be left out, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.branch = nn.Linear(32, 32)
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor, *, without_branch: bool = False) -> torch.Tensor:
        """Map rows of 16 to rows of 4."""
        hidden = self.first(x).relu()
        hidden = hidden if without_branch else self.branch(hidden)
        return self.last(self.middle(hidden).relu())


class Job:
    """A model, or two, in the DDP that is asked for, and their optimizer."""

    def __init__(self, kind: type[TorchDDP], *, models: int = 1, **arguments: Any) -> None:
        torch.manual_seed(1)
        self.nets = [Net() for _ in range(models)]
        self.ddps = [kind(net, bucket_cap_mb=SMALL_BUCKETS_MB, **arguments) for net in self.nets]
        self.optimizer = torch.optim.SGD([p for net in self.nets for p in net.parameters()], 0.01)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def backward(self, **how: bool) -> None:
        x = torch.randn(8, 16, generator=self.generator)
        sum(ddp(x, **how).square().mean() for ddp in self.ddps).backward()

    def steps(self, count: int, **how: bool) -> None:
        for _ in range(count):
            self.backward(**how)
            self.optimizer.step()
            self.optimizer.zero_grad()


def plain(kind: type[TorchDDP]) -> Job:
    job = Job(kind)
    job.steps(5)
    return job


def accumulation(kind: type[TorchDDP]) -> Job:
    job = Job(kind)
    for _ in range(3):
        with job.ddps[0].no_sync():
            job.backward()
        job.steps(1)
    return job


def unused_parameters(kind: type[TorchDDP]) -> Job:
    job = Job(kind, find_unused_parameters=True)
    for step in range(4):
        job.steps(1, without_branch=(step + dist.get_rank()) % 2 == 0)
    return job


def static_graph(kind: type[TorchDDP]) -> Job:
    job = Job(kind, static_graph=True)
    job.steps(4)
    return job


def two_models_in_one_backward(kind: type[TorchDDP]) -> Job:
    job = Job(kind, models=2)
    job.steps(4)
    return job


def uneven_inputs(kind: type[TorchDDP]) -> Job:
    job = Job(kind, find_unused_parameters=True)
    with job.ddps[0].join():
        job.steps(3 + 2 * dist.get_rank())
    return job


def communication_hook(kind: type[TorchDDP]) -> Job:
    job = Job(kind)
    job.ddps[0].register_comm_hook(None, default_hooks.allreduce_hook)
    job.steps(4)
    return job


SCRIPTS: list[Callable[[type[TorchDDP]], Job]] = [
    plain,
    accumulation,
    unused_parameters,
    static_graph,
    two_models_in_one_backward,
    uneven_inputs,
    communication_hook,
]


def train(script: Callable[[type[TorchDDP]], Job], folder: Path | None, *, is_ours: bool) -> list[bytes]:
    """Run a script on this rank; the bytes of all parameters."""
    if folder is not None:
        attach(folder)
    job = script(DistributedDataParallel if is_ours else TorchDDP)
    return [parameter.detach().numpy().tobytes() for net in job.nets for parameter in net.parameters()]


def of_ddp(folder: Path, rank: int) -> list[tuple[Any, ...]]:
    """What DDP has launched: what it is, and where; the call site and the phase are the process's own affair."""
    return [
        (replace(what, shapes=()), int(entry["step"]), int(entry["flags"]))
        for what, entry in logged(folder, rank)
        if what.role in LAUNCHED_BY_DDP
    ]


def plans(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank_{rank}" / "plans.jsonl").read_text().splitlines()]


def described(folder: Path, rank: int, *, wrapper: str) -> list[dict[str, Any]]:
    """What each model was given to DDP as; whose DDP it is apart."""
    lines = [json.loads(line) for line in (folder / f"rank_{rank}" / "parameters.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["settings"].pop("wrapper") == wrapper
        del line["crc32"]
    return lines


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_what_stock_ddp_launches_is_recorded_as_if_ours_had_launched_it(
    tmp_path: Path, script: Callable[[type[TorchDDP]], Job]
) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    recorded = run_ranks(train_stock, 2, script, stock)
    assert run_ranks(train_ours, 2, script, ours)
    assert recorded == run_ranks(train_stock, 2, script, None)  # to the last bit
    for rank in range(2):
        assert of_ddp(stock, rank) == of_ddp(ours, rank)
        assert plans(stock, rank) == plans(ours, rank)
        assert described(stock, rank, wrapper="torch") == described(ours, rank, wrapper="instrumented_ddp")
        assert all(read_is_ready(stock / f"rank_{rank}", 0, []))


def train_stock(script: Callable[[type[TorchDDP]], Job], folder: Path | None) -> list[bytes]:
    return train(script, folder, is_ours=False)


def train_ours(script: Callable[[type[TorchDDP]], Job], folder: Path | None) -> list[bytes]:
    return train(script, folder, is_ours=True)


def with_collectives_of_its_own(folder: Path) -> None:
    """Of the same sizes as buckets, from a hook and from the loop."""
    attach(folder)
    job = Job(TorchDDP)
    twin = torch.zeros(sum(parameter.numel() for parameter in job.nets[0].parameters()))

    def during_backward(gradient: torch.Tensor) -> None:
        dist.all_reduce(twin)
        dist.group.WORLD.allreduce([twin]).wait()  # type: ignore[union-attr]

    job.nets[0].last.bias.register_hook(during_backward)
    job.steps(1)


def test_an_all_reduce_of_the_users_during_the_backward_is_not_taken_for_a_bucket(tmp_path: Path) -> None:
    run_ranks(with_collectives_of_its_own, 2, tmp_path)
    in_backward = [what for what, entry in logged(tmp_path) if what.op == "all_reduce"]
    assert [what.role for what in in_backward] == ["user", "user", "bucket"]
    assert len({what.elements for what in in_backward}) == 1


def test_a_recording_of_stock_ddp_has_steps_phases_and_collectives(tmp_path: Path) -> None:
    run_ranks(train_stock, 2, plain, tmp_path)
    trace = read_trace(tmp_path)
    assert len(trace.steps) == 2 * 5
    assert set(trace.phases["phase"]) >= {"forward", "backward", "finalize", "optimizer"}
    for rank in range(2):
        _, records, problems = read_log(tmp_path / f"rank_{rank}" / "events.log")
        assert not problems
        count = {kind: int((records["kind"] == kind).sum()) for kind in Kind}
        buckets = sum(what.role == "bucket" for what, _ in logged(tmp_path, rank))
        assert count[Kind.BUCKET_READY] == buckets
        assert count[Kind.LAUNCH] == count[Kind.COLLECTIVE] > buckets  # and those of buffers


def exception_in_the_backward_of_all(kind: type[TorchDDP], folder: Path) -> None:
    """Before any gradient has come, so that DDP does not notice."""
    if kind is TorchDDP:
        attach(folder)
    model = kind(nn.Linear(4, 2), **({} if kind is TorchDDP else {"trace": folder}))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(4):
        output = model(torch.ones(1, 4))
        if step == 1:
            output.register_hook(lambda _: 1 / 0)
        try:
            output.sum().backward()  # the line
        except ZeroDivisionError:
            continue
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [TorchDDP, DistributedDataParallel])
def test_a_backward_that_an_exception_came_out_of_is_written_down_and_the_next_is_recorded(
    tmp_path: Path, kind: type[TorchDDP]
) -> None:
    run_ranks(exception_in_the_backward_of_all, 2, kind, tmp_path)
    for rank in range(2):
        left = json.loads((tmp_path / f"rank_{rank}" / INTERRUPTED_BACKWARDS_FILE).read_text())
        assert left["step"] == 1
        assert "# the line" in Path(__file__).read_text().splitlines()[left["call_site"]["line"] - 1]
    phases = read_trace(tmp_path).phases.query("rank == 0").sort_values("start_ns")
    assert list(phases.loc[phases["phase"].isin(["forward", "backward"]), "phase"]) == ["forward", "backward"] * 4


def without_ddp(folder: Path) -> None:
    attach(folder)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 16)), batch_size=8)
    for (x,) in data:
        net(x).square().mean().backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.barrier()


def test_a_training_without_ddp_has_steps_batches_and_names_of_gradients(tmp_path: Path) -> None:
    run_ranks(without_ddp, 2, tmp_path)
    entries = logged(tmp_path)
    assert [what.op for what, _ in entries] == ["all_reduce"] * 8 * 3 + ["barrier"]
    assert {what.role for what, _ in entries} == {"user"}
    assert [int(entry["step"]) for _, entry in entries] == [0] * 8 + [1] * 8 + [2] * 8 + [3]
    assert [int(entry["batch"]) for _, entry in entries[:-1:8]] == [1, 2, 3]
    assert entries[0][0].names == ("first.weight.grad",)
    for rank in range(2):
        described = json.loads((tmp_path / f"rank_{rank}" / "run.json").read_text())
        (model,) = described["models"]
        assert (described["world_size"], model["class"], model["ddp_arguments"]) == (2, "Net", {"strategy": "by hand"})
        assert (tmp_path / f"rank_{rank}" / "events.log").exists()


def in_two_process_groups(folder: Path) -> None:
    attach(folder)
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    dist.all_reduce(torch.ones(1))
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(2))


def test_a_process_group_that_is_made_anew_is_recorded_into_the_same_folder(tmp_path: Path) -> None:
    run_ranks(in_two_process_groups, 2, tmp_path)
    assert [what.elements for what, _ in logged(tmp_path)] == [1, 2]


def with_a_folder_of_its_own(recorded: Path, named: Path) -> None:
    os.environ[TRACE_VARIABLE] = str(recorded)
    attach()
    dist.barrier()
    model = DistributedDataParallel(nn.Linear(4, 2), trace=named)
    model(torch.ones(1, 4)).sum().backward()


def test_a_script_of_ours_that_names_a_folder_is_followed_there(tmp_path: Path) -> None:
    recorded, named = tmp_path / "recorded", tmp_path / "named"
    assert run_ranks(with_a_folder_of_its_own, 2, recorded, named) == [None, None]
    assert [what.op for what, _ in logged(recorded)] == ["barrier"]
    assert [what.role for what, _ in logged(named)][-1] == "bucket"


def wrapped_for_the_compiler(folder: Path) -> None:
    attach(folder)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        TorchDDP(Net())
        DistributedDataParallel(nn.Linear(4, 2))
    TorchDDP(nn.Linear(4, 2))
    dist.barrier()


def test_models_whose_gradients_are_reduced_in_python_are_said_to_be(tmp_path: Path) -> None:
    run_ranks(wrapped_for_the_compiler, 2, tmp_path)
    (said,) = [problem.message for problem in read_trace(tmp_path).problems if "Python" in problem.message]
    assert "Net, Linear" in said


def with_sparse_gradients(folder: Path) -> list[str]:
    """What is said of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("instrumented_ddp").addHandler(handler)
    os.environ[TRACE_VARIABLE] = str(folder)
    attach()
    torch.manual_seed(1)
    ddp = TorchDDP(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in ddp.module]
    for _ in range(5):
        ddp(torch.arange(4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()
    return said


def test_of_a_model_with_sparse_gradients_collectives_are_recorded(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(with_sparse_gradients, 2, tmp_path)):
        (line,) = said
        assert line.startswith(f"rank {rank}: a model has sparse gradients")
        assert [what.op for what, _ in logged(tmp_path, rank)].count("all_reduce") >= 3
    assert read_trace(tmp_path).steps.empty, "the bucket of dense gradients alone is no loop that reduces by hand"


def files_of_warnings(kind: type[TorchDDP], trace: str) -> set[str]:
    if kind is TorchDDP:
        attach(trace)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind(nn.Linear(2, 2), broadcast_buffers=False)
    return {warning.filename for warning in caught}


@pytest.mark.parametrize("kind", [TorchDDP, DistributedDataParallel])
def test_what_the_constructor_warns_of_is_the_users_line(tmp_path: Path, kind: type[TorchDDP]) -> None:
    assert set().union(*run_ranks(files_of_warnings, 2, kind, str(tmp_path))) <= {__file__}
