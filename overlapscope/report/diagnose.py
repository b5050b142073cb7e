"""JSON output of ``overlapscope diagnose``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from overlapscope.diagnosis.attempts import Attempt
from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.text import loop_step
from overlapscope.report.json import json_text


def as_json(shown: Attempt, attempts: Sequence[Attempt]) -> str:
    """Format the diagnosis as one JSON object; the help text of the command documents the keys.

    Args:
        attempts: all attempts of the job, if it was restarted.
    """
    evidence = shown.evidence
    content = {
        "path": str(shown.path),
        "attempts": attempts_json(attempts),
        "verdict": shown.verdict.as_dict(),
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
        "gaps": [asdict(gap) for gap in evidence.gaps],
        "problems": [{"severity": problem.severity, "message": problem.message} for problem in shown.problems],
    }
    return json_text(content)


def attempts_json(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return the attempts of a job as JSON objects."""
    return [
        {
            "number": each.number,
            "path": str(each.path),
            "kind": each.verdict.kind,
            "sentence": each.verdict.sentence,
        }
        for each in attempts
    ]


def _rank(one: RankEvidence) -> dict[str, Any]:
    position, failure = one.position, one.failure
    return {
        "rank": one.rank,
        "host": one.host,
        "pid": one.pid,
        "liveness": one.liveness,
        "step": loop_step(position) if position else None,
        "phase": position.phase if position else None,
        "bucket": position.bucket if position else None,
        "call_site": asdict(position.call_site) if position and position.call_site else None,
        "failure": asdict(failure) if failure else None,
        "unready": [asdict(parameter) for parameter in one.unready],
        "memory_bytes": one.rss_bytes,
        "memory_limit_bytes": one.memory_limit_bytes,
        "idle_ns": one.idle_ns,
    }
