"""Bucket plans: pure functions, checked against torch's own assignment."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.buckets import MB, ParameterSpec, caps_in_bytes, plan_buckets

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=30)
caps = st.integers(1, 20_000)


def specs_of(sizes: list[int], dtypes: list[torch.dtype] | None = None) -> list[ParameterSpec]:
    dtypes = dtypes or [torch.float32] * len(sizes)
    return [
        ParameterSpec(name=f"p{i}", shape=(size,), dtype=dtype, device=torch.device("cpu"), elements=size)
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]


@given(sizes, caps, caps)
def test_one_dtype_gives_the_buckets_that_torch_gives(sizes, cap, first_cap):
    order = list(range(len(sizes)))[::-1]
    ours = plan_buckets(specs_of(sizes), order, cap, first_cap)
    tensors = [torch.empty(sizes[index]) for index in order]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first_cap, cap], [], order)
    assert [list(bucket) for bucket in ours.buckets] == theirs


@given(sizes, caps, caps, st.data())
def test_every_parameter_is_in_one_bucket_of_its_dtype(sizes, cap, first_cap, data):
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in sizes]
    order = data.draw(st.permutations(range(len(sizes))))
    plan = plan_buckets(specs_of(sizes, dtypes), order, cap, first_cap)
    assert sorted(index for bucket in plan.buckets for index in bucket) == list(range(len(sizes)))
    assert all(len({dtypes[index] for index in bucket}) == 1 for bucket in plan.buckets)


@given(sizes, caps, st.data())
def test_buckets_come_in_the_order_in_which_they_become_ready(sizes, cap, data):
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in sizes]
    order = data.draw(st.permutations(range(len(sizes))))
    plan = plan_buckets(specs_of(sizes, dtypes), order, cap, cap)
    ready_at = [max(order.index(index) for index in bucket) for bucket in plan.buckets]
    assert ready_at == sorted(ready_at)


def test_the_hash_tells_two_orders_of_equal_shapes_apart():
    specs = specs_of([10, 10])
    assert plan_buckets(specs, [0, 1], 1, 1).hash != plan_buckets(specs, [1, 0], 1, 1).hash


def test_only_the_default_cap_has_a_small_first_bucket():
    assert caps_in_bytes(None) == (25 * MB, 1 * MB)
    assert caps_in_bytes(25) == (25 * MB, 25 * MB)
