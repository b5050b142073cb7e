"""A verdict on a random program is scored by what is true of the program."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from overlapscope.diagnosis.evidence import CallSite
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.lab.jobs import WatchdogReport
from tests.chaos.judging import judge_run
from tests.chaos.program import SCRIPT, Program, compose
from tests.chaos.running import Outcome
from tests.chaos.scoring import score

HEALTHY = Verdict(kind="healthy", sentence="All ranks finished.")


@cache
def of(name: str, ranks: int = 3, *, is_ours: bool = True) -> Program:
    programs = (compose(seed, is_ours=is_ours) for seed in range(10_000))
    return next(
        one
        for one in programs
        if one.event.name == name and one.setting.ranks == ranks and (one.steps or not one.event.has_step)
    )


def truth(program: Program) -> Verdict:
    lines = program.lines[:1]
    return Verdict(
        kind=program.event.kinds[0],
        sentence="",
        blamed=program.blamed,
        step=program.steps[0] if program.steps else None,
        call_sites={program.blamed[0]: CallSite(file=f"/there/{SCRIPT}", line=lines[0], function="main")}
        if lines
        else None,
    )


def grade(program: Program, **changes: Any) -> str:
    return score(replace(truth(program), **changes), program).grade


@pytest.mark.parametrize(
    "name", ["extra collective", "exception", "hangs", "batch skipped", "parameter frozen on one rank"]
)
def test_the_truth_is_right(name: str) -> None:
    assert score(truth(of(name)), of(name)).why == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "killed"}, "wrong"),
        ({"kind": "healthy"}, "wrong"),
        ({"kind": "slow"}, "missed"),
        ({"kind": "cannot tell"}, "partly"),
        ({"blamed": (0, 1, 2)}, "wrong"),
        ({"blamed": ()}, "partly"),
        ({"step": 10**6}, "wrong"),
        ({"step": None}, "right"),
        ({"call_sites": None}, "partly"),
    ],
)
def test_each_point_counts(changes: dict[str, Any], expected: str) -> None:
    assert grade(of("exception"), **changes) == expected


def test_a_line_may_be_in_the_sentence() -> None:
    program = of("exception")
    assert grade(program, call_sites=None, sentence=f"It failed at {SCRIPT}:{program.lines[0]}.") == "right"


def test_an_innocent_rank_may_never_be_blamed() -> None:
    program = of("hangs")
    innocent = next(rank for rank in range(3) if rank not in program.blamed)
    assert grade(program, blamed=(innocent,)) == "wrong"


def test_of_two_ranks_that_disagree_nobody_need_be_blamed() -> None:
    assert grade(of("extra collective", 2), blamed=()) == "right"
    assert grade(of("extra collective", 3), blamed=()) == "partly"
    assert grade(of("killed", 2), blamed=()) == "partly"
    assert grade(of("member missing", 3), blamed=()) == "right"  # the third is no member


def test_what_all_do_alike_is_laid_to_all_or_to_none() -> None:
    assert grade(of("branch skipped by all"), blamed=()) == "right"


def test_a_vague_kind_is_partly_right_and_its_step_does_not_count() -> None:
    assert grade(of("batch skipped"), kind="uneven inputs", step=10**6) == "partly"


def test_a_false_phrase_spoils_a_right_kind() -> None:
    assert grade(of("stopped early alone"), sentence="Rank 1 ran out of data.") == "wrong"


def test_what_stock_ddp_does_not_tell_is_missed_and_no_falsehood() -> None:
    name = "wrapper bypassed by all"
    assert score(HEALTHY, of(name, is_ours=False)).grade == "missed"
    assert score(HEALTHY, of(name)).grade == "wrong"


def test_of_a_healthy_program_any_fault_is_wrong() -> None:
    program = of("healthy: pause")
    assert score(HEALTHY, program).grade == "right"
    assert score(replace(HEALTHY, kind="slow"), program).grade == "right"
    assert score(replace(HEALTHY, kind="cannot tell"), program).grade == "partly"
    assert score(replace(HEALTHY, kind="stuck"), program).grade == "wrong"


def outcome(final: Verdict, live: Verdict | None = None, *reported: Verdict, exit_code: int | None = 0) -> Outcome:
    reports = tuple(WatchdogReport(rank=0, time_ns=1, verdict=one, message="", is_retracted=False) for one in reported)
    return Outcome(seconds=1.0, exit_code=exit_code, reports=reports, live=live, final=final)


def test_the_worst_of_all_that_was_said_counts() -> None:
    program = of("hangs")
    right, vague = truth(program), Verdict(kind="cannot tell", sentence="")
    assert judge_run(program, outcome(right)).score.grade == "right"
    forgotten = judge_run(program, outcome(vague, right))
    assert (forgotten.score.grade, forgotten.said, forgotten.final_knows_less) == ("partly", "final", True)
    learned = judge_run(program, outcome(right, vague))
    assert (learned.score.grade, learned.said, learned.final_knows_less) == ("partly", "live", False)
    assert judge_run(program, outcome(right, right, replace(right, kind="killed"))).said == "report"
    assert judge_run(program, outcome(right, right, vague)).score.grade == "right"


def test_a_healthy_program_is_accused_with_certainty_or_suspected() -> None:
    program = of("healthy: pause")
    stuck = Verdict(kind="stuck", sentence="Rank 1 is stuck.")
    likely = replace(stuck, alternative="it may go on")
    assert judge_run(program, outcome(HEALTHY, None, stuck)).accused == (stuck.sentence,)
    suspected = judge_run(program, outcome(HEALTHY, None, likely))
    assert (suspected.accused, suspected.suspected) == ((), (likely.sentence,))


@pytest.mark.parametrize("exit_code", [1, None])
def test_a_healthy_program_has_to_end_well(exit_code: int | None) -> None:
    assert judge_run(of("healthy"), outcome(HEALTHY, exit_code=exit_code)).was_ended
    assert not judge_run(of("healthy"), outcome(HEALTHY)).was_ended
