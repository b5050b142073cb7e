"""Build the report of ``overlapscope diagnose``: what went wrong, where each rank was, and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overlapscope.diagnosis.attempts import Attempt, format_attempts
from overlapscope.diagnosis.evidence import CallSite, Evidence, RankEvidence
from overlapscope.diagnosis.report_text import format_report
from overlapscope.diagnosis.text import loop_step
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.report.diagnosis_json import (
    SCHEMA_VERSION,
    AttemptJson,
    DiagnosisJson,
    RankJson,
    verdict_json,
)
from overlapscope.report.report import Report, Section


def build_diagnosis_report(shown: Attempt, attempts: Sequence[Attempt]) -> Report:
    """Build the report of one attempt of a job.

    Args:
        attempts: All attempts of the job, if it was restarted.
    """
    return Report(
        facts=tuple(format_attempts(attempts)),
        sections=(build_diagnosis_section(shown.verdict, shown.evidence),),
        content=_collect_content(shown, attempts),
    )


def build_diagnosis_section(verdict: Verdict, evidence: Evidence) -> Section:
    """Build the one section: the verdict, and the text that the training prints below it, as it is."""
    headline, _, text = format_report(verdict, evidence).partition("\n")
    return Section(
        name="diagnosis",
        title="Diagnosis",
        headline=headline,
        preformatted=text,
        files=tuple(sorted({site.file for site in _list_call_sites(verdict, evidence) if site is not None})),
    )


def _list_call_sites(verdict: Verdict, evidence: Evidence) -> Iterator[CallSite | None]:
    """Yield the lines of code that a verdict and the positions of ranks name."""
    yield from verdict.call_sites.values()
    for window in verdict.windows.values():
        yield from (entry.call_site for entry in window)
    for one in evidence.ranks.values():
        yield one.position.call_site if one.position else None
        yield one.failure.call_site if one.failure else None


def collect_attempts(attempts: Sequence[Attempt]) -> list[AttemptJson]:
    """Return what the JSON says of the attempts of a job."""
    return [
        {
            "number": each.number,
            "path": str(each.path),
            "kind": each.verdict.kind,
            "sentence": each.verdict.sentence,
        }
        for each in attempts
    ]


def _collect_content(shown: Attempt, attempts: Sequence[Attempt]) -> DiagnosisJson:
    evidence = shown.evidence
    return {
        "schema": SCHEMA_VERSION,
        "path": str(shown.path),
        "attempts": collect_attempts(attempts),
        "verdict": verdict_json(shown.verdict, {rank: one.host for rank, one in evidence.ranks.items()}),
        "expected_ranks": evidence.expected_ranks,
        "ranks": [_rank(one) for _, one in sorted(evidence.ranks.items())],
        "groups": [
            {
                "name": group.name,
                "description": group.description,
                "ranks": group.ranks,
                "latest": group.latest,
                "first_divergence": group.first_divergence,
                "divergence": group.divergence,
            }
            for group in evidence.groups
        ],
        "gaps": evidence.gaps,
        "problems": shown.problems,
    }


def _rank(one: RankEvidence) -> RankJson:
    position = one.position
    return {
        "rank": one.rank,
        "host": one.host,
        "pid": one.pid,
        "liveness": one.liveness,
        "step": loop_step(position) if position else None,
        "phase": position.phase if position else None,
        "bucket": position.bucket if position else None,
        "call_site": position.call_site if position else None,
        "failure": one.failure,
        "unready": one.unready,
        "memory_bytes": one.rss_bytes,
        "memory_limit_bytes": one.memory_limit_bytes,
        "idle_ns": one.idle_ns,
        "machine": one.machine,
    }
