"""When the device fails, the training meets its own error and the recording of what was before is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.session import get_current_session
from overlapscope.trace.collective_log import HEADER_BYTES, CollectiveLogHeader, group_file
from overlapscope.trace.event_log import is_closed
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import EVENTS_FILE, rank_folder
from tests.gpu.device import DEVICE, make_mlp, needs_a_device, results_of, run_on_device, train

pytestmark = needs_a_device

STEPS = 6


class OutOfMemory(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, gradient):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
        return gradient


class DeviceAssert(OutOfMemory):
    @staticmethod
    def backward(_ctx, gradient):
        torch.ones(4, device=DEVICE)[torch.tensor([9], device=DEVICE)].sum()  # beyond the end
        return gradient


def fail_in_backward(folder: str, how: str) -> str:
    """What the training is told; the process then closes its recording, as an interpreter that ends does."""
    model = DistributedDataParallel(make_mlp(), device_ids=[0], bucket_cap_mb=4, trace=folder)
    for _ in train(model, STEPS):
        pass
    function = OutOfMemory if how == "out of memory" else DeviceAssert
    try:
        function.apply(model(torch.randn(64, 1024, device=DEVICE)).square().mean()).backward()
        torch.cuda.synchronize()
    except Exception as error:
        said = str(error)
    get_current_session().close()
    return said


@pytest.mark.parametrize("how", ["out of memory", "device-side assert"])
def test_a_backward_that_fails_fails_with_its_own_error(tmp_path, how):
    try:
        said = results_of(run_on_device(fail_in_backward, "nccl", 1, str(tmp_path), how))
    except RuntimeError:
        if how == "out of memory":
            raise  # only after an assert NCCL's watchdog may end the process before it gets so far
    else:
        assert how in said[0]
        folder = rank_folder(tmp_path, 0)
        assert is_closed(folder / EVENTS_FILE)
        assert CollectiveLogHeader.unpack((folder / group_file(0)).read_bytes()[:HEADER_BYTES], folder).closed
    trace = read_trace(tmp_path)
    assert trace.errors == []
    assert set(trace.steps["step"]) >= set(range(STEPS - 1))


def destroy_with_works_in_flight(folder: str) -> None:
    attach(folder)
    works = [dist.all_reduce(torch.ones(1 << 22, device=DEVICE), async_op=True) for _ in range(64)]
    del works
    dist.destroy_process_group()
    torch.cuda.synchronize()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the end of the rank


def test_groups_may_go_with_works_in_flight(tmp_path):
    results_of(run_on_device(destroy_with_works_in_flight, "nccl", 1, str(tmp_path)))
    assert Path(rank_folder(tmp_path, 0) / group_file(0)).exists()


def peak_bytes_of_gathers(folder: str) -> int:
    """Sixty-four asynchronous all-gathers whose outputs nobody keeps."""
    if folder:
        attach(folder)
    part = torch.ones(1 << 20, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(64):
        whole = torch.empty(dist.get_world_size() << 20, device=DEVICE)
        dist.all_gather_into_tensor(whole, part, async_op=True).wait()
        del whole
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_a_recording_keeps_no_memory_of_collectives_that_nobody_waits_for(tmp_path):
    unrecorded = results_of(run_on_device(peak_bytes_of_gathers, "nccl", 1, ""))
    recorded = results_of(run_on_device(peak_bytes_of_gathers, "nccl", 1, str(tmp_path)))
    print(f"peak {unrecorded} bytes, recorded {recorded}")
    assert recorded == unrecorded
