"""Random programs are Python and know their own truth, and a verdict is scored by it."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.chaos.event import FAULT
from benchmarks.chaos.program import EVENTS, SCRIPT, Program, compose
from benchmarks.chaos.running import Outcome
from benchmarks.chaos.scoring import judge_run, score
from overlapscope.diagnosis.evidence import CallSite
from overlapscope.diagnosis.verdict import Remark, Verdict
from tests.lab.reports import JobReport

HEALTHY = Verdict(kind="healthy", sentence="All ranks finished.")


def test_every_program_is_python_and_marks_its_fault_within_the_training() -> None:
    programs = [compose(seed) for seed in range(600)]
    assert [compose(seed) for seed in range(20)] == programs[:20]
    rare = {event.name for event in EVENTS} - {program.event.name for program in programs}
    programs += [find_program(name) for name in rare]
    for program in programs:
        compile(ast.parse(program.text), f"seed {program.seed}", "exec")
        setting, event = program.setting, program.event
        assert 0 <= setting.step < setting.steps
        assert (setting.step + 1) % setting.accumulation == 0  # a backward that is reduced
        assert all(0 <= rank < setting.ranks for rank in program.blamed)
        marked = [number for number, line in enumerate(program.text.splitlines(), 1) if line.endswith(FAULT)]
        if event.is_harmless or event.has_line:
            assert bool(marked) != event.is_harmless, event.name
        if program.lines:
            assert set(marked) <= set(program.lines)


@cache
def find_program(name: str, ranks: int = 3) -> Program:
    programs = (compose(seed, is_ours=True) for seed in range(10_000))
    return next(
        one
        for one in programs
        if one.event.name == name and one.setting.ranks == ranks and (one.steps or not one.event.has_step)
    )


def truth_of(program: Program) -> Verdict:
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


@pytest.mark.parametrize(
    ("name", "changes", "grade"),
    [
        ("exception", {}, "right"),
        ("exception", {"kind": "killed"}, "wrong"),
        ("exception", {"kind": "healthy"}, "wrong"),
        ("exception", {"kind": "slow"}, "missed"),
        ("exception", {"kind": "cannot tell"}, "partly"),
        ("exception", {"blamed": (0, 1, 2)}, "wrong"),
        ("exception", {"blamed": ()}, "partly"),
        ("exception", {"step": 10**6}, "wrong"),
        ("exception", {"step": None}, "right"),
        ("exception", {"call_sites": None}, "partly"),
        ("branch skipped by all", {"blamed": ()}, "right"),
        ("member missing", {"blamed": ()}, "right"),  # two of the ranks disagree; the third is no member
        ("batch skipped", {"kind": "uneven inputs", "step": 10**6}, "partly"),
        ("stopped early alone", {"sentence": "Rank 1 ran out of data."}, "wrong"),
        ("healthy: pause", {"kind": "slow"}, "right"),
        ("healthy: pause", {"kind": "stuck"}, "wrong"),
        ("healthy: same data", {"remarks": (Remark(kind="same data", sentence=""),)}, "right"),
        ("healthy: same data", {}, "partly"),
    ],
)
def test_a_verdict_is_graded_by_the_truth(name: str, changes: dict[str, Any], grade: str) -> None:
    program = find_program(name)
    assert score(replace(truth_of(program), **changes), program).grade == grade


def outcome(final: Verdict, live: Verdict | None = None, *reported: Verdict, exit_code: int | None = 0) -> Outcome:
    reports = tuple(JobReport(rank=0, time_ns=1, verdict=one, message="", is_retracted=False) for one in reported)
    return Outcome(seconds=1.0, exit_code=exit_code, reports=reports, live=live, final=final)


def test_the_worst_verdict_of_a_run_counts() -> None:
    program = find_program("hangs")
    right, vague = truth_of(program), Verdict(kind="cannot tell", sentence="")
    forgotten = judge_run(program, outcome(vague, right))
    assert (forgotten.score.grade, forgotten.said, forgotten.final_knows_less) == ("partly", "final", True)
    assert judge_run(program, outcome(right, vague)).said == "live"
    assert judge_run(program, outcome(right, right, replace(right, kind="killed"))).said == "report"
    assert judge_run(program, outcome(right, right, vague)).score.grade == "right"


def test_a_healthy_program_may_be_neither_accused_nor_ended() -> None:
    program = find_program("healthy: pause")
    stuck = Verdict(kind="stuck", sentence="Rank 1 is stuck.")
    assert judge_run(program, outcome(HEALTHY, None, stuck)).accused == (stuck.sentence,)
    assert judge_run(program, outcome(HEALTHY, None, replace(stuck, alternative="it is slow"))).accused == ()
    assert judge_run(program, outcome(HEALTHY, exit_code=None)).was_ended
