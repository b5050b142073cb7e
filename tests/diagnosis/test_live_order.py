"""What ranks report of their collectives says the same as their files do."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instrumented_ddp.watchdog.investigation import LiveCollectiveOrder
from overlapscope.diagnosis.collective_order import WINDOW_MARGIN, RecordedOrder, compare_orders
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.order_difference import EntryDifference
from overlapscope.diagnosis.rank_snapshot import RankSnapshot, make_snapshot
from overlapscope.trace.collective_log import REACHED, UNREACHED
from overlapscope.trace.collective_log_reader import open_collective_logs
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.json_files import from_json, to_json
from tests.diagnosis.jobs import job, rank
from tests.ordered import Collective, all_reduce, bucket, steps, write_order


def recorded(folder: Path) -> RecordedOrder:
    return RecordedOrder(open_collective_logs(find_rank_folders(folder)))


def report_all(source: RecordedOrder, differences: Mapping[str, int] | None = None) -> dict[int, RankSnapshot]:
    """The cards of all ranks, as they arrive."""
    cards = {
        number: make_snapshot(
            rank(number),
            [files[number] for files in source.logs.groups.values() if number in files],
            signature_of=source.logs.signatures(number).get,
            call_site_of=source.call_sites(number).get,
            differences=differences or {},
        )
        for number in source.logs.folders
    }
    return {number: from_json(RankSnapshot, to_json(card)) for number, card in cards.items()}


KINDS = [bucket(0), bucket(1), all_reduce("a"), all_reduce("b"), all_reduce("a", 2)]


@st.composite
def few_collectives(draw: st.DrawFn) -> dict[int, Sequence[Collective]]:
    """Of two or three ranks, the same but for one that is another, left out, of another step or of another batch."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=12))
    usual = [Collective(signature=kind, step=n // 3, batch=n // 3) for n, kind in enumerate(kinds)]
    orders: dict[int, list[Collective]] = {number: list(usual) for number in range(draw(st.integers(2, 3)))}
    order, place = orders[draw(st.sampled_from(sorted(orders)))], draw(st.integers(0, len(usual) - 1))
    match draw(st.sampled_from(["nothing", "other", "left out", "step", "batch"])):
        case "other":
            order[place] = Collective(signature=draw(st.sampled_from(KINDS)), step=place // 3, batch=place // 3)
        case "left out":
            del order[place]
        case "step":
            order[place:] = [Collective(signature=o.signature, step=o.step + 1, batch=o.batch) for o in order[place:]]
        case "batch":
            order[place:] = [
                Collective(signature=o.signature, step=o.step, batch=(o.batch or 0) + 1) for o in order[place:]
            ]
    return {number: tuple(order) for number, order in orders.items() if order}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(few_collectives())
def test_of_a_few_collectives_all_are_reported(orders: dict[int, Sequence[Collective]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = recorded(write_order(Path(folder), orders, members=(0, 1, 2)))
        assert compare_orders(LiveCollectiveOrder(report_all(source), {})) == compare_orders(source)


def test_of_many_collectives_the_latest_are_reported_and_a_difference_in_them_is_found(tmp_path: Path) -> None:
    other = [*steps(30)[:-2], Collective(signature=all_reduce(), step=29), steps(30)[-1]]
    (order,) = compare_orders(
        LiveCollectiveOrder(report_all(recorded(write_order(tmp_path, {0: steps(30), 1: other}))), {})
    )
    assert (order.first_divergence, order.divergence, order.predates_log) == (89, "signature", False)
    assert order.windows[1][-1].signature == bucket(2)


def test_what_lies_further_back_is_reported_around_a_known_difference(tmp_path: Path) -> None:
    late = steps(5) + steps(25, first=6)
    source = recorded(write_order(tmp_path, {0: steps(30), 1: late}))
    known = {"default": EntryDifference(number=16, divergence="step")}
    (order,) = compare_orders(LiveCollectiveOrder(report_all(source, {"default": 16}), {}), known)
    assert (order,) == compare_orders(source)
    assert [entry.number for entry in order.windows[0]] == list(range(16 - WINDOW_MARGIN, 16 + WINDOW_MARGIN + 1))


@pytest.mark.parametrize("has_card", [True, False])
def test_a_rank_that_has_said_no_more_than_how_far_it_is_counts_as_far(tmp_path: Path, *, has_card: bool) -> None:
    source = recorded(write_order(tmp_path, {0: steps(4), 1: steps(3)}))
    cards = {number: card for number, card in report_all(source).items() if number == 0 or has_card}
    (order,) = compare_orders(LiveCollectiveOrder(cards, {1: {"default": 11}}))
    assert (order.latest, order.first_divergence) == ({0: 12, 1: 11}, None)
    assert len(order.windows[1]) == (5 if has_card else 0)


def test_the_device_that_others_wait_for_is_named_however_far_hosts_have_gone_on(tmp_path: Path) -> None:
    """What devices wait in is then far behind what is reported otherwise."""
    behind = [replace(one, state="launched", flags=UNREACHED) for one in steps(100, first=10)]
    inside = [replace(behind[0], flags=UNREACHED | REACHED), *behind[1:]]
    source = recorded(write_order(tmp_path, {0: steps(10) + inside, 1: steps(10) + behind, 2: steps(10) + inside}))
    for orders in (compare_orders(source), compare_orders(LiveCollectiveOrder(report_all(source), {}))):
        assert {number: entry.number for number, entry in orders[0].oldest_incomplete.items()} == {0: 31, 1: 31, 2: 31}
        verdict = judge(job(*(rank(number) for number in range(3)), groups=orders))
        assert (verdict.kind, verdict.named, verdict.number, verdict.step) == ("stuck", (1,), 31, 10)
