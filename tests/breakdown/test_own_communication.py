"""The script's own collectives by group: how long they take, who is waited for, and what is not known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overlapscope.breakdown.own_communication import find_own_communication
from overlapscope.trace.collective_log import AWAITED, HEADER_BYTES, Signature
from overlapscope.trace.communication import OwnCommunication
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import CREATED_GROUPS_FILE, rank_folder
from tests.ordered import BEGIN_NS, US, Collective, all_reduce, bucket, write_order

STEPS = 10
PAIRS = ((0, 1), (2, 3))
LATE_RANK, LATE_US = 3, 30
TENSOR = Signature(
    op="all_reduce", reduce_op="sum", dtype="float32", shapes=((100,),), elements=100, bytes=400, names=("x",)
)


def order(rank: int, *, signature: Signature = TENSOR, per_step: int = 2, took_us: int = 50) -> list[Collective]:
    """Collectives of a rank; one rank is later than the others, and leaves with them."""
    late_us = LATE_US * (rank == LATE_RANK)
    return [
        Collective(
            signature=signature,
            step=number // per_step,
            now_ns=BEGIN_NS + (number * 100 + late_us) * US,
            took_us=took_us - late_us,
            flags=AWAITED,
        )
        for number in range(STEPS * per_step)
    ]


def write_pairs(folder: Path, **how: str) -> Path:
    for number, pair in enumerate(PAIRS):
        orders = {rank: order(rank) for rank in pair}
        write_order(folder, orders, group=str(number + 1), members=pair, number=1, world_size=4, **how)
    return folder


def find(folder: Path, steps: range = range(3, STEPS)) -> OwnCommunication:
    found = find_own_communication(read_trace(folder), np.array(steps, dtype=np.int64))
    assert found is not None
    return found


def test_groups_of_one_description_are_one_row_with_means_of_a_step(tmp_path: Path) -> None:
    write_pairs(tmp_path, description="tp")
    write_order(tmp_path, {rank: [all_reduce()] * STEPS for rank in range(4)}, description="default_pg")
    found = find(tmp_path, range(STEPS))
    assert found.has_other_groups
    pairs = next(one for one in found.groups if one.group == "tp")
    assert (pairs.groups, pairs.members, pairs.ranks, pairs.count, pairs.bytes) == (2, 2, 4, 2.0, 800.0)
    assert pairs.time_ns == pairs.exposed_ns == pytest.approx(2 * (50 + 50 + 50 + 20) / 4 * US)
    assert pairs.wait_ns == pytest.approx(2 * LATE_US / 4 * US), "one of four ranks waits"
    assert pairs.last_ranks == {"3": (2 * STEPS, 2 * STEPS)}


def test_only_some_steps_are_counted(tmp_path: Path) -> None:
    found = find(write_pairs(tmp_path, description="tp"), range(4, 6))
    assert found.steps == 2
    assert found.groups[0].count == 2.0
    assert found.groups[0].last_ranks == {"3": (4, 4)}


def test_without_steps_those_of_the_logs_are_counted(tmp_path: Path) -> None:
    found = find(write_pairs(tmp_path, description="tp"), range(0))
    assert found.steps == STEPS - 4, "without the warm-up and the last one"
    assert found.groups[0].count == 2.0


def test_a_group_without_description_is_named_by_the_line_that_made_it(tmp_path: Path) -> None:
    write_pairs(tmp_path, description="undefined")
    assert {one.group for one in find(tmp_path).groups} == {"group 1", "group 2"}
    for rank in range(4):
        site = {"file": "/home/me/train.py", "line": 12, "function": "main"}
        lines = [{"name": name, "ranks": [], "backend": "gloo", "call_site": site} for name in ("1", "2")]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (rank_folder(tmp_path, rank) / CREATED_GROUPS_FILE).write_text(text)
    (one,) = find(tmp_path).groups
    assert (one.group, one.groups) == ("train.py:12", 2)


def test_on_hosts_with_other_clocks_all_are_taken_to_leave_together(tmp_path: Path) -> None:
    trace = read_trace(write_pairs(tmp_path, description="tp"))
    other = replace(trace, ranks=trace.ranks.assign(boot=[f"host {rank}" for rank in trace.ranks["rank"]]))
    assert find_own_communication(other, np.arange(STEPS)) == find_own_communication(trace, np.arange(STEPS))


def test_what_no_line_awaits_says_nothing_of_it(tmp_path: Path) -> None:
    own = {rank: [replace(one, flags=0) for one in order(rank)] for rank in (0, 3)}
    write_order(tmp_path, own, group="tp", members=(0, 3))
    (one,) = find(tmp_path).groups
    assert one.exposed_ns is None
    assert one.wait_ns == pytest.approx(2 * LATE_US / 2 * US)


def test_those_of_join_are_apart_and_waited_for_as_well(tmp_path: Path) -> None:
    of_join = replace(TENSOR, role="join", names=())
    write_order(tmp_path, {rank: order(rank, signature=of_join) for rank in (0, 1)})
    (one,) = find(tmp_path).groups
    assert (one.op, one.is_join) == ("all_reduce", True)
    assert len(read_trace(tmp_path).user_collectives) == 2 * 2 * STEPS
    own = {rank: [*order(rank), *order(rank, signature=of_join)] for rank in (0, 1)}
    assert {one.is_join for one in find(write_order(tmp_path / "both", own)).groups} == {True, False}


def test_sends_and_receives_have_times_and_nobody_to_wait_for(tmp_path: Path) -> None:
    send = Signature(op="send", dtype="float32", elements=100, bytes=400, peer=1)
    write_order(
        tmp_path, {0: order(0, signature=send), 1: order(1, signature=replace(send, op="recv"))}, point_to_point=True
    )
    found = find(tmp_path)
    assert {one.op for one in found.groups} == {"send", "recv"}
    assert [one.time_ns for one in found.groups] == pytest.approx([2 * 50 * US] * 2)
    assert all(one.wait_ns is None and not one.last_ranks for one in found.groups)


def test_of_a_device_only_numbers_and_sizes_are_known(tmp_path: Path) -> None:
    own = {rank: [replace(one, flags=0) for one in order(rank)] for rank in (0, 3)}
    write_order(tmp_path, own, group="tp", backend="nccl", members=(0, 3))
    (one,) = find(tmp_path).groups
    assert (one.count, one.bytes) == (2.0, 800.0)
    assert one.time_ns is one.exposed_ns is one.wait_ns is None
    assert not one.last_ranks


def test_without_the_log_of_a_member_nobody_is_said_to_be_last(tmp_path: Path) -> None:
    write_order(tmp_path, {0: order(0), 3: order(3)}, group="tp", members=(0, 1, 3))
    (one,) = find(tmp_path).groups
    assert one.wait_ns is None
    assert not one.last_ranks


def test_what_a_ring_has_overwritten_makes_no_step_shorter(tmp_path: Path) -> None:
    write_order(tmp_path, {0: order(0), 3: order(3)}, group="tp", limit_bytes=HEADER_BYTES + 17 * 64)
    (one,) = find(tmp_path, range(STEPS)).groups
    assert one.count == 2.0
    assert one.wait_ns == pytest.approx(2 * LATE_US / 2 * US)


def test_a_job_that_only_reduces_buckets_has_none_of_its_own(tmp_path: Path) -> None:
    write_order(tmp_path, {rank: order(rank, signature=bucket(0)) for rank in range(2)})
    assert find_own_communication(read_trace(tmp_path), np.arange(STEPS)) is None
