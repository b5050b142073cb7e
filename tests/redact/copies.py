"""Copies with pseudonyms, and what they must have in common with the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.redact.copy import CopiedRecording, redact_recording
from overlapscope.trace.confidential.pseudonyms import Pseudonyms


def redact(source: Path, target: Path, key: bytes = b"key") -> CopiedRecording:
    return redact_recording(source, target, Pseudonyms(key))


def find_verdict(folder: Path) -> Verdict:
    return judge(read_evidence(folder)[0])


def facts_of(verdict: Verdict) -> tuple[Any, ...]:
    """Everything that a verdict says but names."""
    named = (verdict.kind, verdict.blamed, verdict.suspected, verdict.concerned, verdict.certainty)
    where = (verdict.step, verdict.last_step, verdict.number, verdict.bucket, len(verdict.parameters))
    return *named, *where, {rank: site.line for rank, site in verdict.call_sites.items()}


def read_bytes(folder: Path) -> bytes:
    """Every byte of a folder, and the names of its files."""
    paths = sorted(folder.rglob("*"))
    return b"\n".join([*(str(path.relative_to(folder)).encode() for path in paths), *map(_content, paths)])


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
