"""Ranks that share a device where their backend wants one for each are told so in one line."""

from __future__ import annotations

import pytest
import torch

from instrumented_ddp.collectives.dispatch import require_device_per_rank
from overlapscope.errors import OverlapScopeError


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


def is_refused(backend: str) -> bool:
    try:
        require_device_per_rank(backend)
    except OverlapScopeError:
        return True
    return False


def test_only_an_nccl_that_wants_a_device_for_each_rank_is_refused(monkeypatch):
    assert is_refused("nccl")
    assert not is_refused("gloo")
    for name, value in (("device_count", lambda: 2), ("nccl.version", lambda: (2, 30, 0))):
        with monkeypatch.context() as patch:
            patch.setattr(f"torch.cuda.{name}", value)
            assert not is_refused("nccl")
    monkeypatch.setenv("NCCL_HOSTID", "host-0")  # ranks count as being on hosts of their own
    assert not is_refused("nccl")
