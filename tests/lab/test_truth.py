"""A verdict is compared with the truth point by point."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import CallSite
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.lab.catalog import FAULTS
from overlapscope.lab.truth import check_verdict, find_faulty_lines

BY_NAME = {fault.name: fault for fault in FAULTS}
BRANCH = BY_NAME["missing-branch"]
BATCH = BY_NAME["skipped-batch"]


def line_of(script: str, line: int) -> CallSite:
    return CallSite(file=f"/somewhere/{script}", line=line, function="main")


RIGHT = Verdict(
    kind="gradients never ready",
    sentence="",
    blamed=(1,),
    step=12,
    bucket=BRANCH.bucket,
    parameters=BRANCH.parameters,
    call_sites={1: line_of(BRANCH.script, find_faulty_lines(BRANCH)[0])},
)


def wrong_points(verdict: Verdict, fault=BRANCH, world_size: int = 3) -> list[str]:
    return [check.point for check in check_verdict(fault, world_size, verdict) if not check.is_right]


def test_the_truth_is_right_in_every_point() -> None:
    assert [check.point for check in check_verdict(BRANCH, 3, RIGHT)] == [
        "kind",
        "blamed",
        "step",
        "bucket",
        "parameters",
        "line",
    ]
    assert wrong_points(RIGHT) == []


@pytest.mark.parametrize(
    ("point", "change"),
    [
        ("kind", {"kind": "stuck"}),
        ("blamed", {"blamed": (2,)}),
        ("blamed", {"blamed": (1, 2)}),
        ("blamed", {"blamed": ()}),
        ("step", {"step": 11}),
        ("step", {"step": None}),
        ("bucket", {"bucket": 0}),
        ("parameters", {"parameters": BRANCH.parameters[:1]}),
        ("parameters", {"parameters": (*BRANCH.parameters, "head.bias")}),
        ("line", {"call_sites": {}}),
        ("line", {"call_sites": {1: line_of(BRANCH.script, 1)}}),
        ("line", {"call_sites": {1: line_of("other.py", find_faulty_lines(BRANCH)[0])}}),
    ],
)
def test_each_point_can_be_wrong(point: str, change: dict) -> None:
    assert wrong_points(replace(RIGHT, **change)) == [point]


@pytest.mark.parametrize(
    ("step", "last_step", "wrong"), [(9, 12, []), (12, 40, []), (9, 11, ["step"]), (13, 20, ["step"])]
)
def test_a_step_may_be_one_of_several(step: int, last_step: int, wrong: list[str]) -> None:
    assert wrong_points(replace(RIGHT, step=step, last_step=last_step)) == wrong


def test_the_line_is_that_of_a_rank_that_is_blamed() -> None:
    right = line_of(BRANCH.script, find_faulty_lines(BRANCH)[0])
    sites = {0: right, 1: line_of(BRANCH.script, 1)}
    assert wrong_points(replace(RIGHT, call_sites=sites)) == ["line"]


def test_of_two_ranks_that_disagree_nobody_is_to_be_blamed() -> None:
    verdict = Verdict(
        kind="batch skipped",
        sentence="",
        step=12,
        call_sites={rank: line_of(BATCH.script, find_faulty_lines(BATCH)[0]) for rank in (0, 1)},
    )
    assert wrong_points(verdict, BATCH, 2) == []
    assert wrong_points(replace(verdict, blamed=(1,)), BATCH, 2) == ["blamed"]
    assert wrong_points(replace(verdict, blamed=(1,)), BATCH, 3) == []


def test_what_all_ranks_do_alike_is_laid_to_all_or_to_none() -> None:
    fault = BY_NAME["bypassed-ddp"]
    verdict = Verdict(
        kind="not reduced", sentence="", step=12, call_sites={0: line_of(fault.script, find_faulty_lines(fault)[0])}
    )
    assert wrong_points(verdict, fault) == []
    assert wrong_points(replace(verdict, blamed=(0, 1, 2)), fault) == []
    assert wrong_points(replace(verdict, blamed=(1,)), fault) == ["blamed"]


def test_where_nothing_is_wrong_only_health_is_the_truth() -> None:
    healthy = Verdict(kind="healthy", sentence="")
    slow = Verdict(kind="slow", sentence="")
    assert wrong_points(healthy, BY_NAME["jitter"]) == []
    assert wrong_points(slow, BY_NAME["jitter"]) == ["kind"]
    assert wrong_points(slow, BY_NAME["slow-step"]) == []
