"""Whatever stock's class does, ours does while recording: every scenario, on every rank, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from itertools import chain
from types import ModuleType

import pytest

from tests.cluster.ranks import Ranks
from tests.cluster.same_as_stock import (
    backward_passes,
    buckets,
    buffers,
    checkpointing,
    comm_hooks,
    compiled,
    failures,
    optimizers,
    parameter_hooks,
    parameter_kinds,
    saving,
    several_models,
    static_graph,
    uneven_inputs,
    unused_parameters,
    wrapping,
)
from tests.cluster.same_as_stock.scenarios import OlderTorchError, differences_from_stock

pytestmark = pytest.mark.cluster

SUBJECTS = (
    backward_passes,
    buckets,
    buffers,
    checkpointing,
    comm_hooks,
    compiled,
    failures,
    optimizers,
    parameter_hooks,
    parameter_kinds,
    saving,
    several_models,
    static_graph,
    uneven_inputs,
    unused_parameters,
    wrapping,
)


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[str, int], Ranks]]:
    """Gives so many ranks for a group of scenarios, mostly a subject: the same ones for all, one after the other."""
    with ExitStack() as latest:

        @lru_cache(maxsize=1)
        def ranks_of(group: str, world_size: int) -> Ranks:
            latest.close()  # those of the subject before
            return latest.enter_context(Ranks(world_size))

        yield ranks_of


def mark(number: int) -> list[pytest.MarkDecorator]:
    """When a scenario is run that needs ranks of its own, which takes seconds."""
    return [] if number == 0 else [pytest.mark.slow if number < 2 else pytest.mark.nightly]


@pytest.mark.parametrize(
    ("subject", "name", "world_size"),
    [
        pytest.param(
            subject,
            name,
            size,
            id=f"{subject.__name__.rpartition('.')[2]}-{name}-{size}_ranks",
            marks=mark(number) if subject.scenarios.leave_traces else [],
        )
        for subject in SUBJECTS
        for size in subject.scenarios.world_sizes
        for number, name in enumerate(subject.scenarios.by_name)
    ],
)
def test_same_as_stock(ranks_of: Callable[[str, int], Ranks], subject: ModuleType, name: str, world_size: int) -> None:
    group = f"{subject.__name__} {name}" if subject.scenarios.leave_traces else subject.__name__
    differences = ranks_of(group, world_size).call(differences_from_stock, subject.__name__, name)
    if any(isinstance(found, OlderTorchError) for found in differences):
        pytest.skip(f"stock's class of this torch can't do that: {differences[0]}")
    assert list(chain(*differences)) == []
