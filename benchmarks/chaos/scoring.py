"""Whether what is said of a random training is the truth, and whether a healthy job was harmed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from benchmarks.chaos.program import SCRIPT, Program
from benchmarks.chaos.running import Outcome
from overlapscope.diagnosis.verdict import Verdict

Grade = Literal["right", "partly", "missed", "wrong"]
"""Partly: nothing of it is false, but it says less than could be known. Missed: that something is wrong is not said."""
GRADES: Final[tuple[Grade, ...]] = ("right", "partly", "missed", "wrong")


@dataclass(frozen=True)
class Score:
    """A grade, and why it is no better."""

    grade: Grade
    why: str = ""


def score(verdict: Verdict, program: Program) -> Score:
    """Compare a verdict with the truth: kind, ranks, step and line."""
    event = program.event
    if event.is_harmless:
        if verdict.kind in event.kinds:
            is_told = event.remark is None or any(one.kind == event.remark for one in verdict.remarks)
            return Score("right") if is_told else Score("partly", f"no remark on {event.remark}")
        return Score("partly" if verdict.kind == "cannot tell" else "wrong", f"'{verdict.kind}' of a healthy job")
    if verdict.kind == "healthy":
        return Score("missed" if program.is_unseen else "wrong", "'healthy' of a faulty job")
    if verdict.kind == "cannot tell":
        return Score("partly", "cannot tell")
    if verdict.kind == "slow" and "slow" not in event.vague:
        return Score("missed", "'slow' of a faulty job")
    if verdict.kind not in (*event.kinds, *event.vague):
        return Score("wrong", f"'{verdict.kind}' instead of '{event.kinds[0]}'")
    if innocent := set(verdict.blamed) - set(program.blamed):
        return Score("wrong", f"blames {sorted(innocent)} instead of {list(program.blamed)}")
    if innocent := set(verdict.suspected) - set(program.blamed):
        return Score("partly", f"suspects {sorted(innocent)} instead of {list(program.blamed)}")
    text = " ".join((verdict.sentence, *verdict.evidence))
    if found := [phrase for phrase in event.false_phrases if phrase in text]:
        return Score("wrong", f"'{found[0]}' is not so")
    return _completeness(verdict, program)


def _completeness(verdict: Verdict, program: Program) -> Score:
    """Of a verdict of a right kind, which blames no innocent rank."""
    event = program.event
    is_open = event.is_between_two or (event.is_disagreement and program.setting.ranks == 2)
    if verdict.kind in event.vague:
        return Score("partly", f"'{verdict.kind}', less than '{event.kinds[0]}'")
    if program.steps and verdict.step is not None and not _steps_of(verdict) & set(program.steps):
        is_near = min(abs(verdict.step - step) for step in program.steps) == 1
        return Score("partly" if is_near else "wrong", f"step {verdict.step} instead of {program.steps[0]}")
    if not verdict.named and event.blame != "all" and not is_open:
        return Score("partly", f"blames nobody instead of {list(program.blamed)}")
    if program.lines and not _lines_of(verdict) & set(program.lines):
        return Score("partly", f"lines {sorted(_lines_of(verdict)) or 'unknown'} instead of {program.lines[0]}")
    return Score("right")


def _steps_of(verdict: Verdict) -> set[int]:
    """Return the steps in one of which it began, as far as a verdict says."""
    return set() if verdict.step is None else set(range(verdict.step, (verdict.last_step or verdict.step) + 1))


def _lines_of(verdict: Verdict) -> set[int]:
    """Return the lines of the script that a verdict names."""
    sites = (verdict.call_sites or {}).values()
    said = re.findall(rf"{re.escape(SCRIPT)}:(\d+)", verdict.sentence)
    return {site.line for site in sites if Path(site.file).name == SCRIPT} | {int(line) for line in said}


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """Of one run."""

    program: Program
    said: str
    """Which sentence is the worst: a watchdog's (``report``), ``live`` or ``final``."""
    score: Score
    verdict: Verdict
    final_knows_less: bool
    """Whether the diagnosis afterwards is worse than that of the job while it hung."""
    accused: tuple[str, ...] = ()
    """Sentences with which a healthy job was accused while it ran, also such as were withdrawn."""
    suspected: tuple[str, ...] = ()
    """Such that were said to be likely only."""
    was_ended: bool = False
    """Whether a healthy job came to no good end."""


def judge_run(program: Program, outcome: Outcome) -> Judgment:
    """Score all that was said of a run; the worst of it counts."""
    verdicts = {"final": outcome.final}
    if outcome.live is not None:
        verdicts["live"] = outcome.live
    # Of what watchdogs say of a fault only falsehoods count: they know less than the whole of it.
    scores = {said: score(verdict, program) for said, verdict in verdicts.items()}
    for report in outcome.reports:
        if not program.event.is_harmless and not report.is_retracted:
            found = score(report.verdict, program)
            if found.grade == "wrong":
                verdicts["report"], scores["report"] = report.verdict, found
    worst = max(scores, key=lambda said: GRADES.index(scores[said].grade))
    reported = [report.verdict for report in outcome.reports] if program.event.is_harmless else []
    return Judgment(
        program=program,
        said=worst,
        score=scores[worst],
        verdict=verdicts[worst],
        final_knows_less="live" in scores and GRADES.index(scores["final"].grade) > GRADES.index(scores["live"].grade),
        accused=tuple(verdict.sentence for verdict in reported if verdict.certainty == "certain"),
        suspected=tuple(verdict.sentence for verdict in reported if verdict.certainty != "certain"),
        was_ended=program.event.is_harmless and outcome.exit_code != 0,
    )
