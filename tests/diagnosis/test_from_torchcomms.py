"""Verdicts from dumps of torchcomms, which numbers what a process launches in all communicators together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from overlapscope.diagnosis.flight_recorder import read_dumps
from overlapscope.diagnosis.judge import judge
from tests.torchcomms_dumps import TorchcommsRank

COMMUNICATORS = {"world": range(3), "pair": range(2)}


def dumps(folder: Path, launch: Callable[[TorchcommsRank], None], *, keep: int = 2000) -> Path:
    for number in range(3):
        rank = TorchcommsRank(number, {name: ranks for name, ranks in COMMUNICATORS.items() if number in ranks})
        launch(rank)
        rank.write(folder, keep=keep)
    return folder


def training(rank: TorchcommsRank, steps: int = 10) -> None:
    for _ in range(steps):
        rank.launch("all_reduce", [1000], group="world")
        if "pair" in rank.groups:
            rank.launch("all_gather_single", [10], group="pair")


def test_ranks_of_other_communicators_number_what_they_share_differently_and_are_healthy(tmp_path: Path) -> None:
    evidence, _ = read_dumps(dumps(tmp_path, training))
    verdict = judge(evidence)
    assert (verdict.kind, verdict.blamed) == ("healthy", ())
    assert {group.name: group.latest for group in evidence.groups} == {
        "world": {0: 10, 1: 10, 2: 10},
        "pair": {0: 10, 1: 10},
    }


def test_a_rank_that_launches_something_else_is_named(tmp_path: Path) -> None:
    def launch(rank: TorchcommsRank) -> None:
        training(rank)
        rank.launch("broadcast" if rank.rank == 1 else "all_reduce", [1000], group="world", state="started")

    verdict = judge(read_dumps(dumps(tmp_path, launch))[0])
    assert (verdict.kind, verdict.blamed, verdict.number) == ("different collectives", (1,), 11)


def test_sends_and_receives_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    def launch(rank: TorchcommsRank) -> None:
        for _ in range(3):
            training(rank, steps=1)
            if rank.rank < 2:
                rank.point_to_point("send" if rank.rank == 0 else "recv", 1 - rank.rank, [5], group="world")

    evidence, problems = read_dumps(dumps(tmp_path, launch))
    assert judge(evidence).kind == "healthy"
    assert [problem.severity for problem in problems if "6 sends and receives are left out" in problem.message] == [
        "note"
    ]


def test_a_dump_that_is_no_longer_whole_is_refused(tmp_path: Path) -> None:
    evidence, problems = read_dumps(dumps(tmp_path, training, keep=15))
    errors = [problem.message for problem in problems if problem.severity == "error"]
    assert len(errors) == 2  # rank 2 has launched less, and still has it all
    assert all("can't be compared with others; give FlightRecorderHook more max_entries" in error for error in errors)
    assert judge(evidence).kind == "cannot tell"
