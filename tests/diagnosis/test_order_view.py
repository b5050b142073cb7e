"""How the order of collectives is shown: lanes, what ranks have at one number side by side, and categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from overlapscope.diagnosis.collective_order import RecordedOrder, compare_order
from overlapscope.diagnosis.evidence import CallSite, Entry
from overlapscope.diagnosis.order_view import (
    BUCKET_SLOTS,
    CATEGORIES,
    Cell,
    OrderLanes,
    collective_category,
    compare_sides,
    group_into_sides,
)
from overlapscope.trace.collective_log import (
    ENTRY_BYTES,
    FAILED,
    HEADER_BYTES,
    REACHED,
    UNREACHED,
    ProcessGroup,
    Signature,
)
from overlapscope.trace.collective_log_reader import open_collective_logs
from overlapscope.trace.folders import find_rank_folders
from tests.ordered import Collective, all_reduce, bucket, steps, write_order

Orders = Mapping[int, Sequence[Collective]]
EXTRA = Collective(signature=all_reduce("extra", 4096), step=2, batch=2)


@pytest.fixture
def lanes_of(tmp_path: Path):
    """Makes the lanes of a group from what each rank has launched in it."""

    def made(orders: Orders, blamed: Sequence[int] = (), source: type = RecordedOrder, **options) -> OrderLanes:
        write_order(tmp_path / "traces", orders, **options)
        recorded = RecordedOrder(open_collective_logs(find_rank_folders(tmp_path / "traces")))
        (group,) = recorded.groups()
        order = compare_order(recorded, group)
        return OrderLanes(
            recorded if source is RecordedOrder else source(recorded),
            group,
            first_divergence=order.first_divergence,
            divergence=order.divergence,
            blamed=blamed,
        )

    return made


class WithoutHashes:
    """A source like a dump of another tool, whose entries are all there is; counts how many were read."""

    def __init__(self, recorded: RecordedOrder) -> None:
        self._recorded = recorded
        self.groups, self.recorded = recorded.groups, recorded.recorded
        self.oldest, self.latest = recorded.oldest, recorded.latest
        self.read = 0

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        found = self._recorded.entries(group, rank, first, last)
        self.read += len(found)
        return found


def differing(lanes: OrderLanes, first: int = 1, last: int = 100) -> dict[tuple[int, int], str]:
    """The cells that differ, by rank and number."""
    shown = lanes.lanes_of(lanes.group.ranks)
    cells = lanes.window(shown, first, last).cells
    return {(shown[cell.lane].ranks[0], cell.number): cell.difference for cell in cells if cell.difference}


def with_extra(count: int = 4) -> list[Collective]:
    """Steps in which something was launched before the third that nobody else has launched."""
    usual = steps(count)
    return [*usual[:6], EXTRA, *usual[6:]]


def test_ranks_that_did_the_same_differ_nowhere_and_share_a_lane(lanes_of):
    lanes = lanes_of(dict.fromkeys(range(3), steps(4)))
    assert differing(lanes) == {}
    assert [lane.ranks for lane in lanes.folds] == [(0, 1, 2)]
    assert lanes.first_difference is None
    assert lanes.next_difference(1, 1) is None


def test_a_rank_that_launched_one_more_differs_from_there_on(lanes_of):
    lanes = lanes_of({0: steps(4), 1: with_extra(), 2: steps(4)})
    marked = differing(lanes)
    assert {rank for rank, _ in marked} == {1}
    assert min(number for _, number in marked) == 7
    assert set(marked.values()) == {"signature"}


def test_with_two_ranks_no_side_is_larger_and_both_are_marked(lanes_of):
    lanes = lanes_of({0: steps(3), 1: with_extra(3)})
    assert {rank for rank, number in differing(lanes) if number == 7} == {0, 1}


def test_most_ranks_are_those_of_all_not_of_those_that_are_shown(lanes_of):
    lanes = lanes_of({rank: with_extra() if rank == 3 else steps(4) for rank in range(6)})
    shown = lanes.lanes_of([3])
    assert [cell.difference for cell in lanes.window(shown, 7, 7).cells] == ["signature"]


def test_buckets_of_another_step_differ_by_their_step_alone(lanes_of):
    behind = [*steps(2), *(replace(one, step=one.step - 1) for one in steps(2, first=2))]
    lanes = lanes_of({0: steps(4), 1: behind, 2: steps(4)})
    assert differing(lanes) == dict.fromkeys([(1, number) for number in range(7, 13)], "step")


def test_a_batch_that_was_skipped_marks_the_buckets_after_it(lanes_of):
    skipped = [*steps(2), *(replace(one, batch=one.step + 1) for one in steps(2, first=2))]
    lanes = lanes_of({0: steps(4), 1: skipped, 2: steps(4)})
    assert differing(lanes) == dict.fromkeys([(1, number) for number in range(7, 13)], "batch")


def test_batches_that_ranks_count_from_elsewhere_are_no_difference(lanes_of):
    elsewhere = [replace(one, batch=one.step + 100) for one in steps(4)]
    assert differing(lanes_of({0: steps(4), 1: elsewhere})) == {}


def test_swapped_tensors_differ_by_name_and_other_names_alone_do_not(lanes_of, tmp_path):
    one, two = Collective(signature=all_reduce("loss")), Collective(signature=all_reduce("accuracy"))
    lanes = lanes_of({0: [one, two], 1: [two, one], 2: [one, two]})
    assert differing(lanes) == {(1, 1): "names", (1, 2): "names"}


def test_names_that_only_one_rank_uses_are_no_difference(lanes_of):
    one, other = Collective(signature=all_reduce("a")), Collective(signature=all_reduce("b"))
    assert differing(lanes_of({0: [one], 1: [other]})) == {}


def test_where_a_rank_never_got_its_cells_are_empty(lanes_of):
    lanes = lanes_of({0: steps(3), 1: steps(2)})
    shown = lanes.lanes_of([0, 1])
    empty = [cell for cell in lanes.window(shown, 1, 100).cells if cell.entry is None]
    assert empty == [Cell(lane=1, number=number, entry=None) for number in (7, 8, 9)]
    assert lanes.first_difference == 7


def test_a_member_that_left_no_log_has_an_empty_lane(lanes_of):
    lanes = lanes_of({0: steps(1), 2: steps(1)}, members=(0, 1, 2))
    assert [lane.ranks for lane in lanes.folds] == [(0, 2), (1,)]
    assert [lane.latest for lane in lanes.folds] == [3, 0]


def test_a_blamed_rank_never_shares_a_lane_and_is_always_shown(lanes_of):
    lanes = lanes_of(dict.fromkeys(range(5), steps(2)), blamed=[3])
    assert [lane.ranks for lane in lanes.folds] == [(0, 1, 2, 4), (3,)]
    assert [lane.ranks for lane in lanes.lanes_of([0])] == [(0,), (3,)]
    assert lanes.lanes_of([0])[1].is_blamed


def test_a_rank_whose_newest_collective_has_not_come_as_far_has_its_own_lane(lanes_of):
    waiting = [*steps(2)[:-1], replace(steps(2)[-1], state="announced")]
    lanes = lanes_of({0: steps(2), 1: waiting, 2: steps(2)})
    assert [lane.ranks for lane in lanes.folds] == [(0, 2), (1,)]


def test_many_ranks_that_were_ended_somewhere_share_lanes_by_what_they_launched(lanes_of):
    def ended(rank: int) -> list[Collective]:
        states = ["completed" if rank >> place & 1 else "launched" for place in range(6)]
        return [*steps(2), *(replace(one, state=state) for one, state in zip(steps(2, first=2), states, strict=True))]

    lanes = lanes_of({rank: ended(rank) for rank in range(20)})
    assert [lane.ranks for lane in lanes.folds] == [tuple(range(20))]


@pytest.mark.parametrize("source", [RecordedOrder, WithoutHashes])
def test_ranks_share_lanes_with_running_hashes_and_without(lanes_of, source):
    lanes = lanes_of({rank: with_extra() if rank in (1, 4) else steps(4) for rank in range(6)}, source=source)
    assert [lane.ranks for lane in lanes.folds] == [(0, 2, 3, 5), (1, 4)]


def test_the_next_difference_is_found_in_both_directions(lanes_of):
    other = [*steps(4)]
    other[4] = replace(other[4], signature=bucket(1, plan_hash="other"))
    other[9] = replace(other[9], signature=bucket(0, plan_hash="other"))
    lanes = lanes_of({0: steps(4), 1: other, 2: steps(4)})
    assert [lanes.next_difference(number, 1) for number in (1, 5, 10)] == [5, 10, None]
    assert [lanes.next_difference(number, -1) for number in (12, 10, 5)] == [10, 5, None]


def test_the_next_difference_may_be_far_away(lanes_of):
    last = [*steps(700)]
    last[-1] = replace(last[-1], signature=bucket(2, plan_hash="other"))
    last[4] = replace(last[4], signature=bucket(1, plan_hash="other"))
    lanes = lanes_of({0: steps(700), 1: last, 2: steps(700)})
    assert lanes.next_difference(5, 1) == 2100
    assert lanes.next_difference(2100, -1) == 5


def test_steps_begin_where_the_number_of_the_step_changes(lanes_of):
    lanes = lanes_of({0: steps(4)})
    assert lanes.window(lanes.folds, 1, 12).steps == ((1, 0), (4, 1), (7, 2), (10, 3))
    assert lanes.window(lanes.folds, 4, 8).steps == ((4, 1), (7, 2))
    assert [lanes.start_of_step(step) for step in (0, 2, 3, 99)] == [1, 7, 10, 12]


def test_what_the_ring_has_overwritten_is_no_missing_cell(lanes_of):
    room = HEADER_BYTES + 20 * ENTRY_BYTES
    lanes = lanes_of(dict.fromkeys(range(2), steps(10)), limit_bytes=room)
    assert (lanes.oldest, lanes.latest) == (11, 30)
    window = lanes.window(lanes.lanes_of([0, 1]), 1, 30)
    assert {cell.number for cell in window.cells} == set(range(11, 31))
    assert all(cell.entry for cell in window.cells)


def test_only_what_is_looked_at_is_read(lanes_of):
    lanes = lanes_of(dict.fromkeys(range(2), steps(1000)), source=WithoutHashes)
    shown = lanes.folds
    before = lanes._source.read
    lanes.window(shown, 1500, 1520)
    assert lanes._source.read - before < 100


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


def differing_traits(entries: dict[int, Entry | None]) -> set[str]:
    return {trait.label for trait in compare_sides(group_into_sides(entries), {}) if trait.differs}


def test_the_larger_side_comes_first_and_who_never_got_there_last():
    sides = group_into_sides({0: None, 1: entry(all_reduce()), 2: entry(bucket(0)), 3: entry(bucket(0)), 4: None})
    assert [side.ranks for side in sides] == [(2, 3), (1,), (0, 4)]
    assert sides[-1].entry is None


def test_the_same_collective_from_another_line_is_another_side():
    entries = {0: entry(all_reduce(), line=10), 1: entry(all_reduce(), line=20)}
    assert [side.ranks for side in group_into_sides(entries)] == [(0,), (1,)]
    assert differing_traits(entries) == {"call site"}


def test_of_what_does_not_end_a_rank_whose_device_has_not_come_to_it_is_another_side():
    inside, before, unknown = (
        replace(entry(bucket(0), took_ms=None), flags=flags) for flags in (REACHED, UNREACHED, 0)
    )
    entries = {0: inside, 1: before, 2: inside}
    assert [side.ranks for side in group_into_sides(entries)] == [(0, 2), (1,)]
    assert (differing_traits(entries), values_of(entries)["note"]) == ({"note"}, ("device in it", "device not there"))
    over = replace(before, completed_ns=before.announced_ns + 1)
    assert [side.ranks for side in group_into_sides({0: over, 1: replace(over, flags=0), 2: unknown})] == [(0, 1, 2)]


def test_what_differs_is_told_from_what_does_not():
    entries = {0: entry(all_reduce("loss", 1)), 1: entry(all_reduce("loss", 4096))}
    assert differing_traits(entries) == {"elements", "shapes"}
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
    assert differing_traits({0: entry(bucket(1)), 1: None}) == set()


def test_times_count_from_the_first_announcement_on_one_clock():
    entries = {0: entry(bucket(0), at_ms=5), 1: entry(bucket(0), at_ms=2), 2: entry(all_reduce(), at_ms=0)}
    values = values_of(entries, {0: 0.0, 1: 0.0, 2: 4.0 * MS})
    assert values["announced"] == ("+0 to +3.00 ms", "+2.00 ms")
    assert values["completed"] == ("+2.00 ms to +5.00 ms", "+4.00 ms")


def test_what_never_happened_is_said():
    values = values_of({0: entry(bucket(0)), 1: entry(bucket(0), took_ms=None), 2: entry(all_reduce(), took_ms=None)})
    assert values["launched"] == ("+0, 1 never", "never")


def test_what_failed_ended_and_did_not_complete():
    values = values_of({0: replace(entry(bucket(0)), flags=FAILED), 1: None})
    assert values["ended"] == ("+2.00 ms", "")
    assert "completed" not in values


def test_times_of_ranks_whose_clocks_are_not_known_are_left_out():
    entries = {0: entry(bucket(0)), 1: entry(all_reduce())}
    assert values_of(entries, {0: 0.0})["announced"] == ("+0", "clock unknown")
    assert "announced" not in values_of(entries, {})


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
