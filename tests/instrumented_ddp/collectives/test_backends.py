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


def test_two_ranks_on_one_device_are_refused():
    with pytest.raises(OverlapScopeError, match="2 ranks on a host with 1 CUDA device, and nccl needs one for each"):
        require_device_per_rank("nccl")


def test_gloo_lets_them_share_it():
    require_device_per_rank("gloo")


def test_so_does_a_newer_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 0))
    require_device_per_rank("nccl")


def test_and_one_that_takes_them_to_be_on_hosts_of_their_own(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "host-0")
    require_device_per_rank("nccl")


def test_as_many_devices_as_ranks_are_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_device_per_rank("nccl")
