"""What is recorded of models that torch's ``fully_shard`` has sharded, in scripts that know nothing of us."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from instrumented_ddp import attach
from overlapscope.advice.sharded import describe_model
from overlapscope.advice.sharded_times import extract_step_times
from overlapscope.analysis import Analysis
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.rank_state import find_position
from overlapscope.interop.inductor_profile import build_inductor_profile
from overlapscope.sharded_model.program import build_program
from overlapscope.sharded_model.schedule import simulate
from overlapscope.trace.event_log import read_latest_records
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.schema import EVENTS_FILE, INTERRUPTED_BACKWARDS_FILE, Kind, Phase, rank_folder
from tests.cluster.collective_logs import logged
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 5


class Block(nn.Module):
    """An odd number of rows, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 11), nn.Linear(11, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(**settings: object) -> Net:
    torch.manual_seed(0)
    net = Net()
    for part in (*net.blocks, net):
        fully_shard(part, **settings)  # type: ignore[call-overload]
    return net


def train(net: nn.Module, *, passes: int = 1, reduces_each: bool = False) -> list[float]:
    """The losses; of the passes of a step the last one is reduced, or each."""
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        for number in range(passes):
            net.set_requires_gradient_sync(reduces_each or number == passes - 1)  # type: ignore[operator]
            loss = net(torch.randn(4, 7)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(folder: str) -> list[float]:
    if folder:
        attach(folder)
    return train(sharded())


def of_step(trace: Trace, step: int) -> pd.DataFrame:
    return trace.collectives.query("rank == 0 and bucket >= 0 and step == @step")


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_groups_are_gathered_before_forward_and_backward_and_reduced_once(tmp_path: Path, world_size: int) -> None:
    recorded = run_ranks(plain, world_size, str(tmp_path))
    assert recorded == run_ranks(plain, world_size, "")
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    assert len(trace.steps) == world_size * STEPS
    seen = of_step(trace, 2)
    # The root's own parameters stay after the forward. The last block's backward comes first; that of the first one is
    # over with the whole, as its input needs no gradient.
    assert list(zip(seen["op"], seen["bucket"], strict=True)) == [
        ("all_gather", 2),
        ("all_gather", 1),
        ("all_gather", 0),
        ("all_gather", 0),
        ("all_gather", 1),
        ("reduce_scatter", 0),
        ("reduce_scatter", 2),
        ("reduce_scatter", 1),
    ]
    shards = [-(-rows // world_size) * world_size * columns for rows, columns in ((11, 7), (11, 1), (7, 11))]
    assert set(seen.query("bucket < 2")["bytes"]) == {4 * sum(shards)}
    assert seen["end_ns"].notna().all()
    assert (seen["ready_ns"].notna() == (seen["op"] == "reduce_scatter")).all()
    assert all(entry["completed_ns"] for _, entry in logged(tmp_path))
    verdict = judge(read_evidence(tmp_path)[0])
    assert (verdict.kind, verdict.sentence.split(":")[0]) == ("healthy", "All ranks finished")


def test_on_the_host_nothing_is_hidden_as_who_launches_waits(tmp_path: Path) -> None:
    run_ranks(plain, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    waits = trace.phases.query("rank == 0 and phase == 'finalize'")
    launched = trace.collectives.query("rank == 0 and bucket >= 0 and step >= 1")
    shares = []
    for start_ns, end_ns in zip(launched["launch_ns"], launched["end_ns"], strict=True):
        overlap = waits["end_ns"].clip(upper=end_ns) - waits["start_ns"].clip(lower=start_ns)
        shares.append(overlap.clip(lower=0).sum() / (end_ns - start_ns))
    assert median(shares) >= 0.5  # a busy machine may take the core away between launch and wait
    assert Analysis(trace).summary.steps


def accumulating(folder: str) -> None:
    attach(folder)
    train(sharded(), passes=3)


def test_passes_whose_gradients_stay_are_no_steps_and_reduce_nothing(tmp_path: Path) -> None:
    run_ranks(accumulating, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    assert len(trace.steps) == 2 * STEPS
    ops = of_step(trace, 2)["op"].tolist()
    assert ops.count("reduce_scatter") == 3
    assert ops.count("all_gather") > 2 * 3
    backwards = trace.phases.query("rank == 0 and step == 2 and phase == 'backward'")
    assert backwards["no_sync"].any()
    assert not backwards["no_sync"].all()


def failing_once(folder: str) -> None:
    attach(folder)
    net = sharded()
    optimizer = torch.optim.Adam(net.parameters())

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    for step in range(STEPS):
        hidden = torch.randn(4, 7, requires_grad=True)
        loss = net(hidden).square().mean()
        if step == 2:
            hidden.register_hook(fail)
        with suppress(MemoryError):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


def test_an_exception_that_is_caught_on_its_way_out_of_a_backward_is_known(tmp_path: Path) -> None:
    run_ranks(failing_once, 2, str(tmp_path))
    for rank in range(2):
        left = json.loads((rank_folder(tmp_path, rank) / INTERRUPTED_BACKWARDS_FILE).read_text())
        assert (left["step"], left["call_site"]["function"]) == (2, "failing_once")


def test_before_which_bucket_a_backward_hangs_is_said_only_until_its_first_wait(tmp_path: Path) -> None:
    run_ranks(plain, 2, str(tmp_path))
    records = read_latest_records(rank_folder(tmp_path, 0) / EVENTS_FILE, 10_000)
    of_step = records[
        (records["kind"] == Kind.PHASE_BEGIN) & (records["step"] == 2) & (records["index"] == Phase.BACKWARD)
    ]
    first, *later = [find_position(records[records["sequence"] <= one["sequence"]], None) for one in of_step]
    assert (first.phase, first.bucket) == ("backward", 0)
    assert {(one.phase, one.bucket) for one in later} == {("backward", None)}


def without_own_parameters(folder: str) -> None:
    attach(folder)
    net = sharded()
    around = nn.Sequential(net.blocks[0], nn.Sequential(nn.Linear(7, 3)))
    fully_shard(around[1])
    fully_shard(around)
    train(around)


def test_a_root_whose_parameters_are_all_in_other_groups_is_reduced_like_others(tmp_path: Path) -> None:
    run_ranks(without_own_parameters, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    assert len(trace.steps) == 2 * STEPS
    assert not trace.phases["no_sync"].any()
    assert of_step(trace, 2)["op"].tolist().count("reduce_scatter") == 2


def with_replicas(folder: str) -> None:
    attach(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(sharded(mesh=mesh, mp_policy=policy), passes=2, reduces_each=True)


def test_shards_with_replicas_are_all_reduced_too_and_precisions_are_those_of_what_is_sent(tmp_path: Path) -> None:
    run_ranks(with_replicas, 4, str(tmp_path))
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    of_bucket = of_step(trace, 2).query("bucket == 0")
    assert of_bucket["op"].tolist() == 2 * ["all_gather", "all_gather", "reduce_scatter", "all_reduce"]
    assert of_bucket["dtype"].tolist() == 2 * ["bfloat16", "bfloat16", "float32", "float32"]
    scattered, reduced = (of_bucket.query("op == @op") for op in ("reduce_scatter", "all_reduce"))
    assert (2 * reduced["elements"]).tolist() == scattered["elements"].tolist()  # two shards
    assert reduced["ready_ns"].tolist() == scattered["ready_ns"].tolist()
    assert (scattered["ready_ns"] <= scattered["launch_ns"]).all()
    groups = {(entry[0].op, entry[0].role) for entry in logged(tmp_path) if entry[0].bucket == 0}
    assert groups == {("all_gather", "bucket"), ("reduce_scatter", "bucket"), ("all_reduce", "bucket")}
    read = read_by_inductor(trace)
    assert {(name, ranks) for name, ranks, _ in read.get_collective_keys()} == {
        (name, ranks)
        for name, groups in {
            "all_gather": ((0, 1), (2, 3)),
            "reduce_scatter": ((0, 1), (2, 3)),
            "all_reduce": ((0, 2), (1, 3)),
        }.items()
        for ranks in groups
    }
    assert {(one.in_nelems, one.out_nelems) for one in read.collectives if one.collective_name == "allreduce"} == {
        (elements, elements) for elements in trace.collectives.query("op == 'all_reduce'")["elements"]
    }


def read_by_inductor(trace: Trace) -> Any:
    """What torch.compile would estimate with."""
    estimation = pytest.importorskip("torch._inductor.fx_passes.profile_guided_estimation")
    path = trace.path / "collectives.json"
    path.write_text(json.dumps(build_inductor_profile(Analysis(trace))))
    profile = estimation.ProfileData()
    profile.load(str(path))
    return profile


def prefetching(folder: str) -> None:
    attach(folder)
    net = sharded()
    net._set_unshard_async_op(True)
    first, second = net.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    train(net)


def test_settings_are_recorded_and_the_steps_are_replayed_with_them(tmp_path: Path) -> None:
    run_ranks(prefetching, 2, str(tmp_path))
    trace = read_trace(tmp_path)
    model, settings, buckets = describe_model(trace)
    assert [part.name for part in model.parts] == ["", "blocks.0", "blocks.1"]
    assert (settings.is_async, settings.forward_prefetch, settings.backward_prefetch) == (
        True,
        ((1,), ()),
        (None, (0,)),
    )
    times, replayed = extract_step_times(Analysis(trace), model, settings, buckets, min_steps=1)
    assert len(simulate(times, build_program(model, settings), settings)) == len(replayed) > 0
