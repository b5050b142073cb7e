"""A fingerprint changes with any bit, and with nothing else."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from instrumented_ddp.replicas.fingerprint import (
    TensorPart,
    describe_layout,
    divide_into_parts,
    find_exclusion_reason,
)
from instrumented_ddp.replicas.rows import HostRows, TakenPass

CPU = torch.device("cpu")
SHAPES = [(1,), (3,), (10,), (7, 5), (64, 33), (200_000,), (300, 1024), (2, 3, 5, 7), (1024, 257)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]


def take(tensors: list[torch.Tensor]) -> tuple[list[int], bytes]:
    """The fingerprints of one part, in the order of the tensors, and whether each was taken."""
    rows = HostRows(tensors, [range(len(tensors))])
    rows.take(0)
    finished: deque[TakenPass] = deque()
    rows.finish_pass(TakenPass(1, 0, bytes(4), b"", b""), finished)
    if not finished:
        return [0] * len(tensors), bytes(len(tensors))
    values = np.frombuffer(rows.decode(finished[0])[3], "<i8").tolist()
    return values, bytes(value != 0 for value in values)


def fingerprint(tensor: torch.Tensor) -> int:
    ((value,), is_taken) = take([tensor])
    assert is_taken == b"\x01"
    return value


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return drawn.to(dtype)


def test_equal_bits_have_the_same_fingerprint() -> None:
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        tensor = values(shape, dtype)
        assert fingerprint(tensor) == fingerprint(tensor.clone()), (shape, dtype)


@given(st.sampled_from(SHAPES), st.sampled_from([one for one in DTYPES if one is not torch.bool]), st.data())
def test_any_single_bit_changes_it(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = values(shape, dtype)
    before = fingerprint(tensor)
    view = tensor.view(torch.uint8).reshape(-1)
    view[data.draw(st.integers(0, view.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(tensor) != before


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


@given(
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8), st.lists(st.sampled_from(DTYPES), min_size=8), st.data()
)
def test_of_a_part_only_the_fingerprint_of_the_tensor_that_changes_is_another(
    shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], data: st.DataObject
) -> None:
    tensors = [values(shape, dtype, seed) for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))]
    before, is_taken = take(tensors)
    assert is_taken == b"\x01" * len(tensors)
    changed = data.draw(st.integers(0, len(tensors) - 1))
    tensors[changed].view(torch.uint8).reshape(-1)[-1] ^= 1
    after, _ = take(tensors)
    assert [number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other] == [changed]


@given(st.lists(st.sampled_from([*SHAPES, (1200, 1024)]), min_size=1, max_size=100))
def test_parts_are_neighbors_and_neither_many_nor_large(shapes: list[tuple[int, ...]]) -> None:
    tensors = [torch.empty(shape) for shape in shapes]
    parts = divide_into_parts(tensors)
    assert [number for part in parts for number in part] == list(range(len(tensors)))
    for part in parts:
        assert len(part) == 1 or (
            len(part) <= 32 and sum(4 * tensors[number].numel() for number in part) <= 4 * 1024**2
        )


def test_autocast_and_inference_mode_change_nothing() -> None:
    tensors = [values(shape, torch.bfloat16) for shape in SHAPES]
    taken = take(tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert take(tensors) == taken
    with torch.inference_mode():
        assert take(tensors) == taken


def test_the_order_in_memory_is_part_of_the_layout_and_no_reason_to_fail() -> None:
    rows = values((6, 4), torch.float32)
    columns = rows.t().contiguous().t()
    assert fingerprint(columns)
    assert describe_layout(rows) != describe_layout(columns)


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
    assert find_exclusion_reason(tensor, CPU) == why


@pytest.mark.parametrize("shape", [(8,), (300, 1024)], ids=["small", "large"])
def test_a_tensor_that_has_changed_its_type_or_is_gone_has_none(shape: tuple[int, ...]) -> None:
    parameter, other = nn.Parameter(values(shape, torch.float32)), values((500, 40), torch.float32)
    part = TensorPart([parameter, other], [0, 1], torch.zeros(2, dtype=torch.int64))
    with torch.no_grad():
        assert part.take() == b"\x01\x01"
        parameter.data = parameter.data.half()
        is_there = dict(zip(part.order, part.take(), strict=True))
        assert is_there == {0: 0, 1: 1}
        del parameter
        is_there = dict(zip(part.order, part.take(), strict=True))
        assert is_there == {0: 0, 1: 1}
