"""What collectives look like: the same for the same, and another for another."""

from __future__ import annotations

import pytest

from overlapscope.diagnosis.categories import BUCKET_SLOTS, CATEGORIES, category_of
from overlapscope.trace.signature import Signature
from tests.ordered import all_reduce, bucket


def test_buckets_share_their_colours_in_turn():
    assert category_of(bucket(0)) == category_of(bucket(BUCKET_SLOTS))
    assert len({category_of(bucket(number)) for number in range(BUCKET_SLOTS)}) == BUCKET_SLOTS


@pytest.mark.parametrize("role", ["buffers", "bitmap", "construction", "join", "hook"])
def test_what_ddp_does_beside_buckets_is_told_from_what_the_user_does(role):
    assert CATEGORIES[category_of(Signature(op="broadcast", role=role))] == role
    assert CATEGORIES[category_of(Signature(op="broadcast"))] == "broadcast"


def test_operations_of_the_user_differ_by_what_they_do():
    ops = ("broadcast", "all_gather", "reduce_scatter", "reduce", "barrier")
    found = {category_of(Signature(op=op)) for op in ops} | {category_of(all_reduce())}
    assert len(found) == len(ops) + 1
    assert category_of(Signature(op="monitored_barrier")) == category_of(Signature(op="barrier"))


def test_an_operation_that_nobody_knows_has_a_place_too():
    assert CATEGORIES[category_of(Signature(op="something_new"))] == "other"
