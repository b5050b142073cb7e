"""A training whose CUDA graphs are captured while it is recorded comes to the same, and the rest of it is recorded."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel, attach
from overlapscope.trace.recording import read_trace
from tests.gpu.device import DEVICE, make_mlp, needs_a_device, results_of, run_on_device, train

pytestmark = needs_a_device

WARM_UP_STEPS, STEPS = 12, 6
"""DDP asks for eleven of them before a capture."""


def capture_beside(folder: str) -> list[bool]:
    """Graphs of other things are captured between steps, in each mode, while collectives are in flight."""
    model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, trace=folder)
    static = torch.ones(1024, device=DEVICE)
    right = []
    for step in train(model, 9):
        works = [dist.all_reduce(torch.ones(1 << 20, device=DEVICE), async_op=True) for _ in range(4)]
        if step % 3 == 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=("global", "thread_local", "relaxed")[step // 3]):
                doubled = 2 * static
            static.fill_(step)
            graph.replay()
            right.append(bool((doubled == 2 * step).all()))
        for work in works:
            work.wait()
    return right


def train_graphed_callables(folder: str) -> list[float]:
    model = make_mlp()
    sample = torch.randn(64, 1024, device=DEVICE, requires_grad=True)
    model[1] = torch.cuda.make_graphed_callables(model[1], (sample,))
    ddp = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=4, trace=folder)
    for _ in train(ddp, STEPS):
        pass
    return [parameter.sum().item() for parameter in ddp.parameters()]


def capture_whole_steps(folder: str) -> list[float]:
    """As torch's notes on CUDA graphs have it for DDP: forward, backward and update are one graph."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, trace=folder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        static = torch.randn(64, 1024, device=DEVICE)
        for _ in range(WARM_UP_STEPS):
            optimizer.zero_grad(set_to_none=True)
            model(static).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = model(static).square().mean()
        loss.backward()
        optimizer.step()
    losses = []
    for _ in range(STEPS):
        graph.replay()
        losses.append(loss.item())
    return losses


def train_compiled(folder: str) -> list[float]:
    model = DistributedDataParallel(make_mlp(2), device_ids=[0], bucket_cap_mb=4, trace=folder)
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in train(compiled, STEPS):
        torch.compiler.cudagraph_mark_step_begin()
    return [parameter.sum().item() for parameter in model.parameters()]


def capture_in_a_thread(folder: str) -> bool:
    """Stock's way of serving beside a training; and nothing but collectives is recorded here."""
    attach(folder)
    static, results = torch.ones(1024, device=DEVICE), []

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            graph.capture_begin(capture_error_mode="thread_local")
            doubled = 2 * static
            graph.capture_end()
        graph.replay()
        results.append(doubled)

    thread = threading.Thread(target=capture)
    thread.start()
    for _ in range(50):
        dist.all_reduce(torch.ones(1 << 16, device=DEVICE))
    thread.join()
    torch.cuda.synchronize()
    return bool((results[0] == 2).all())


def test_graphs_of_other_things_do_not_disturb_the_recording(tmp_path):
    [right] = results_of(run_on_device(capture_beside, "nccl", 1, str(tmp_path)))
    assert right == [True] * 3
    trace = read_trace(tmp_path)
    assert trace.errors == []
    assert trace.collectives.query("bucket >= 0 and step >= 4")["end_ns"].notna().all()


def test_a_graph_may_be_captured_on_another_thread(tmp_path):
    assert results_of(run_on_device(capture_in_a_thread, "nccl", 1, str(tmp_path))) == [True]


@pytest.mark.parametrize("worker", [train_graphed_callables, pytest.param(train_compiled, marks=pytest.mark.slow)])
def test_parts_that_are_graphs_are_trained_and_recorded(tmp_path, worker):
    results_of(run_on_device(worker, "nccl", 1, str(tmp_path)))
    trace = read_trace(tmp_path)
    assert trace.errors == []
    assert set(trace.steps["step"]) >= set(range(STEPS - 1))


def test_whole_steps_are_captured_and_those_before_are_recorded(tmp_path):
    [losses] = results_of(run_on_device(capture_whole_steps, "nccl", 1, str(tmp_path)))
    assert losses == sorted(losses, reverse=True), "it learns"
    trace = read_trace(tmp_path)
    assert trace.errors == []
    assert set(trace.steps["step"]) >= set(range(WARM_UP_STEPS - 1))


def test_modules_need_not_be_on_the_device(tmp_path):
    """A module on the host of a process that has a device."""
    results_of(run_on_device(train_on_the_host, "cpu:gloo,cuda:nccl", 1, str(tmp_path)))
    assert read_trace(tmp_path).errors == []


def train_on_the_host(folder: str) -> None:
    model = DistributedDataParallel(nn.Linear(8, 8), trace=folder)
    for _ in range(STEPS):
        model(torch.ones(2, 8)).sum().backward()
