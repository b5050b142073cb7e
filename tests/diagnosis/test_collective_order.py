"""Where ranks differ first, against a slow oracle that looks at every entry and by example; how entries are decoded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlapscope.diagnosis.collective_order import (
    UNKNOWN_SIGNATURE,
    WINDOW_MARGIN,
    RecordedOrder,
    compare_orders,
    decode_entries,
)
from overlapscope.diagnosis.evidence import CallSite, Entry, GroupOrder
from overlapscope.trace.collective_log import (
    ENTRY_BYTES,
    FAILED,
    HEADER_BYTES,
    SHADOW,
    UNEVEN_INPUTS,
    UNKNOWN,
    UNKNOWN_PHASE,
    CollectiveLogHeader,
    CollectiveLogWriter,
    Signature,
)
from overlapscope.trace.collective_log_reader import open_collective_logs
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.schema import Phase
from tests.ordered import Collective, all_reduce, bucket, steps, write_order

Order = list[Collective]


def order_in(folder: Path) -> GroupOrder:
    (order,) = compare_orders(RecordedOrder(open_collective_logs(find_rank_folders(folder))))
    return order


def first_difference(folder: Path, orders: dict[int, Order]) -> tuple[int | None, str | None]:
    order = order_in(write_order(folder, orders))
    return order.first_divergence, order.divergence


def with_inserted(order: Order, place: int, one: Collective) -> Order:
    return [*order[:place], one, *order[place:]]


def test_equal_orders_have_no_divergence_and_show_where_each_rank_stands(tmp_path: Path) -> None:
    order = order_in(write_order(tmp_path, {0: steps(10), 1: steps(10)[:-2]}))
    assert (order.first_divergence, order.divergence, order.latest) == (None, None, {0: 30, 1: 28})
    assert [entry.number for entry in order.windows[0]][-3:] == [28, 29, 30]
    assert order.windows[1][-1].signature == bucket(0)


def test_an_extra_collective_is_found_where_it_was_launched(tmp_path: Path) -> None:
    extra = Collective(signature=all_reduce(), step=3, line=88)
    order = order_in(write_order(tmp_path, {0: steps(10), 1: with_inserted(steps(10), 10, extra), 2: steps(10)}))
    assert (order.first_divergence, order.divergence) == (11, "signature")
    numbers = [entry.number for entry in order.windows[1]]
    assert numbers == list(range(11 - WINDOW_MARGIN, 11 + WINDOW_MARGIN + 1))
    (entry,) = [entry for entry in order.windows[1] if entry.number == 11]
    assert (entry.signature, str(entry.call_site)) == (all_reduce(), "train.py:88 (main)")


def test_a_rank_that_has_left_out_a_step_is_a_step_ahead(tmp_path: Path) -> None:
    late = steps(5) + steps(5, first=6)
    assert first_difference(tmp_path, {0: steps(10), 1: late}) == (16, "step")


def test_steps_may_differ_inside_join(tmp_path: Path) -> None:
    late = [replace(one, flags=UNEVEN_INPUTS | SHADOW) for one in steps(5) + steps(5, first=6)]
    usual = [replace(one, flags=UNEVEN_INPUTS) for one in steps(10)]
    assert first_difference(tmp_path, {0: usual, 1: late}) == (None, None)


def shifted_batches(order: Order, by: int, since: int) -> Order:
    return [replace(one, batch=(one.batch or 0) + (by if place >= since else 0)) for place, one in enumerate(order)]


def test_a_skipped_batch_is_where_the_difference_of_batches_changes(tmp_path: Path) -> None:
    assert first_difference(tmp_path, {0: steps(9), 1: shifted_batches(steps(9), 1, 12)}) == (13, "batch")


def test_parameters_may_be_gathered_in_other_batches_as_nothing_is_averaged(tmp_path: Path) -> None:
    gathers = [replace(one, signature=replace(one.signature, op="all_gather", reduce_op="")) for one in steps(9)]
    assert first_difference(tmp_path, {0: gathers, 1: shifted_batches(gathers, 1, 12)}) == (None, None)


def test_batches_may_be_numbered_differently_on_each_rank(tmp_path: Path) -> None:
    assert first_difference(tmp_path, {0: steps(9), 1: shifted_batches(steps(9), 100, 0)}) == (None, None)


def test_other_data_for_a_while_is_no_skipped_batch(tmp_path: Path) -> None:
    order = shifted_batches(shifted_batches(steps(9), 50, 12), -50, 18)
    assert first_difference(tmp_path, {0: steps(9), 1: order}) == (None, None)


def test_epochs_of_other_lengths_are_no_skipped_batch(tmp_path: Path) -> None:
    def with_epochs_of(batches: int) -> Order:
        return [replace(one, batch=1 + one.step % batches) for one in steps(9)]

    assert first_difference(tmp_path, {0: with_epochs_of(4), 1: with_epochs_of(3)}) == (None, None)


def test_batches_that_nobody_knows_say_nothing(tmp_path: Path) -> None:
    unknown = [replace(one, batch=None) for one in steps(9)]
    assert first_difference(tmp_path, {0: steps(9), 1: unknown}) == (None, None)
    holes = [replace(one, batch=None) if one.step % 2 else one for one in shifted_batches(steps(9), 1, 12)]
    assert first_difference(tmp_path / "holes", {0: steps(9), 1: holes}) == (13, "batch")


def test_a_collective_left_out_of_a_group_without_buckets_is_told_by_the_steps(tmp_path: Path) -> None:
    usual = [Collective(signature=all_reduce("loss"), step=step) for step in range(9)]
    assert first_difference(tmp_path, {0: usual, 1: usual[:4] + usual[5:]}) == (5, "step")


def test_one_collective_at_the_border_of_two_steps_is_no_sign(tmp_path: Path) -> None:
    usual = [Collective(signature=all_reduce("loss"), step=step) for step in range(9)]
    assert first_difference(tmp_path, {0: usual, 1: [*usual[:-1], replace(usual[-1], step=9)]}) == (None, None)


def user(*names: str) -> Order:
    return [Collective(signature=all_reduce(name)) for name in names]


def test_names_that_are_swapped_are_a_divergence(tmp_path: Path) -> None:
    assert first_difference(tmp_path, {0: user("x", "a", "b", "x"), 1: user("x", "b", "a", "x")}) == (2, "names")


def test_other_names_for_the_same_tensor_are_none(tmp_path: Path) -> None:
    assert first_difference(tmp_path, {0: user(*"xabx" * 5), 1: user(*"xcdx" * 5)}) == (None, None)


def test_a_swap_is_found_behind_names_that_always_differ(tmp_path: Path) -> None:
    assert first_difference(tmp_path, {0: user(*"xpab" * 3), 1: user(*"xqab" * 2, *"xqba")}) == (11, "names")


def test_the_rank_whose_log_is_lost_is_a_member_all_the_same(tmp_path: Path) -> None:
    order = order_in(write_order(tmp_path, {0: steps(4), 2: steps(4)}, members=(0, 1, 2)))
    assert (order.ranks, sorted(order.latest), order.first_divergence) == ((0, 1, 2), [0, 2], None)


def test_groups_are_the_same_by_name_and_members_and_not_by_the_number_of_their_file(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(2)}, group="a", members=(0, 1), number=0)
    write_order(tmp_path, {0: user("x")}, group="b", members=(0, 1), number=1)
    write_order(tmp_path, {1: user("x")}, group="b", members=(0, 1), number=0)
    write_order(tmp_path, {1: steps(2)}, group="a", members=(0, 1), number=1)
    orders = compare_orders(RecordedOrder(open_collective_logs(find_rank_folders(tmp_path))))
    assert [(one.name, one.latest, one.first_divergence) for one in orders] == [
        ("a", {0: 6, 1: 6}, None),
        ("b", {0: 1, 1: 1}, None),
    ]


def test_a_difference_that_the_ring_has_dropped_is_said_to_lie_before(tmp_path: Path) -> None:
    ring = HEADER_BYTES + 32 * ENTRY_BYTES
    late = steps(5) + steps(45, first=6)
    order = order_in(write_order(tmp_path, {0: steps(50), 1: late}, limit_bytes=ring))
    assert (order.first_divergence, order.divergence, order.predates_log) == (150 - 31, "step", True)


def test_a_difference_may_be_older_where_ranks_are_steps_apart_in_the_oldest_entry_that_is_left(tmp_path: Path) -> None:
    def averaged(steps: Iterable[int]) -> Order:
        return [Collective(signature=all_reduce("gradient", 100), step=step) for step in steps]

    ring = HEADER_BYTES + 32 * ENTRY_BYTES
    usual = [*averaged(range(50)), *averaged([50, 51])]
    left_out = [*averaged([*range(10), *range(11, 51)]), Collective(signature=all_reduce(), step=50), *averaged([51])]
    order = order_in(write_order(tmp_path / "apart", {0: usual, 1: left_out}, limit_bytes=ring))
    assert (order.first_divergence, order.divergence, order.predates_log) == (51, "signature", True)
    added = [*averaged(range(50)), Collective(signature=all_reduce(), step=50), *averaged([51])]
    order = order_in(write_order(tmp_path / "level", {0: usual, 1: added}, limit_bytes=ring))
    assert (order.first_divergence, order.divergence, order.predates_log) == (51, "signature", False)
    order = order_in(write_order(tmp_path / "whole", {0: usual, 1: left_out}))
    assert (order.first_divergence, order.divergence, order.predates_log) == (11, "step", False)


# What the oracle compares: every entry that is left, pair by pair with the longest rank, in plain Python.

SIGNATURES: list[Signature] = [bucket(0), bucket(1), *(all_reduce(name) for name in "abc"), all_reduce("a", 2)]


def oracle(orders: dict[int, Order], capacity: int) -> tuple[int, str | None] | None:
    reference = max(orders, key=lambda rank: (len(orders[rank]), -rank))
    found = [one for rank in orders if (one := oracle_of_pair(orders[reference], orders[rank], capacity))]
    order = ["signature", "step", "batch", "names", None]
    return min(found, key=lambda one: (one[0], order.index(one[1])), default=None)


def oracle_of_pair(a: Order, b: Order, capacity: int) -> tuple[int, str | None] | None:
    first, last = max(len(a), len(b)) - capacity, min(len(a), len(b))
    first = max(first, 0)
    if first >= last:
        return None
    different = [kind for n in range(last) if (kind := difference(a[n], b[n]))]
    places = [n for n in range(last) if difference(a[n], b[n])]
    if places and places[0] < first:
        left = [n for n in places if n >= first]
        return first + 1, difference(a[left[0]], b[left[0]]) if left else None
    found: list[tuple[int, str | None]] = [(places[0] + 1, different[0])] if places else []
    end = places[0] if places else last
    has_buckets = any(one.signature.role == "bucket" for one in a[first:end])
    known = [
        n
        for n in range(first, end)
        if not has_buckets or (a[n].signature.role == "bucket" and a[n].batch is not None and b[n].batch is not None)
    ]
    offsets = [(b[n].batch or 0) - (a[n].batch or 0) if has_buckets else b[n].step - a[n].step for n in known]
    if offsets and offsets[-1] != offsets[0]:
        changed = max(place for place, offset in enumerate(offsets) if offset == offsets[0]) + 1
        if has_buckets or len(offsets) - changed >= 3:
            found.append((known[changed] + 1, "batch" if has_buckets else "step"))
    for n in range(first, end):
        if is_swapped(a, b, n, first, end) and is_swapped(b, a, n, first, end):
            found.append((n + 1, "names"))
            break
    order = ["signature", "step", "batch", "names"]
    return min(found, key=lambda one: (one[0], order.index(str(one[1]))), default=None)


def difference(a: Collective, b: Collective) -> str | None:
    if a.signature.hash != b.signature.hash:
        return "signature"
    return "step" if a.signature.role == "bucket" and a.step != b.step else None


def is_swapped(mine: Order, theirs: Order, n: int, first: int, end: int) -> bool:
    name = mine[n].signature.names
    if theirs[n].signature.names == name:
        return False
    return any(
        theirs[m].signature.names == name
        and mine[m].signature.names != name
        and mine[m].signature.hash == mine[n].signature.hash
        for m in range(max(first, n - 6), min(end, n + 7))
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, Order], int]:
    """Orders of two or three ranks that were the same, until something was done to some of them."""
    kinds = draw(st.lists(st.sampled_from(range(len(SIGNATURES))), min_size=1, max_size=60))
    usual = [Collective(signature=SIGNATURES[k], step=n // 4, batch=n // 4) for n, k in enumerate(kinds)]
    orders = {rank: list(usual) for rank in range(draw(st.integers(2, 3)))}
    for _ in range(draw(st.integers(0, 3))):
        order = orders[draw(st.sampled_from(sorted(orders)))]
        place = draw(st.integers(0, max(0, len(order) - 1)))
        match draw(st.sampled_from(["insert", "drop", "swap", "change", "step", "batch", "unknown", "end"])):
            case "insert":
                order.insert(
                    place, Collective(signature=draw(st.sampled_from(SIGNATURES)), step=place // 4, batch=None)
                )
            case "drop" if order:
                del order[place]
            case "swap" if place + 1 < len(order):
                order[place], order[place + 1] = order[place + 1], order[place]
            case "change" if order:
                order[place] = replace(order[place], signature=draw(st.sampled_from(SIGNATURES)))
            case "step":
                order[place:] = [replace(one, step=one.step + 1) for one in order[place:]]
            case "batch":
                order[place:] = [
                    one if one.batch is None else replace(one, batch=one.batch + 1) for one in order[place:]
                ]
            case "unknown" if order:
                order[place] = replace(order[place], batch=None)
            case "end":
                del order[place:]
    missing = draw(st.sampled_from([None, None, *orders]))
    if missing is not None:
        del orders[missing]
    return {rank: order for rank, order in orders.items() if order}, draw(st.sampled_from([16, 1000]))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_the_first_difference_is_what_looking_at_every_entry_finds(job: tuple[dict[int, Order], int]) -> None:
    orders, capacity = job
    if not orders:
        return
    with tempfile.TemporaryDirectory() as folder:
        limit_bytes = HEADER_BYTES + capacity * ENTRY_BYTES
        order = order_in(write_order(Path(folder), orders, members=(0, 1, 2), limit_bytes=limit_bytes))
    found = None if order.first_divergence is None else (order.first_divergence, order.divergence)
    assert found == oracle(orders, capacity)


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_a_group_of_which_one_rank_alone_has_left_entries_has_no_difference(tmp_path: Path, kept: int) -> None:
    assert order_in(write_order(tmp_path, {1: steps(3)[: kept + 1]}, members=(0, 1))).first_divergence is None


SITE = CallSite(file="train.py", line=42, function="main")


def decoded(path: Path, **where: int) -> Entry:
    """One entry, announced and read back while its log is open."""
    log = CollectiveLogWriter(path / "log", CollectiveLogHeader(name="0", ranks=(0,), rank=0))
    log.announce(1, bucket(0), now_ns=5, call_site=1, **({"step": 3} | where))
    (entry,) = decode_entries(log.read(1, 1).tolist(), {1: bucket(0)}, {1: SITE})
    log.close()
    return entry


def test_an_entry_has_its_names_for_numbers(tmp_path: Path) -> None:
    entry = decoded(tmp_path, batch=7, phase=Phase.BACKWARD, flags=FAILED)
    assert entry == Entry(
        number=1,
        signature=bucket(0),
        step=3,
        batch=7,
        phase="backward",
        call_site=SITE,
        flags=FAILED,
        announced_ns=5,
        launched_ns=None,
        completed_ns=None,
    )


def test_what_nobody_knows_is_none(tmp_path: Path) -> None:
    entry = decoded(tmp_path, batch=UNKNOWN, phase=UNKNOWN_PHASE)
    assert (entry.batch, entry.phase) == (None, None)


def test_lines_that_are_lost_are_unknown(tmp_path: Path) -> None:
    log = CollectiveLogWriter(tmp_path / "log", CollectiveLogHeader(name="0", ranks=(0,), rank=0))
    log.announce(9, bucket(0), now_ns=5, step=0, call_site=9, phase=0xEE)
    (entry,) = decode_entries(log.read(1, 1).tolist(), {}, {})
    assert (entry.signature, entry.call_site, entry.phase) == (UNKNOWN_SIGNATURE, None, None)


@pytest.mark.parametrize("flags", [UNEVEN_INPUTS, UNEVEN_INPUTS | SHADOW])
def test_inside_join_the_batch_says_nothing(tmp_path: Path, flags: int) -> None:
    assert decoded(tmp_path, batch=7, flags=flags).batch is None


@pytest.mark.parametrize("flags", [0, UNEVEN_INPUTS, UNEVEN_INPUTS | SHADOW, FAILED])
def test_a_process_and_its_files_give_the_same(tmp_path: Path, flags: int) -> None:
    live = decoded(tmp_path, batch=7, phase=Phase.FORWARD, flags=flags)
    one = Collective(
        signature=bucket(0), step=3, batch=7, phase=Phase.FORWARD, flags=flags, now_ns=5, state="announced"
    )
    write_order(tmp_path / "run", {0: [one]})
    source = RecordedOrder(open_collective_logs(find_rank_folders(tmp_path / "run")))
    assert source.entries(source.groups()[0], 0, 1, 1) == (live,)
