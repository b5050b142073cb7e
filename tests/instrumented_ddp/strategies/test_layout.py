"""Where parameters lie, in which bucket, and whose each element is."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.bucket_plan import ParameterSpec, Traffic
from instrumented_ddp.strategies.sharded.layout import Layout, default_bucket_elements, fill_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def spec(number: int, elements: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec(
        name=f"p{number}", shape=(elements,), dtype=dtype, device=torch.device("cpu"), elements=elements
    )


def test_a_small_model_is_laid_out_as_by_hand() -> None:
    specs = tuple(spec(number, elements) for number, elements in enumerate((100, 10, 64, 300)))
    buckets = fill_buckets(specs, 300)
    assert buckets == ((3,), (2, 1, 0))  # the last parameter fills one; the others don't fill the next
    layout = Layout(specs, buckets, ranks=3, pads_to=128)
    assert (layout.starts(0), layout.elements(0)) == ((0,), 384)
    assert (layout.starts(1), layout.elements(1)) == ((0, 64, 128), 384)  # 128 + 100, up to a multiple of 3 and of 128
    assert layout.buffers == ((0, 1),)
    owned = {rank: [(f.parameter, f.begin, f.end, f.location) for f in layout.fragments(rank)] for rank in range(3)}
    assert owned == {
        0: [(3, 0, 128, 0), (2, 0, 64, 0), (1, 0, 10, 64)],
        1: [(3, 128, 256, 128), (0, 0, 100, 128)],
        2: [(3, 256, 300, 256)],
    }


def test_a_shared_embedding_has_a_bucket_of_its_own() -> None:
    specs = tuple(spec(number, 10) for number in range(4))
    assert fill_buckets(specs, 1000, alone={2}) == ((3,), (2,), (1, 0))
    assert fill_buckets(specs, 1000, alone={3, 0}) == ((3,), (2, 1), (0,))


def test_dtypes_have_buffers_of_their_own_and_take_turns_as_gradients_come() -> None:
    specs = (spec(0, 70), spec(1, 70, torch.bfloat16), spec(2, 70), spec(3, 70, torch.bfloat16))
    layout = Layout(specs, fill_buckets(specs, 1), ranks=2, pads_to=128)
    assert layout.buckets == ((3,), (2,), (1,), (0,))
    assert layout.buffers == ((0, 2), (1, 3))


def test_half_precision_is_summed_in_single_and_gathered_as_it_is() -> None:
    layout = Layout((spec(0, 70, torch.bfloat16),), ((0,),), ranks=2, pads_to=128)
    assert layout.reduced(0) == Traffic("reduce_scatter", torch.float32, 128)
    assert layout.gathered(0) == Traffic("all_gather", torch.bfloat16, 128)


def test_buckets_grow_with_many_ranks() -> None:
    assert (default_bucket_elements(2), default_bucket_elements(64)) == (40_000_000, 64_000_000)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int, set[int]]:
    """A layout, with how many elements a bucket is full, and what is alone."""
    sizes = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    specs = tuple(spec(number, size, draw(st.sampled_from(DTYPES))) for number, size in enumerate(sizes))
    full = draw(st.integers(1, 3000))
    alone = draw(st.sets(st.integers(0, len(sizes) - 1)))
    ranks, pads_to = draw(st.integers(1, 7)), draw(st.sampled_from([128, 2**16]))
    return Layout(specs, fill_buckets(specs, full, alone), ranks, pads_to), full, alone


@given(layouts())
def test_each_element_belongs_to_one_rank_and_nothing_overlaps(drawn: tuple[Layout, int, set[int]]) -> None:
    layout, _, _ = drawn
    owners: dict[tuple[int, int], int] = {}
    cells: set[tuple[int, int]] = set()
    for rank in range(layout.ranks):
        for fragment in layout.fragments(rank):
            shard = layout.shard(fragment.bucket, rank)
            for offset in range(fragment.end - fragment.begin):
                element, cell = (
                    (fragment.parameter, fragment.begin + offset),
                    (fragment.bucket, fragment.location + offset),
                )
                assert element not in owners
                assert cell not in cells
                assert shard.start <= cell[1] < shard.stop
                owners[element] = rank
                cells.add(cell)
    assert len(owners) == sum(parameter.elements for parameter in layout.parameters)


@given(layouts())
def test_parameters_and_buckets_begin_and_end_where_megatron_pads_them(drawn: tuple[Layout, int, set[int]]) -> None:
    """Walks through each buffer element by element, as the rules are told."""
    layout, full, alone = drawn
    for buffer in layout.buffers:
        last_to_first = sorted((index for number in buffer for index in layout.buckets[number]), reverse=True)
        assert [index for number in buffer for index in layout.buckets[number]] == last_to_first
        firsts = [layout.buckets[number][0] for number in buffer]
        for number, next_first in zip(buffer, [*firsts[1:], None], strict=True):
            bucket, starts = layout.buckets[number], layout.starts(number)
            end = reached = 0
            for index, start in zip(bucket, starts, strict=True):
                while end % 64:
                    end += 1
                assert start == end
                if index != bucket[0]:
                    assert not {index, bucket[0]} & alone
                    assert reached < full  # it was not full before this one
                end = reached = start + layout.parameters[index].elements
            assert reached >= full or next_first is None or bucket[0] in alone or next_first in alone
            assert layout.elements(number) >= reached
            assert layout.elements(number) - reached < math.lcm(layout.ranks, layout.pads_to)
            assert layout.elements(number) % layout.ranks == layout.elements(number) % layout.pads_to == 0
