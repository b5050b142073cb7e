"""Where a process computes, before it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp.attach import _device_of


@pytest.mark.parametrize(
    ("backends", "kind"),
    [
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),  # as init_process_group() without a backend makes it where there are GPUs
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo", "cpu"),
    ],
)
def test_a_group_with_nccl_computes_on_devices_whatever_it_is_called(monkeypatch, backends: str, kind: str):
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    group: Any = SimpleNamespace(bound_device_id=None, name=lambda: "undefined")
    assert _device_of(group).type == kind


def test_a_group_that_is_bound_to_a_device_computes_there():
    group: Any = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    assert _device_of(group) == torch.device("cuda", 3)
