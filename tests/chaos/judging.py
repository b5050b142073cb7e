"""What a run of a random training comes to: its worst score, and whether a healthy job was harmed."""

from __future__ import annotations

from dataclasses import dataclass

from overlapscope.diagnosis.verdict import Verdict
from tests.chaos.program import Program
from tests.chaos.running import Outcome
from tests.chaos.scoring import GRADES, Score, score


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
