"""The bitmap of used parameters on its way to a device, which is played here."""

from __future__ import annotations

from typing import Any

import torch

from instrumented_ddp.reduction.unused_parameters import UsageMap


class FakeCommunicator:
    def all_reduce(self, buffer: Any, _: object) -> None:
        self.buffer = buffer


class OnDevice:
    """A tensor on a device, as far as a copy to it goes."""

    device = torch.device("cuda", 0)

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        self.source, self.non_blocking = source, non_blocking


def test_the_bitmap_is_copied_from_pinned_memory_without_waiting_and_from_new_memory_each_time(monkeypatch):
    pinned = []

    def empty_like(tensor: torch.Tensor, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        pinned.append(torch.zeros(tensor.shape, dtype=dtype))
        return pinned[-1]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    communicator: Any = FakeCommunicator()
    usage = UsageMap(3, torch.device("cpu"), communicator, None)
    on_device: Any = OnDevice()
    usage.reduced = on_device
    usage.note(1)
    usage.all_reduce()
    assert communicator.buffer is on_device
    assert on_device.non_blocking, "else the host would wait for the device in each backward"
    assert on_device.source is pinned[0]
    usage.note(2)
    usage.all_reduce()
    assert [bitmap.tolist() for bitmap in pinned] == [[0, 1, 0], [0, 1, 1]], "the first may still be on its way"


def test_on_the_host_the_bitmap_holds_what_was_used():
    communicator: Any = FakeCommunicator()
    usage = UsageMap(3, torch.device("cpu"), communicator, None)
    usage.note(2)
    usage.all_reduce()
    assert communicator.buffer.tolist() == [0, 0, 1]
    assert communicator.buffer.dtype == torch.int32
