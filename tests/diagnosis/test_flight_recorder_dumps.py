"""The order of collectives in dumps: numbers, groups, signatures and how far each has come."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapscope.diagnosis.collective_order import OrderSource
from overlapscope.diagnosis.evidence import Entry
from overlapscope.diagnosis.flight_recorder import FlightRecorderDumps
from overlapscope.trace.collective_log import FAILED, REACHED, UNREACHED, ProcessGroup
from tests.nccl_dumps import NcclRank

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder"
WORLD = {"0": [0, 1]}


def read(folder: Path) -> FlightRecorderDumps:
    return FlightRecorderDumps.read(folder)[0]


def only(source: OrderSource, rank: int, *, group: int = 0) -> tuple[Entry, ...]:
    """All entries of a rank in one group."""
    return source.entries(source.groups()[group], rank, 0, 10**9)


class TestGroups:
    def test_of_gloo_are_those_that_use_them(self) -> None:
        """Its ``pg_config`` has one unnamed group, whose members are those of the newest one."""
        source = read(DUMPS / "subgroups_3")
        assert [(group.name, group.description, group.ranks) for group in source.groups()] == [
            ("0", "default_pg", (0, 1, 2)),
            ("1", "", (0, 1)),
            ("2", "the second pair", (1, 2)),
        ]
        assert [source.recorded(group) for group in source.groups()] == [(0, 1, 2), (0, 1), (1, 2)]
        assert {group.backend for group in source.groups()} == {"gloo"}

    def test_of_nccl_are_those_of_its_list_also_without_a_dump(self, tmp_path: Path) -> None:
        for number in (0, 2):
            rank = NcclRank(number, {"0": range(4), "1": [0, 2], "9": [1, 3]})
            rank.launch("all_reduce", [4])
            rank.launch("all_reduce", [4], group="1")
            rank.write(tmp_path)
        source, problems = FlightRecorderDumps.read(tmp_path)
        assert [(group.name, group.ranks) for group in source.groups()] == [("0", (0, 1, 2, 3)), ("1", (0, 2))]
        assert source.recorded(source.groups()[0]) == (0, 2)
        assert source.expected_ranks == (0, 1, 2, 3)
        assert [str(problem) for problem in problems] == [
            f"{tmp_path}: no dump of ranks 1, 3; what they did is unknown"
        ]

    def test_of_one_name_with_other_members_are_two(self, tmp_path: Path) -> None:
        """``split_group`` gives the halves of a job the same name."""
        for number in range(4):
            rank = NcclRank(number, {"0": range(4), "1:tp": [0, 1] if number < 2 else [2, 3]})
            rank.launch("all_reduce", [4 if number < 2 else 8], group="1:tp")
            rank.write(tmp_path)
        assert [group.ranks for group in read(tmp_path).groups()] == [(0, 1), (2, 3)]


class TestEntries:
    def test_are_those_that_the_ring_has_kept(self) -> None:
        source = read(DUMPS / "wrapped_2")
        (group,) = source.groups()
        assert (source.oldest(group, 0), source.latest(group, 0)) == (24, 33)
        assert [entry.number for entry in source.entries(group, 0, 30, 99)] == [30, 31, 32, 33]
        assert [entry.number for entry in source.entries(group, 0, 1, 25)] == [24, 25]
        assert source.entries(group, 0, 1, 5) == ()

    def test_of_an_unknown_rank_or_group_are_none(self) -> None:
        source = read(DUMPS / "wrapped_2")
        (group,) = source.groups()
        assert (source.oldest(group, 7), source.latest(group, 7), source.entries(group, 7, 0, 99)) == (1, 0, ())
        assert source.latest(ProcessGroup(name="?", ranks=(0,)), 0) == 0

    def test_have_numbers_that_agree_although_some_ranks_send_in_between(self) -> None:
        source = read(DUMPS / "point_to_point_3")
        assert [[(entry.number, entry.signature.op) for entry in only(source, rank)] for rank in range(3)] == [
            [(1, "all_reduce"), (2, "all_reduce"), (3, "all_reduce"), (4, "all_reduce"), (7, "barrier")]
        ] * 3

    def test_tell_what_was_launched_and_where(self) -> None:
        entry = only(read(DUMPS / "op_mismatch_gloo" / "pickle"), 1)[-1]
        signature = entry.signature
        assert (signature.op, signature.dtype, signature.shapes, signature.elements, signature.bytes) == (
            "broadcast", "float32", ((8,),), 8, 32,
        )  # fmt: skip
        assert str(entry.call_site) == "/workspace/train.py:120 (main)"

    @pytest.mark.parametrize(
        ("name", "op"),
        [
            ("all_reduce", "all_reduce"),
            ("_all_gather_base", "all_gather"),
            ("all_gather", "all_gather"),
            ("_reduce_scatter_base", "reduce_scatter"),
            ("all_reduce_barrier", "barrier"),
            ("allreduce_coalesced", "all_reduce"),
            ("something_new", "something_new"),
        ],
    )
    def test_are_called_as_in_torch_distributed(self, tmp_path: Path, name: str, op: str) -> None:
        rank = NcclRank(0, WORLD)
        rank.launch(name, [4])
        rank.write(tmp_path)
        assert [entry.signature.op for entry in only(read(tmp_path), 0)] == [op]

    def test_that_were_coalesced_are_one(self, tmp_path: Path) -> None:
        rank = NcclRank(0, WORLD)
        rank.launch("all_reduce", [4])
        rank.coalesced([("all_reduce", [2, 3]), ("all_reduce", [5])])
        rank.coalesced([("broadcast", [2]), ("all_reduce", [2])])
        rank.launch("all_reduce", [4], state="scheduled")
        rank.write(tmp_path)
        entries = only(read(tmp_path), 0)
        assert [(entry.number, entry.signature.op, entry.signature.elements) for entry in entries] == [
            (1, "all_reduce", 4),
            (2, "all_reduce", 11),
            (3, "all_reduce and broadcast", 4),
            (4, "all_reduce", 4),
        ]
        assert entries[1].signature.shapes == ((2, 3), (5,))
        assert [entry.state for entry in entries] == ["completed", "completed", "completed", "launched"]

    def test_that_send_or_receive_name_the_rank_of_the_job(self, tmp_path: Path) -> None:
        rank = NcclRank(5, {"0": range(8), "3": [1, 5, 7]})
        rank.launch("all_reduce", [4], group="3")
        rank.point_to_point("send", 2, [4], group="3")
        rank.point_to_point("recv", 0, [6], group="3")
        rank.write(tmp_path)
        source = read(tmp_path)
        collectives, talks = source.groups()
        assert (collectives.is_point_to_point, talks.is_point_to_point) == (False, True)
        assert [
            (e.number, e.signature.op, e.signature.peer, e.signature.elements) for e in only(source, 5, group=1)
        ] == [
            (1, "send", 7, 4),
            (2, "recv", 1, 6),
        ]


class TestProgress:
    def test_of_gloo_is_completion_only_where_all_have_launched_the_same(self) -> None:
        assert {entry.state for rank in (0, 1) for entry in only(read(DUMPS / "healthy_gloo" / "pickle"), rank)} == {
            "completed"
        }
        waiting = only(read(DUMPS / "missing_collective_gloo" / "pickle"), 0)
        assert [entry.state for entry in waiting[-3:]] == ["completed", "launched", "launched"]
        for rank in (0, 1):
            *before, last = only(read(DUMPS / "op_mismatch_gloo" / "pickle"), rank)
            assert {entry.state for entry in before} == {"completed"}
            assert (last.state, last.flags) == ("launched", FAILED)

    def test_of_nccl_is_what_it_says(self, tmp_path: Path) -> None:
        rank = NcclRank(0, WORLD)
        rank.launch("all_reduce", [4])
        rank.launch("all_reduce", [4], state="started", is_retired=True)  # timed out
        rank.launch("all_reduce", [4], state="started")
        rank.launch("all_reduce", [4], state="scheduled")
        rank.write(tmp_path)
        entries = only(read(tmp_path), 0)
        assert [entry.state for entry in entries] == ["completed", "launched", "launched", "launched"]
        assert [entry.flags for entry in entries] == [0, FAILED | REACHED, REACHED, UNREACHED]
        assert entries[0].completed_ns is not None
        assert entries[0].completed_ns > entries[0].announced_ns
