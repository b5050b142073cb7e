"""Every collective that the installed torch can launch is intercepted, and as what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers its operators

from instrumented_ddp.collectives.dispatch import Call, DispatchInterceptor, find_unknown_operators


class Observer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.failures = 0
        self.errors: list[Exception] = []

    def announce(self, call: Call) -> Call:
        self.calls.append(call)
        return call

    def launched(self, announced: Any, work: dist.Work | None) -> None: ...

    def failed(self, announced: Any) -> None:
        self.failures += 1

    def on_unparsed_collective(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.fixture
def observer() -> Iterator[Observer]:
    """Of a process that is a job of its own."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    observer = Observer()
    interceptor = DispatchInterceptor(observer)
    yield observer
    interceptor.close()
    dist.destroy_process_group()


def test_no_operator_of_the_installed_torch_launches_a_collective_unseen():
    assert find_unknown_operators() == []


def test_an_operator_that_a_later_torch_adds_is_named():
    library = torch.library.Library("c10d", "FRAGMENT")
    group = "__torch__.torch.classes.c10d.ProcessGroup process_group"
    library.define(f"rotate_(Tensor[] tensors, {group}, int steps) -> ()")
    library.define("check_for_zeros(Tensor tensor) -> ()")  # no collective
    try:
        assert find_unknown_operators() == ["rotate_"]
    finally:
        library._destroy()


@pytest.mark.skipif(len(torch.ops.c10d.gather_.default._schema.arguments) < 6, reason="this torch has no kernel for it")
def test_on_a_rank_that_only_gives_to_a_gather_it_runs_where_its_tensor_is(observer):
    device = torch.device("meta")  # not the host, where what has no tensor runs
    assert dist.group.WORLD is not None
    torch.ops.c10d.gather_([[]], [torch.ones(2, device=device)], dist.group.WORLD.boxed(), 1, True, -1)
    assert [(call.op, call.peer, call.device) for call in observer.calls] == [("gather", 1, device)]
    assert observer.errors == []


needs_gather_single = pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="new in torch 2.14")


@needs_gather_single
def test_a_gather_into_one_tensor_is_a_gather(observer):
    whole, own = torch.zeros(4), torch.ones(4)
    with suppress(RuntimeError):  # gloo can't, in torch 2.14 and 2.15
        dist.gather_single(own, whole, dst=0)
    assert [(call.op, call.peer, [tensor.data_ptr() for tensor in call.tensors]) for call in observer.calls] == [
        ("gather", 0, [own.data_ptr()])
    ]
    assert observer.errors == []


FUNCTIONAL: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "all_reduce": lambda tensor, group: torch.ops._c10d_functional.all_reduce(tensor, "sum", group),
    "all_gather": lambda tensor, group: torch.ops._c10d_functional.all_gather_into_tensor(tensor, 1, group),
    "reduce_scatter": lambda tensor, group: torch.ops._c10d_functional.reduce_scatter_tensor(tensor, "sum", 1, group),
    "all_to_all": lambda tensor, group: torch.ops._c10d_functional.all_to_all_single(tensor, [4], [4], group),
    "broadcast": lambda tensor, group: torch.ops._c10d_functional.broadcast(tensor, 0, group),
}


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_functional_collectives_of_compiled_code_end_in_the_same_operators(observer, op):
    assert dist.group.WORLD is not None
    torch.ops._c10d_functional.wait_tensor(FUNCTIONAL[op](torch.ones(4), dist.group.WORLD.group_name))
    assert [call.op for call in observer.calls] == [op]
    assert observer.errors == []
