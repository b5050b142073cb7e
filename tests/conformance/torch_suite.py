"""PyTorch's own tests of DistributedDataParallel, as the torch wheel ships them, over gloo on the CPU.

Importing this imports torch's test modules, which takes seconds and needs ``fork_server.ENVIRONMENT``: only the fork
server and its sessions do.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from torch.testing._internal import common_distributed


def _mark_as_gpu_gated(test: Callable[..., Any]) -> Callable[..., Any]:
    test.needs_gpu = True
    return test


# Upstream skips most DDP tests where there are fewer GPUs than ranks. Here the gates only leave a mark, which the
# decorators around them hand on, and `cuda_shim` makes the tests run on the CPU.
common_distributed.skip_if_no_gpu = _mark_as_gpu_gated
common_distributed.skip_if_lt_x_gpu = lambda *_, **__: _mark_as_gpu_gated

from torch.testing._internal.distributed import distributed_test  # noqa: E402 - it reads the gates at import

PROCESS_GROUP_TIMEOUT_S = 30
"""How long a collective waits for the other ranks: less than upstream's 60 s, so that a hang is told well before the
session's own limit."""

distributed_test.default_pg_timeout = PROCESS_GROUP_TIMEOUT_S


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All distributed tests of the wheel. Ranks are forked, as in upstream's CI of gloo."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def needs_gpu(test: str) -> bool:
    """Upstream runs this test only where each rank has a GPU of its own."""
    return getattr(getattr(TorchSuite, test), "needs_gpu", False)


def ddp_tests() -> list[str]:
    """The tests that are about DDP: they construct it, call a helper that does, or have it in their name."""
    sources = dict(_sources_of_methods())
    about_ddp = {
        name
        for name, source in sources.items()
        if "ddp" in name.lower() or re.search(r"DistributedDataParallel\(|\bDDP\(|_test_ddp", source)
    }
    grows = True
    while grows:
        calls_one = re.compile(rf"self\.({'|'.join(map(re.escape, about_ddp))})\b")
        callers = {name for name, source in sources.items() if name not in about_ddp and calls_one.search(source)}
        about_ddp |= callers
        grows = bool(callers)
    return sorted(name for name in about_ddp if name.startswith("test"))


def _sources_of_methods() -> list[tuple[str, str]]:
    methods = ((name, inspect.unwrap(method)) for name, method in inspect.getmembers(TorchSuite, inspect.isfunction))
    # Only torch's own: unittest's methods say nothing of DDP.
    return [(name, inspect.getsource(method)) for name, method in methods if "torch" in method.__module__]
