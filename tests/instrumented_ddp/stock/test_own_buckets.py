"""Which gradients the user's own collectives have reduced is told by memory or size, and never guessed."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.bucket_plan import Traffic
from instrumented_ddp.collectives.gradient_memory import memory_of
from instrumented_ddp.stock.own_buckets import UserReduction, assign_gradients


def reduction(*tensors: torch.Tensor, op: str = "all_reduce") -> UserReduction:
    elements = sum(tensor.numel() for tensor in tensors)
    return UserReduction(Traffic(op, tensors[0].dtype, elements), tuple(map(memory_of, tensors)))


def gradients(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size) for size in sizes]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_gradients_reduced_in_place_are_found_in_any_order(sizes: list[int], seed: int) -> None:
    given = gradients(*sizes)
    order = random.Random(seed).sample(range(len(sizes)), len(sizes))
    found = assign_gradients([reduction(given[one]) for one in order], given)
    assert found == [(index, (one,)) for index, one in enumerate(order)]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cuts=st.sets(st.integers(1, 7)),
    is_reversed=st.booleans(),
)
def test_flat_copies_of_neighbors_hold_all_gradients_once(sizes: list[int], cuts: set[int], is_reversed: bool) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(sizes)), len(sizes)]
    runs = [tuple(range(begin, end)) for begin, end in pairwise(edges)]
    given = gradients(*sizes)
    ordered = runs[::-1] if is_reversed else runs
    found = assign_gradients([reduction(torch.cat([given[one] for one in run])) for run in ordered], given)
    assert sorted(one for _, run in found for one in run) == list(range(len(sizes)))
    assert all(sum(sizes[one] for one in run) == sum(sizes[one] for one in ordered[index]) for index, run in found)


def test_a_flat_buffer_that_gradients_are_views_of_holds_them() -> None:
    buffer = torch.zeros(10)
    given = list(buffer.split([3, 5, 2]))
    assert assign_gradients([reduction(buffer[3:]), reduction(buffer[:3])], given) == [(0, (1, 2)), (1, (0,))]


def test_several_tensors_of_one_collective_are_one_bucket() -> None:
    given = gradients(3, 5, 2)
    assert assign_gradients([reduction(*given)], given) == [(0, (0, 1, 2))]


def test_a_loss_may_travel_with_the_gradients() -> None:
    given = gradients(300, 50)
    assert assign_gradients([reduction(torch.zeros(351))], given) == [(0, (0, 1))]
    assert assign_gradients([reduction(torch.zeros(700))], given) == []


def test_a_metric_and_a_few_of_the_gradients_make_no_loop_that_reduces_by_hand() -> None:
    given = gradients(300, 50, 1)
    assert assign_gradients([reduction(torch.zeros(1))], given) == []
    assert assign_gradients([reduction(given[1])], given) == []
    assert assign_gradients([], given) == []


def test_a_metric_as_large_as_a_bias_is_not_taken_for_it() -> None:
    given = gradients(300, 1, 50)
    assert assign_gradients([reduction(torch.zeros(1)), reduction(torch.zeros(351))], given) == [(1, (0, 1, 2))]


def test_in_half_precision_it_is_the_number_of_elements_that_counts() -> None:
    given = gradients(300, 50)
    assert assign_gradients([reduction(torch.zeros(350, dtype=torch.float16))], given) == [(0, (0, 1))]


def test_memory_of_a_metric_that_a_gradient_got_afterwards_is_not_the_gradients() -> None:
    # The allocator gives the memory of one to the next of this size.
    metrics = [reduction(torch.zeros(300)) for _ in range(50)]
    given = gradients(300, 50)
    assert assign_gradients([*metrics, reduction(torch.zeros(350))], given) == [(50, (0, 1))]


def test_a_reduction_of_nothing_is_no_bucket() -> None:
    given = gradients(300, 0, 50)
    nothing = reduction(torch.zeros(0))
    found = assign_gradients([nothing, reduction(torch.zeros(350))], given)
    assert [(index, [one for one in run if given[one].numel()]) for index, run in found] == [(1, [0, 2])]
