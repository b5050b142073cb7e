"""Ranks on one real CUDA device. CI has none: whoever has one runs ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import nn

from tests.cluster.ranks import Ranks

# Ranks are forked from a server that must not have asked CUDA for its devices, which NVML tells as well.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

DEVICE: Final = torch.device("cuda", 0)
SHARED_CLOCK_ERROR_NS: Final = 10_000_000
"""Processes take turns of 2 ms on a device, and each wait for an anchor may contain several. 6 ms were seen."""
_MOST_CYCLES_PER_MS: Final = 2_000_000
"""The clock of an idle device is lower, and what is measured where processes take turns says little."""

needs_a_device: Final = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


def on_the_device(rank: int) -> None:
    """All ranks share the device.

    NCCL before 2.30 refuses that of ranks on one host. Where each believes to be on a host of its own, their
    collectives go through sockets, and their kernels take turns on the device.
    """
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_HOSTID": f"host-{rank}",
    }
    torch.cuda.set_device(DEVICE)


def run_on_device(worker: Callable[..., Any], backend: str, world_size: int, *args: Any) -> list[Any]:
    """As ``run_ranks``, on the device."""
    with Ranks(world_size, on_the_device, backend) as ranks:
        return ranks.call(worker, *args, is_last=True)


def results_of(results: list[Any]) -> list[Any]:
    """Those of ranks that came to an end.

    Raises:
        Exception: that of a rank that did not.
    """
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def make_mlp(layers: int = 8, width: int = 1024) -> nn.Sequential:
    """4 MB a layer as it is given, with the same weights on every call."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(DEVICE)


def train(model: nn.Module, steps: int, rank: int = 0, width: int = 1024) -> Iterator[int]:
    """SGD on random inputs; yields before each step, and nobody waits for the device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator(DEVICE).manual_seed(rank)
    for step in range(steps):
        yield step
        optimizer.zero_grad()
        model(torch.randn(64, width, device=DEVICE, generator=generator)).square().mean().backward()
        optimizer.step()


def sleep_on_device(milliseconds: float) -> None:
    """Keep the current stream busy for at least so long; the host goes on."""
    torch.cuda._sleep(round(milliseconds * _MOST_CYCLES_PER_MS))
