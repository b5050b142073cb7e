"""What collectives look like: the same for the same, and another for another."""

from __future__ import annotations

import pytest

from overlapscope.diagnosis.order_view import BUCKET_SLOTS, CATEGORIES, collective_category
from overlapscope.trace.collective_log import Signature
from tests.ordered import all_reduce, bucket


def test_buckets_share_their_colors_in_turn():
    assert collective_category(bucket(0)) == collective_category(bucket(BUCKET_SLOTS))
    assert len({collective_category(bucket(number)) for number in range(BUCKET_SLOTS)}) == BUCKET_SLOTS


@pytest.mark.parametrize("role", ["buffers", "bitmap", "construction", "join", "hook"])
def test_what_ddp_does_beside_buckets_is_told_from_what_the_user_does(role):
    assert CATEGORIES[collective_category(Signature(op="broadcast", role=role))] == role
    assert CATEGORIES[collective_category(Signature(op="broadcast"))] == "broadcast"


def test_operations_of_the_user_differ_by_what_they_do():
    ops = ("broadcast", "all_gather", "reduce_scatter", "reduce", "barrier")
    found = {collective_category(Signature(op=op)) for op in ops} | {collective_category(all_reduce())}
    assert len(found) == len(ops) + 1
    assert collective_category(Signature(op="monitored_barrier")) == collective_category(Signature(op="barrier"))


def test_an_operation_that_nobody_knows_has_a_place_too():
    assert CATEGORIES[collective_category(Signature(op="something_new"))] == "other"
