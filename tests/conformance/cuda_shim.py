"""Runs on the CPU what PyTorch's tests write for one CUDA device a rank.

Every CUDA device that a test names becomes the CPU, ``torch.cuda`` says that each rank has a device, and streams and
events do nothing, because work on the CPU is done when the call returns. What is tested stays what it was: the
arguments, hooks, buckets and errors of DistributedDataParallel, with real collectives between real processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def install_cuda_shim(ddp_class: type, world_size: int) -> None:
    """From now on, and in the processes that are forked from this one, CUDA devices are the CPU. There is no way back.

    Args:
        ddp_class: its ``device_ids`` are dropped, because a CPU module has none.
        world_size: as many devices are pretended.
    """
    _stub_torch_cuda(world_size)
    _drop_device_ids(ddp_class)
    CudaToCpu().__enter__()  # for good: nobody leaves it


class CudaToCpu(TorchFunctionMode):
    """Replaces CUDA devices in the arguments of torch's functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = [args[0], *map(_on_cpu, args[1:])]
        return func(*args, **kwargs)


class Stream:
    """A stream whose work is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass


class Event:
    """An event that has always happened."""

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass


def _stub_torch_cuda(world_size: int) -> None:
    torch.cuda.device_count = lambda: world_size
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *_: None
    torch.cuda.synchronize = lambda *_, **__: None
    torch.accelerator.current_stream = lambda *_: Stream()
    torch.Stream = Stream
    torch.Event = Event
    torch.nn.Module.cuda = lambda self, *_: self
    parse_to = torch._C._nn._parse_to  # behind Module.to, where a TorchFunctionMode does not reach

    def parse_to_cpu(*args: Any, **kwargs: Any) -> Any:
        return parse_to(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    torch._C._nn._parse_to = parse_to_cpu


def _drop_device_ids(ddp_class: type) -> None:
    construct = ddp_class.__init__

    @functools.wraps(construct)
    def construct_on_cpu(
        self: Any,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Several devices stay what they are: an error, with or without CUDA.
        if device_ids is not None and len(device_ids) <= 1:
            device_ids = output_device = None
        construct(self, module, device_ids, output_device, *args, **kwargs)

    ddp_class.__init__ = construct_on_cpu


def _on_cpu(value: Any) -> Any:
    """The CPU for anything that names a CUDA device, and any other value as it is."""
    if isinstance(value, bool):
        return value
    is_cuda = (
        isinstance(value, int)
        or (isinstance(value, torch.device) and value.type == "cuda")
        or (isinstance(value, str) and value.split(":")[0] == "cuda")
    )
    return CPU if is_cuda else value
