"""Which ranks the address asks for."""

from __future__ import annotations

import pandas as pd
import pytest

from dashboards.pages.rank_choice import choose_ranks, suggest_ranks
from overlapscope.text import format_ranks, parse_ranks


def ranks(count, per_host=8):
    return pd.DataFrame({"rank": range(count), "host": [f"node{rank // per_host}" for rank in range(count)]})


def choose(count, lateness_ns=None, **arguments):
    return choose_ranks(ranks(count), {name: [value.encode()] for name, value in arguments.items()}, lateness_ns)


def test_without_a_wish_all_are_shown():
    choice = choose(1024)
    assert choice.shown == tuple(range(1024))
    assert (choice.ranks, choice.marked, choice.note, choice.expanded) == (1024, None, "", None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3,7,12", (3, 7, 12)),
        ("12, 3 7", (12, 3, 7)),
        ("30-32, 31-33", (30, 31, 32, 33)),
        ("5,x,-,7-6,9-,1e3,٣", (5,)),
        ("0-999999999", tuple(range(64))),
    ],
)
def test_ranks_and_ranges_are_shown_in_the_order_given(text, shown):
    assert choose(64, ranks=text).shown == shown


@pytest.mark.parametrize("text", ["", "all", "64", "9" * 5000, "-1", "<script>", "\x00"])
def test_nonsense_is_ignored(text):
    assert choose(64, ranks=text, rank=text).shown == tuple(range(64))


def test_what_was_asked_for_and_is_not_shown_is_said():
    assert "64, 70-80" in choose(64, ranks="1,64,70-80").note


def test_the_rank_that_a_link_is_about_comes_first_then_those_of_its_host():
    choice = choose(64, rank="21")
    assert choice.shown == (21, 16, 17, 18, 19, 20, 22, 23, *range(16), *range(24, 64))
    assert choice.marked == 21
    assert choose(4, rank="2").shown == (2, 0, 1, 3)
    assert choose(64, rank="21", ranks="3,21,4").shown == (21, 3, 4)


def test_what_is_written_into_the_field_is_read_back():
    shown = (777, 776, 778, 779, 0, 1, 2)
    assert format_ranks(shown) == "777, 776, 778, 779, 0-2"
    assert parse_ranks(format_ranks(shown), range(1024)) == (list(shown), [])


def test_hosts_are_suggested_if_there_are_several():
    assert suggest_ranks(ranks(24)) == [("0-7", "node0"), ("8-15", "node1"), ("16-23", "node2")]
    assert suggest_ranks(ranks(24, per_host=24)) == []


LATE_NS = dict.fromkeys(range(1024), -10) | {700: 5_000, 9: 300, 702: 40}


def test_the_latest_come_first_then_by_rank():
    choice = choose(1024, LATE_NS, order="lateness")
    assert choice.shown == (700, 9, 702, *(rank for rank in range(1024) if rank not in (700, 9, 702)))
    assert (choice.order, choice.note) == ("lateness", "")
    assert choose(1024, LATE_NS, order="lateness", ranks="8-10, 702").shown == (9, 702, 8, 10)


def test_each_host_is_shown_by_its_latest_rank_until_it_is_opened():
    choice = choose(32, {3: 7, 20: 9, 17: 8, 24: 1}, order="host")
    assert choice.shown == (20, 3, 24, 8)
    assert choice.folded == {20: ("node2", 8), 3: ("node0", 8), 24: ("node3", 8), 8: ("node1", 8)}
    opened = choose(32, {3: 7, 20: 9, 17: 8, 24: 1}, order="host", open="node2,nowhere")
    assert opened.shown == (20, 17, 16, 18, 19, 21, 22, 23, 3, 24, 8)
    assert opened.opened == {"node2"}
    assert opened.folded == choice.folded


@pytest.mark.parametrize("order", ["rank", "lateness", "host"])
def test_pinned_ranks_stay_on_top_in_any_order(order):
    choice = choose(1024, LATE_NS, order=order, pin="40,x,3", ranks="0-1, 700")
    assert choice.shown[:2] == (40, 3)
    assert set(choice.shown) >= {40, 3, 700}
    assert choice.pinned == {40, 3}
    assert choose(1024, LATE_NS, order=order, pin="40,3", rank="5").shown[:3] == (5, 40, 3)


def test_that_nobody_knows_who_is_late_is_said():
    choice = choose(24, {}, order="lateness")
    assert choice.shown == tuple(range(24))
    assert choice.note


@pytest.mark.parametrize("order", ["", "upwards", "\x00", "Rank"])
def test_an_unknown_order_is_that_of_ranks(order):
    assert choose(24, LATE_NS, order=order).shown == tuple(range(24))


@pytest.mark.parametrize(
    ("text", "expanded"), [("", None), ("none", set()), ("all", set(range(64))), ("3, 60-99", {3, 60, 61, 62, 63})]
)
def test_which_ranks_are_expanded_is_read_from_the_address(text, expanded):
    assert choose(64, expanded=text).expanded == expanded
