"""Whatever the parameters are and however they are used, gradients and buckets are those of stock's class."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from instrumented_ddp import DistributedDataParallel
from tests.cluster.ranks import Ranks
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import logged

pytestmark = pytest.mark.cluster

STEPS = 3
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class RandomModel:
    """Parameters, where in the tree of modules they are, who is who, and how they are wrapped and used."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    frozen: tuple[bool, ...]
    shared: tuple[int, ...]
    """A parameter is the one at this place, if that comes before it."""
    depths: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    """Places of the parameters used, in order: of each rank at each step."""
    options: dict[str, object]


def tuples_of(size: int, items: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(items, min_size=size, max_size=size).map(tuple)


@st.composite
def random_models(draw: st.DrawFn) -> RandomModel:
    count = draw(st.integers(1, 8))
    finds_unused = draw(st.booleans())
    some = st.lists(st.integers(0, count - 1), max_size=2 * count)
    all_in_some_order = st.permutations(range(count)).map(tuple)
    if finds_unused:
        # Without any gradient, a backward would not be noticed.
        uses = draw(tuples_of(2 * STEPS, st.builds(lambda before, after: (*before, 0, *after), some, some)))
    else:
        uses = (draw(all_in_some_order),) * (2 * STEPS)
    cap_mb = st.none() | st.floats(1e-6, 4e-3)
    return RandomModel(
        shapes=draw(tuples_of(count, st.lists(st.integers(0, 20), max_size=2).map(tuple))),
        dtypes=draw(tuples_of(count, st.sampled_from(DTYPES))),
        frozen=(False, *draw(tuples_of(count - 1, st.booleans()))),
        shared=draw(tuples_of(count, st.integers(0, count - 1))),
        depths=draw(tuples_of(count, st.integers(0, 3))),
        uses=uses,
        options={
            "find_unused_parameters": finds_unused,
            "static_graph": not finds_unused and draw(st.booleans()),
            "gradient_as_bucket_view": draw(st.booleans()),
            "batched_grad_copy": draw(st.booleans()),
            "bucket_cap_mb": draw(cap_mb),
            "bucket_cap_mb_list": draw(st.none() | st.lists(st.floats(1e-6, 4e-3), min_size=1, max_size=3)),
        },
    )


class MadeUp(nn.Module):
    """The module that a `RandomModel` describes."""

    def __init__(self, model: RandomModel) -> None:
        super().__init__()
        self.used: list[nn.Parameter] = []
        for place, (shape, dtype, frozen) in enumerate(zip(model.shapes, model.dtypes, model.frozen, strict=True)):
            if model.shared[place] < place:
                parameter = self.used[model.shared[place]]
            else:
                parameter = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=not frozen)
            self.used.append(parameter)
            parent: nn.Module = self
            for level in range(model.depths[place]):
                if not hasattr(parent, f"level_{level}"):
                    parent.add_module(f"level_{level}", nn.Module())
                parent = parent.get_submodule(f"level_{level}")
            parent.register_parameter(f"parameter_{place}", parameter)

    def forward(self, places: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
        """Use the parameters, in this order."""
        for place in places:
            x = torch.tanh(x + self.used[place].double().square().sum())
        return x


def differences_from_stock(model: RandomModel) -> list[str]:
    rank = dist.get_rank()
    stock, ours = Seen(), Seen()
    for ddp_class, seen in (
        (nn.parallel.DistributedDataParallel, stock),
        (partial(DistributedDataParallel, trace=Path(tempfile.gettempdir(), "traces")), ours),
    ):
        torch.manual_seed(0)
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters  # an older torch has fewer
        wrapped = ddp_class(MadeUp(model), **{name: model.options[name] for name in model.options.keys() & known})
        for step in range(STEPS):
            wrapped.zero_grad(set_to_none=step % 2 == 0)
            x = torch.tensor(0.01 * (step + 1) * (rank + 1), dtype=torch.float64, requires_grad=True)
            wrapped(model.uses[2 * step + rank], x).backward()
            seen.gradients(f"step {step}", wrapped)
            seen.note(f"step {step}: logged", logged(wrapped))
        seen.state("in the end", wrapped)
    return stock.differences(ours)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.slow
@given(model=random_models())
@settings(max_examples=10, derandomize=True)
def test_gradients_and_buckets_are_those_of_stock(ranks: Ranks, model: RandomModel) -> None:
    assert ranks.call(differences_from_stock, model) == [[], []]
