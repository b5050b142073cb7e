"""Which ranks the address asks for."""

from __future__ import annotations

import pandas as pd
import pytest

from dashboards.pages.rank_choice import choose_ranks, format_ranks, parse_ranks, suggest_ranks


def ranks(count, per_host=8):
    return pd.DataFrame({"rank": range(count), "host": [f"node{rank // per_host}" for rank in range(count)]})


def choose(count, **arguments):
    return choose_ranks(ranks(count), {name: [value.encode()] for name, value in arguments.items()})


def test_without_a_wish_the_first_sixteen_are_shown():
    choice = choose(1024)
    assert choice.shown == tuple(range(16))
    assert (choice.ranks, choice.is_part, choice.marked, choice.note) == (1024, True, None, "")
    assert not choose(16).is_part


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3,7,12", (3, 7, 12)),
        ("12, 3 7", (12, 3, 7)),
        ("30-32, 31-33", (30, 31, 32, 33)),
        ("5,x,-,7-6,9-,1e3,٣", (5,)),
        ("0-999999999", tuple(range(16))),
    ],
)
def test_ranks_and_ranges_are_shown_in_the_order_given(text, shown):
    assert choose(64, ranks=text).shown == shown


@pytest.mark.parametrize("text", ["", "all", "64", "9" * 5000, "-1", "<script>", "\x00"])
def test_nonsense_is_ignored(text):
    assert choose(64, ranks=text, rank=text).shown == tuple(range(16))


def test_what_was_asked_for_and_is_not_shown_is_said():
    assert choose(64, ranks="1,64,70-80").note == "there is no rank 64, 70-80"
    assert choose(64, ranks="0-19").note == "20 were chosen, but only 16 can be shown at a time"


def test_the_rank_that_a_link_is_about_comes_first_then_those_of_its_host():
    choice = choose(64, rank="21")
    assert choice.shown == (21, 16, 17, 18, 19, 20, 22, 23, *range(8))
    assert choice.marked == 21
    assert choose(4, rank="2").shown == (2, 0, 1, 3)
    assert choose(64, rank="21", ranks="3,21,4").shown == (21, 3, 4)


def test_what_is_written_into_the_field_is_read_back():
    shown = (777, 776, 778, 779, 0, 1, 2)
    assert format_ranks(shown) == "777, 776, 778-779, 0-2"
    assert parse_ranks(format_ranks(shown), range(1024)) == (list(shown), [])


def test_hosts_are_suggested_or_as_many_ranks_as_fit():
    assert suggest_ranks(ranks(24)) == [("0-7", "node0"), ("8-15", "node1"), ("16-23", "node2")]
    assert suggest_ranks(ranks(24, per_host=24)) == [("0-15", ""), ("16-23", "")]
