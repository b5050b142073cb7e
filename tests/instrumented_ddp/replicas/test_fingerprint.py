"""A fingerprint changes with any bit, and with nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from instrumented_ddp.replicas.fingerprint import Fingerprint

CPU = torch.device("cpu")
SHAPES = [(1,), (3,), (10,), (7, 5), (64, 33), (200_000,), (300, 1024), (2, 3, 5, 7), (1024, 257)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def fingerprint(tensor: torch.Tensor) -> int | None:
    result = torch.zeros((), dtype=torch.int64)
    return int(result) if Fingerprint(tensor, CPU).take(result) else None


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return drawn.to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_the_same_fingerprint(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = values(shape, dtype)
    assert fingerprint(tensor) == fingerprint(tensor.clone()) is not None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES[:-1]), st.data())
def test_any_single_bit_changes_it(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = values(shape, dtype)
    before = fingerprint(tensor)
    view = tensor.view(torch.uint8).reshape(-1)
    view[data.draw(st.integers(0, view.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(tensor) != before


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(SHAPES[1:]), st.data())
def test_changes_that_cancel_each_other_out_are_seen(shape: tuple[int, ...], data: st.DataObject) -> None:
    """As many last places up as down, which a plain sum would not notice."""
    tensor = values(shape, torch.float32)
    before, flat = fingerprint(tensor), tensor.view(torch.int32).reshape(-1)
    places = st.integers(0, flat.numel() - 1)
    up, down = data.draw(places), data.draw(places)
    assume((up - down) % 2048)  # two words of one column
    flat[up] += 1
    flat[down] -= 1
    assert fingerprint(tensor) != before


def test_the_number_of_threads_does_not_matter() -> None:
    tensor, threads = values((1025, 1024), torch.float32), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = fingerprint(tensor)
        torch.set_num_threads(3)
        assert fingerprint(tensor) == one
    finally:
        torch.set_num_threads(threads)


def test_the_order_in_memory_is_part_of_the_layout_and_no_reason_to_fail() -> None:
    rows = values((6, 4), torch.float32)
    columns = rows.t().contiguous().t()
    assert fingerprint(columns) is not None
    assert Fingerprint(rows, CPU).layout != Fingerprint(columns, CPU).layout


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(4, 4)[:, ::2], "not dense"),
        (torch.zeros(4, 4).to_sparse(), "not dense"),
        (torch.zeros(4, device="meta"), "on meta"),
        (torch.zeros(2, dtype=torch.complex64), "complex"),
        (torch.zeros(0), "empty"),
        (torch.zeros(100_001, dtype=torch.bool), "of 100,001 elements"),
        (nn.UninitializedParameter(), "a UninitializedParameter"),
    ],
)
def test_what_has_no_fingerprint_says_why(tensor: torch.Tensor, why: str) -> None:
    assert Fingerprint(tensor, CPU).exclusion_reason == why


def test_a_tensor_that_has_changed_its_type_or_is_gone_has_none() -> None:
    parameter = nn.Parameter(values((8,), torch.float32))
    taken, result = Fingerprint(parameter, CPU), torch.zeros((), dtype=torch.int64)
    assert taken.take(result)
    parameter.data = parameter.data.half()
    assert not taken.take(result)
    del parameter
    assert not taken.take(result)
