"""Verdicts on the attempts of a job that its launcher restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.from_recording import Progress, read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.text import truncate_words
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError, Problem, make_printable
from overlapscope.trace.folders import attempt_number, find_sibling_attempts

_MAX_ATTEMPTS: Final = 8
"""Maximum number of attempts that are judged, the latest ones: a job may be restarted over and over."""
_MAX_LINE_LENGTH: Final = 240


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One judged attempt of a job."""

    path: Path
    evidence: Evidence
    verdict: Verdict
    problems: tuple[Problem, ...] = ()

    @property
    def number(self) -> int:
        """Return the number of the attempt, from 0."""
        return attempt_number(self.path)

    @property
    def line(self) -> str:
        """Return why the attempt ended, as one line."""
        name = f"Attempt {self.number} ({make_printable(str(self.path))})"
        if self.verdict.kind == "healthy":
            return f"{name} {'runs' if self.evidence.is_live else 'came to its end'}."
        return f"{name}: {truncate_words(' '.join(self.verdict.sentence.split()), _MAX_LINE_LENGTH)}"


def read_attempt(path: Path, progress: Progress | None = None) -> Attempt:
    """Judge a recording.

    Raises:
        OverlapScopeError: ``path`` holds no recording.
    """
    evidence, problems = read_evidence(path, progress)
    return Attempt(path=path, evidence=evidence, verdict=judge(evidence), problems=tuple(problems))


def read_attempts(path: Path) -> tuple[Attempt, ...]:
    """Judge the latest attempts of a job, in chronological order; none if the job was started only once.

    Args:
        path: recording of any of its attempts.
    """
    paths = find_sibling_attempts(path)
    found = []
    for each in paths[-_MAX_ATTEMPTS:] if len(paths) > 1 else ():
        try:
            found.append(read_attempt(each))
        except OverlapScopeError:  # unreadable: commands that read that recording report it
            continue
    return tuple(found)


def format_attempts(attempts: Sequence[Attempt]) -> list[str]:
    """Return one line per attempt that says why it ended; nothing if the job was started only once."""
    if not attempts:
        return []
    first, known = attempts[0].number, {each.number: each.line for each in attempts}
    lines = [
        known.get(number, f"Attempt {number} left nothing: no rank came to init_process_group.")
        for number in range(first, max(known) + 1)
    ]
    return [f"Attempts before {first} are not listed.", *lines] if first else lines


def format_other_attempts(attempts: Sequence[Attempt], path: Path) -> str:
    """Return which attempt a recording belongs to and why the others ended; empty if the job was started only once."""
    others = [each.line for each in attempts if each.number != attempt_number(path)]
    return " ".join([f"This is attempt {attempt_number(path)} of the job.", *others]) if others else ""
