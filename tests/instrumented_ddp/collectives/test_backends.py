"""What is known of a backend by its class: how a stream waits for its works, and who wants a device of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from instrumented_ddp.collectives.backends import explain_bounds, find_stream_wait, require_device_per_rank
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
    assert is_refused("nccl2")
    assert not is_refused("gloo")
    for name, value in (("device_count", lambda: 2), ("nccl.version", lambda: (2, 30, 0))):
        with monkeypatch.context() as patch:
            patch.setattr(f"torch.cuda.{name}", value)
            assert not is_refused("nccl")
    monkeypatch.setenv("NCCL_HOSTID", "host-0")  # ranks count as being on hosts of their own
    assert not is_refused("nccl")


DEVICE = torch.device("cuda", 0)


class Backend:
    """Of a group for all devices."""

    def __init__(self, name: str = "") -> None:
        self.name = lambda: name


class Nccl(Backend): ...


class Nccl2(Backend): ...


class Lazy(Backend): ...


class Wrapper(Backend):
    wrapped_pg: object


class Work:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def block_current_stream(self) -> None:
        self.asked.append("block_current_stream")

    def synchronize(self) -> None:
        self.asked.append("synchronize")


@pytest.fixture(autouse=True)
def _classes(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", Nccl2, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCLLazy", Lazy, raising=False)
    monkeypatch.setattr(distributed_c10d, "_ProcessGroupWrapper", Wrapper, raising=False)


def group_of(backend: object) -> Any:
    return SimpleNamespace(_get_backend=lambda _: backend, name=lambda: "custom")


def asked_for_a_wait(backend: object) -> list[str] | None:
    wait = find_stream_wait(group_of(backend), DEVICE)
    if wait is None:
        return None
    work = Work()
    wait(work)  # type: ignore[arg-type]
    return work.asked


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_stream_waits_by_the_method_that_launches_nothing_for_this_class(is_wrapped):
    def backend(kind: type[Backend]) -> Backend:
        inner, outer = kind(), Wrapper()
        outer.wrapped_pg = inner
        return outer if is_wrapped else inner

    if hasattr(dist.Work, "block_current_stream"):
        assert asked_for_a_wait(backend(Nccl)) == ["block_current_stream"]
    assert asked_for_a_wait(backend(Nccl2)) == asked_for_a_wait(backend(Lazy)) == ["synchronize"]
    assert asked_for_a_wait(backend(Backend)) is None


def test_without_a_class_of_that_name_nothing_is_one(monkeypatch):
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"):
        monkeypatch.delattr(dist, name)
        monkeypatch.delattr(distributed_c10d, name, raising=False)
    assert asked_for_a_wait(Nccl2()) is None


def test_that_ends_are_bounds_is_explained_by_the_backend():
    assert explain_bounds(group_of(Nccl2("nccl2")), DEVICE) is None
    assert "ucc" in (explain_bounds(group_of(Backend("ucc")), DEVICE) or "")
    assert explain_bounds(group_of(Backend("gloo")), torch.device("cpu")) is None  # each end has its uncertainty


def test_that_ends_are_bounds_is_explained_by_an_old_torch(monkeypatch):
    monkeypatch.setattr(dist, "Work", type("OldWork", (), {}))
    assert "2.8" in (explain_bounds(group_of(Nccl("nccl")), DEVICE) or "")


def test_a_group_written_in_python_has_no_backend():
    def refuse(_: object) -> None:
        raise RuntimeError("no backend for device type cuda")

    group: Any = SimpleNamespace(_get_backend=refuse, name=lambda: "mine")
    assert find_stream_wait(group, DEVICE) is None
    assert "mine" in (explain_bounds(group, DEVICE) or "")
