"""Bucket plans: pure functions, checked against torch's own assignment."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.bucket_plan import NO_LIMIT, ParameterSpec, plan_buckets, plan_in_module_order

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=30)
limits = st.lists(st.integers(1, 20_000), min_size=1, max_size=4)


def specs_of(
    sizes: list[int], dtypes: list[torch.dtype] | None = None, is_sparse: list[bool] | None = None
) -> list[ParameterSpec]:
    dtypes = dtypes or [torch.float32] * len(sizes)
    is_sparse = is_sparse or [False] * len(sizes)
    return [
        ParameterSpec(
            name=f"p{i}", shape=(size,), dtype=dtype, device=torch.device("cpu"), elements=size, is_sparse=sparse
        )
        for i, (size, dtype, sparse) in enumerate(zip(sizes, dtypes, is_sparse, strict=True))
    ]


@given(sizes, limits, st.data())
def test_one_dtype_gives_the_buckets_that_torch_gives(sizes, limits, data):
    order = data.draw(st.permutations(range(len(sizes))))
    is_sparse = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    ours = plan_buckets(specs_of(sizes, is_sparse=is_sparse), order, limits)
    tensors = [torch.empty(sizes[index]) for index in order]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits, is_sparse, order)
    # Torch puts a last, unfilled bucket behind sparse ones that come after it; ours keep the order of readiness.
    assert sorted(list(bucket) for bucket in ours.buckets) == sorted(theirs)


@given(sizes, limits, st.data())
def test_the_first_plan_is_the_one_that_torchs_wrapper_makes(sizes, limits, data):
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in sizes]
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(sizes))
    ours = plan_in_module_order(specs_of(sizes, dtypes), limits)
    assert [list(bucket) for bucket in ours.buckets] == theirs[::-1]


@given(sizes, limits, st.data())
def test_every_parameter_is_in_one_bucket_of_its_dtype(sizes, limits, data):
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in sizes]
    order = data.draw(st.permutations(range(len(sizes))))
    plan = plan_buckets(specs_of(sizes, dtypes), order, limits)
    assert sorted(index for bucket in plan.buckets for index in bucket) == list(range(len(sizes)))
    assert all(len({dtypes[index] for index in bucket}) == 1 for bucket in plan.buckets)


@given(sizes, limits, st.data())
def test_buckets_come_in_the_order_in_which_they_become_ready(sizes, limits, data):
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in sizes]
    order = data.draw(st.permutations(range(len(sizes))))
    plan = plan_buckets(specs_of(sizes, dtypes), order, limits)
    ready_at = [max(order.index(index) for index in bucket) for bucket in plan.buckets]
    assert ready_at == sorted(ready_at)


def test_without_a_limit_there_is_one_bucket_a_dtype():
    plan = plan_in_module_order(specs_of([10, 10, 10], [torch.float32, torch.bfloat16, torch.float32]), [NO_LIMIT])
    assert plan.buckets == ((1,), (0, 2))


def test_the_hash_tells_two_orders_of_equal_shapes_apart():
    specs = specs_of([10, 10])
    assert plan_buckets(specs, [0, 1], [1]).hash != plan_buckets(specs, [1, 0], [1]).hash
