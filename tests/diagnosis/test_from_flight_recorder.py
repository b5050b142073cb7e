"""Verdicts from dumps: what is wrong, who is named, and what can't be known."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.diagnosis.flight_recorder import read_dumps
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report_text import format_report
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError
from tests.hook_dumps import HookRank, HookRankOf214
from tests.nccl_dumps import START_NS, NcclRank

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder"


def verdict_of(folder: Path) -> Verdict:
    evidence, problems = read_dumps(folder)
    assert not [problem for problem in problems if problem.severity == "error"]
    verdict = judge(evidence)
    text = format_report(verdict, evidence)
    assert "step -1" not in text
    assert "step 0" not in text
    assert verdict.step is None
    assert verdict.bucket is None
    return verdict


def lines_of(verdict: Verdict) -> dict[int, str]:
    return {rank: f"{Path(site.file).name}:{site.line}" for rank, site in verdict.call_sites.items()}


class TestGloo:
    @pytest.mark.parametrize(
        "folder",
        ["healthy_gloo/pickle", "healthy_gloo/json", "healthy_3", "subgroups_3", "point_to_point_3", "wrapped_2"],
    )
    def test_nothing_wrong(self, folder: str) -> None:
        verdict = verdict_of(DUMPS / folder)
        assert (verdict.kind, verdict.blamed) == ("healthy", ())

    @pytest.mark.parametrize("kind", ["pickle", "json"])
    def test_different_operations_of_two_ranks_blame_nobody(self, kind: str) -> None:
        verdict = verdict_of(DUMPS / "op_mismatch_gloo" / kind)
        assert (verdict.kind, verdict.blamed, verdict.concerned, verdict.number) == (
            "different collectives",
            (),
            (0, 1),
            11,
        )
        assert lines_of(verdict) == ({0: "train.py:120", 1: "train.py:120"} if kind == "pickle" else {})
        assert [verdict.windows[rank][-1].signature.op for rank in (0, 1)] == ["all_reduce", "broadcast"]

    @pytest.mark.parametrize("kind", ["pickle", "json"])
    def test_a_collective_that_one_of_two_never_launched(self, kind: str) -> None:
        verdict = verdict_of(DUMPS / "missing_collective_gloo" / kind)
        assert (verdict.kind, verdict.blamed, verdict.concerned, verdict.number) == ("stuck", (), (0, 1), 11)
        assert lines_of(verdict) == ({0: "train.py:39", 1: "train.py:39"} if kind == "pickle" else {})

    def test_one_of_three_that_launches_something_else_is_named(self) -> None:
        verdict = verdict_of(DUMPS / "odd_3")
        assert (verdict.kind, verdict.blamed, verdict.number) == ("different collectives", (1,), 4)

    @pytest.mark.parametrize("folder", ["sizes_3", "dtypes_3"])
    def test_sizes_and_types_that_gloo_does_not_notice(self, folder: str) -> None:
        verdict = verdict_of(DUMPS / folder)
        assert (verdict.kind, verdict.blamed, verdict.number) == ("different collectives", (2,), 4)

    def test_one_of_three_that_the_others_wait_for_is_named(self) -> None:
        verdict = verdict_of(DUMPS / "hang_3")
        assert (verdict.kind, verdict.blamed, verdict.number) == ("stuck", (1,), 4)

    def test_a_rank_without_a_dump_is_said(self, tmp_path: Path) -> None:
        for rank in (0, 2):
            shutil.copy(DUMPS / "hang_3" / f"trace_{rank}", tmp_path)
        verdict = verdict_of(tmp_path)
        assert (verdict.kind, verdict.blamed, verdict.number) == ("stuck", (), 4)

    def test_dumps_of_some_that_show_nothing_are_not_called_healthy(self, tmp_path: Path) -> None:
        shutil.copy(DUMPS / "healthy_3" / "trace_1", tmp_path)
        verdict = verdict_of(tmp_path)
        assert verdict.kind == "cannot tell"

    def test_does_not_depend_on_the_order_of_files(self, tmp_path: Path) -> None:
        """With the ranks' files exchanged, the other one is named."""
        for rank in range(3):
            shutil.copy(DUMPS / "odd_3" / f"trace_{rank}", tmp_path / f"trace_{(rank + 1) % 3}")
        assert verdict_of(tmp_path).blamed == (2,)


class TestDamage:
    @given(st.data())
    def test_any_values_give_a_verdict_or_a_sentence(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        folder = tmp_path_factory.mktemp("dumps")
        values = (
            st.integers(-(2**63), 2**63 - 1)
            | st.sampled_from(
                [None, True, "", "[]", "[5, 0]", "nccl:coalesced", "gloo:send 0->9", "gloo:\x1b[2J", [], [[]]]
            )
            | st.lists(st.lists(st.integers(-5, 2**62), max_size=3), max_size=3)
        )
        for rank in range(3):
            content = pickle.loads((DUMPS / "hang_3" / f"trace_{rank}").read_bytes())
            places = [content, content["pg_config"][""], *content["entries"]]
            for _ in range(data.draw(st.integers(0, 3))):
                place = data.draw(st.sampled_from(places))
                place[data.draw(st.sampled_from(sorted(place)))] = data.draw(values)
            (folder / f"trace_{rank}").write_bytes(pickle.dumps(content, 2))
        try:
            evidence, _ = read_dumps(folder)
        except OverlapScopeError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return
        text = format_report(judge(evidence), evidence)
        assert all(line.isprintable() for line in text.split("\n"))


class TestRealNccl:
    """Dumps of torch 2.11 with NCCL 2.28; starts are timed but in the healthy ones."""

    @pytest.mark.parametrize("folder", ["healthy_nccl/pickle", "healthy_nccl/json"])
    def test_nothing_wrong(self, folder: str) -> None:
        assert verdict_of(DUMPS / folder).kind == "healthy"

    def test_a_device_that_had_not_come_to_the_collective_when_time_was_up_is_named(self) -> None:
        """As NCCL's watchdogs had them written before they ended the processes."""
        verdict = verdict_of(DUMPS / "late_device_nccl")
        assert (verdict.kind, verdict.named, verdict.number) == ("stuck", (1,), 33)
        assert lines_of(verdict) == {0: "train.py:20", 1: "train.py:20"}

    def test_a_collective_that_one_of_two_left_out(self) -> None:
        verdict = verdict_of(DUMPS / "left_out_nccl")
        assert (verdict.kind, verdict.named, verdict.number) == ("missing collective", (), 33)
        assert lines_of(verdict)[0] == "train.py:20"


@pytest.mark.parametrize("kind", [HookRank, HookRankOf214])
class TestHookOfTorch:
    """Over nccl2, which torch's hook records."""

    def run(self, folder: Path, kind: type[NcclRank], job: Callable[[NcclRank], None]) -> Verdict:
        for number in range(3):
            rank = kind(number, {"0": range(3)})
            for _ in range(10):
                rank.launch("all_reduce", [1000], line=20)
                rank.launch("_all_gather_base", [8], line=21)
            rank.point_to_point("send", (number + 1) % 3, [4])
            rank.point_to_point("recv", (number - 1) % 3, [4])
            job(rank)
            rank.write(folder)
        return verdict_of(folder)

    def test_nothing_wrong(self, tmp_path: Path, kind: type[NcclRank]) -> None:
        assert self.run(tmp_path, kind, lambda rank: rank.launch("barrier")).kind == "healthy"

    def test_a_collective_that_one_left_out(self, tmp_path: Path, kind: type[NcclRank]) -> None:
        def job(rank: NcclRank) -> None:
            if rank.rank != 1:
                rank.launch("all_reduce", [7], state="started", line=30)
            rank.launch("broadcast", [9], state="started", line=31)

        verdict = self.run(tmp_path, kind, job)
        assert (verdict.kind, verdict.named, verdict.number) == ("missing collective", (1,), 21)
        assert lines_of(verdict) == {0: "train.py:30", 1: "train.py:31", 2: "train.py:30"}


def test_a_collective_over_nccl2_that_has_not_ended_when_others_never_came_is_stuck(tmp_path: Path) -> None:
    for number in range(3):
        rank = HookRank(number, {"0": range(3)})
        rank.launch("all_reduce", [1000], line=20)
        if number != 2:
            rank.launch("all_reduce", [7], state="started", line=30)
        rank.write(tmp_path)
    verdict = verdict_of(tmp_path)
    assert (verdict.kind, verdict.named, verdict.number) == ("stuck", (2,), 2)


class TestNccl:
    def run(self, folder: Path, world_size: int, job: Callable[[NcclRank], None], *, keep: int = 2000) -> Verdict:
        for number in range(world_size):
            rank = NcclRank(number, {"0": range(world_size), "1": [0, 1], "2": [1, 2]})
            for _ in range(10):
                rank.launch("all_reduce", [1000], line=20)
            job(rank)
            rank.write(folder, keep=keep)
        return verdict_of(folder)

    def test_nothing_wrong(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, 3, lambda rank: rank.launch("barrier")).kind == "healthy"

    def test_healthy_with_a_collective_under_way(self, tmp_path: Path) -> None:
        """A dump on demand: the file is as young as the newest entry."""
        self.run(tmp_path, 3, lambda rank: rank.launch("all_reduce", [4], state="started"))
        written_s = START_NS / 1e9 + 10.5
        for file in tmp_path.iterdir():
            os.utime(file, (written_s, written_s))
        assert verdict_of(tmp_path).kind == "healthy"

    def test_all_inside_a_collective_that_never_ends(self, tmp_path: Path) -> None:
        assert time.time() > START_NS / 1e9
        verdict = self.run(tmp_path, 3, lambda rank: rank.launch("all_reduce", [4], state="started"))
        assert (verdict.kind, verdict.blamed, verdict.number) == ("stuck", (), 11)

    @pytest.mark.parametrize("has_starts", [True, False])
    def test_the_device_that_has_not_come_to_it_is_named_where_starts_are_timed(
        self, tmp_path: Path, has_starts: bool
    ) -> None:
        def job(rank: NcclRank) -> None:
            inside = "started" if has_starts and rank.rank != 2 else "scheduled"
            rank.launch("all_reduce", [4], state=inside, line=33)
            rank.launch("all_reduce", [5], state="scheduled", line=34)
            if not has_starts:
                for entry in rank.entries:
                    entry["time_discovered_started_ns"] = None

        verdict = self.run(tmp_path, 4, job)
        assert (verdict.kind, verdict.named, verdict.number) == ("stuck", (2,) if has_starts else (), 11)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_what_one_has_scheduled_and_another_never_launched_is_likely_a_fault(
        self, tmp_path: Path, world_size: int
    ) -> None:
        def job(rank: NcclRank) -> None:
            if rank.rank != 1:
                rank.launch("all_reduce", [4], state="scheduled", line=33)

        verdict = self.run(tmp_path, world_size, job)
        assert (verdict.kind, verdict.certainty, verdict.number) == ("stuck", "likely", 11)
        assert verdict.suspected == (() if world_size == 2 else (1,))

    def test_one_rank_leaves_a_collective_out(self, tmp_path: Path) -> None:
        def job(rank: NcclRank) -> None:
            if rank.rank != 2:
                rank.launch("all_gather", [5], state="started", line=33)
            rank.launch("all_reduce", [1000], state="scheduled", line=34)
            rank.launch("broadcast", [7], state="scheduled", line=35)

        verdict = self.run(tmp_path, 4, job)
        assert (verdict.kind, verdict.blamed, verdict.number) == ("missing collective", (2,), 11)
        assert lines_of(verdict)[2] == "train.py:34"
        assert lines_of(verdict)[0] == "train.py:33"

    def test_two_against_two_blame_nobody(self, tmp_path: Path) -> None:
        verdict = self.run(tmp_path, 4, lambda rank: rank.launch("all_reduce", [4 + rank.rank % 2], state="started"))
        assert (verdict.kind, verdict.blamed) == ("different collectives", ())

    def test_only_in_a_subgroup(self, tmp_path: Path) -> None:
        def job(rank: NcclRank) -> None:
            if rank.rank in (1, 2):
                rank.launch("all_reduce", [rank.rank], group="2", state="started")

        verdict = self.run(tmp_path, 3, job)
        assert (verdict.kind, verdict.group, verdict.concerned) == ("different collectives", "2", (1, 2))

    def test_groups_that_are_entered_in_different_orders(self, tmp_path: Path) -> None:
        def job(rank: NcclRank) -> None:
            if rank.rank == 0:
                rank.launch("all_reduce", [3], group="1", state="started")
            elif rank.rank == 1:
                rank.launch("all_reduce", [4], group="2", state="started")
            else:
                rank.launch("all_reduce", [5], state="started")

        verdict = self.run(tmp_path, 3, job)
        assert verdict.kind == "groups interleaved"
        assert verdict.concerned == (0, 1, 2)

    def test_a_send_that_nobody_receives(self, tmp_path: Path) -> None:
        def job(rank: NcclRank) -> None:
            if rank.rank == 0:
                rank.point_to_point("send", 1, [4], state="started")

        verdict = self.run(tmp_path, 3, job)
        assert (verdict.kind, verdict.blamed, verdict.concerned) == ("stuck", (), (0, 1))

    def test_sends_that_are_received(self, tmp_path: Path) -> None:
        def job(rank: NcclRank) -> None:
            if rank.rank < 2:
                rank.point_to_point("send" if rank.rank == 0 else "recv", 1 - rank.rank, [4])
            rank.launch("all_reduce", [4])

        assert self.run(tmp_path, 3, job).kind == "healthy"

    def test_rings_that_begin_at_different_places(self, tmp_path: Path) -> None:
        def job(rank: NcclRank) -> None:
            for number in range(20 + rank.rank):
                rank.launch("all_reduce", [number + 1], state="started" if number >= 20 else "completed")

        verdict = self.run(tmp_path, 3, job, keep=15)
        assert (verdict.kind, verdict.number) == ("stuck", 31)

    def test_a_difference_older_than_the_rings(self, tmp_path: Path) -> None:
        def job(rank: NcclRank) -> None:
            for number in range(30):
                rank.launch("all_reduce", [number + rank.rank + 1])

        self.run(tmp_path, 3, job, keep=10)
        (order,) = read_dumps(tmp_path)[0].groups
        assert order.predates_log


def test_a_dump_that_cannot_be_read_takes_healthy_away(tmp_path: Path) -> None:
    for number in range(2):
        rank = NcclRank(number, {"0": range(2)})
        rank.launch("barrier")
        rank.write(tmp_path)
    assert verdict_of(tmp_path).kind == "healthy"
    path = max(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    verdict = judge(read_dumps(tmp_path)[0])
    assert (verdict.kind, verdict.blamed) == ("cannot tell", ())
