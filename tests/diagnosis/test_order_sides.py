"""What ranks have at one number, side by side."""

from __future__ import annotations

from dataclasses import replace

from overlapscope.diagnosis.evidence import CallSite, Entry
from overlapscope.diagnosis.order_view import compare_sides, group_into_sides
from overlapscope.trace.collective_log import REACHED, UNREACHED, Signature
from tests.ordered import all_reduce, bucket

MS = 1_000_000


def entry(signature: Signature, *, step: int = 3, line: int = 42, at_ms: float = 0, took_ms: float | None = 2) -> Entry:
    announced_ns = round(1_000 * MS + at_ms * MS)
    return Entry(
        number=7,
        signature=signature,
        step=step,
        call_site=CallSite(file="train.py", line=line, function="main"),
        announced_ns=announced_ns,
        launched_ns=None if took_ms is None else announced_ns,
        completed_ns=None if took_ms is None else announced_ns + round(took_ms * MS),
    )


def values_of(entries: dict[int, Entry | None], offsets_ns: dict[int, float] | None = None) -> dict[str, tuple]:
    offsets_ns = dict.fromkeys(entries, 0.0) if offsets_ns is None else offsets_ns
    return {trait.label: trait.values for trait in compare_sides(group_into_sides(entries), offsets_ns)}


def differing(entries: dict[int, Entry | None]) -> set[str]:
    return {trait.label for trait in compare_sides(group_into_sides(entries), {}) if trait.differs}


def test_the_larger_side_comes_first_and_who_never_got_there_last():
    sides = group_into_sides({0: None, 1: entry(all_reduce()), 2: entry(bucket(0)), 3: entry(bucket(0)), 4: None})
    assert [side.ranks for side in sides] == [(2, 3), (1,), (0, 4)]
    assert sides[-1].entry is None


def test_the_same_collective_from_another_line_is_another_side():
    entries = {0: entry(all_reduce(), line=10), 1: entry(all_reduce(), line=20)}
    assert [side.ranks for side in group_into_sides(entries)] == [(0,), (1,)]
    assert differing(entries) == {"call site"}


def test_of_what_does_not_end_a_rank_whose_device_has_not_come_to_it_is_another_side():
    inside, before, unknown = (
        replace(entry(bucket(0), took_ms=None), flags=flags) for flags in (REACHED, UNREACHED, 0)
    )
    entries = {0: inside, 1: before, 2: inside}
    assert [side.ranks for side in group_into_sides(entries)] == [(0, 2), (1,)]
    assert (differing(entries), values_of(entries)["note"]) == ({"note"}, ("device in it", "device not there"))
    over = replace(before, completed_ns=before.announced_ns + 1)
    assert [side.ranks for side in group_into_sides({0: over, 1: replace(over, flags=0), 2: unknown})] == [(0, 1, 2)]


def test_what_differs_is_told_from_what_does_not():
    entries = {0: entry(all_reduce("loss", 1)), 1: entry(all_reduce("loss", 4096))}
    assert differing(entries) == {"elements", "shapes"}
    assert values_of(entries)["operation"] == ("all_reduce (sum)", "all_reduce (sum)")


def test_the_call_site_and_what_differs_come_first():
    entries = {0: entry(all_reduce("loss", 1)), 1: entry(all_reduce("loss", 4096))}
    assert [trait.label for trait in compare_sides(group_into_sides(entries), {})][:3] == [
        "call site",
        "elements",
        "shapes",
    ]


def test_a_number_that_nobody_has_leaves_nothing_to_compare():
    assert compare_sides(group_into_sides({0: None, 1: None}), {0: 0.0}) == ()


def test_a_rank_that_never_got_there_differs_in_nothing():
    assert differing({0: entry(bucket(1)), 1: None}) == set()


def test_times_count_from_the_first_announcement_on_one_clock():
    entries = {0: entry(bucket(0), at_ms=5), 1: entry(bucket(0), at_ms=2), 2: entry(all_reduce(), at_ms=0)}
    values = values_of(entries, {0: 0.0, 1: 0.0, 2: 4.0 * MS})
    assert values["announced"] == ("+0 to +3.00 ms", "+2.00 ms")
    assert values["completed"] == ("+2.00 ms to +5.00 ms", "+4.00 ms")


def test_what_never_happened_is_said():
    values = values_of({0: entry(bucket(0)), 1: entry(bucket(0), took_ms=None), 2: entry(all_reduce(), took_ms=None)})
    assert values["launched"] == ("+0, 1 never", "never")


def test_times_of_ranks_whose_clocks_are_not_known_are_left_out():
    entries = {0: entry(bucket(0)), 1: entry(all_reduce())}
    assert values_of(entries, {0: 0.0})["announced"] == ("+0", "clock unknown")
    assert "announced" not in values_of(entries, {})
