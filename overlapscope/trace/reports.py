"""What the watchdogs have reported while a job ran, and what Python was doing on each rank then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.trace.format import RANK_FILE, REPORTS_FILE

_MOST_STACK_BYTES: Final = 200_000
"""More of it than this nobody reads; a damaged file may be of any size."""


@dataclass(frozen=True, kw_only=True)
class WatchdogReport:
    """One line of ``reports.jsonl``."""

    rank: int
    """Who says so."""
    number: int
    time_ns: int
    unix_ns: int | None
    """The same as Unix time; None if nobody noted the difference."""
    step: int | None
    kind: str
    """Of the verdict."""
    sentence: str
    """What had happened."""
    text: str
    """All that was printed then: the sentence, where ranks stood, the collectives around."""
    retracted_ns: int | None
    """When the watchdog saw that it had gone on after all."""
    stacks_path: Path

    @property
    def stacks(self) -> str:
        """Python threads of the rank at that time; empty if they are not there."""
        try:
            with self.stacks_path.open("rb") as file:
                return file.read(_MOST_STACK_BYTES).decode(errors="replace")
        except OSError:
            return ""


def read_reports(folders: Mapping[int, Path]) -> tuple[WatchdogReport, ...]:
    """The reports of all ranks, by time; of a report's lines the newest. Damaged lines are left out.

    Args:
        folders: of the ranks.
    """
    found: dict[tuple[int, int], WatchdogReport] = {}
    for rank, folder in folders.items():
        try:
            lines = (folder / REPORTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        to_unix_ns = _to_unix_ns(folder)
        for line in lines:
            try:
                report = _report(rank, folder, json.loads(line), to_unix_ns)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            found[rank, report.number] = report
    return tuple(sorted(found.values(), key=lambda report: (report.time_ns, report.rank)))


def _report(rank: int, folder: Path, line: dict[str, Any], to_unix_ns: int | None) -> WatchdogReport:
    number, time_ns = int(line["report"]), int(line["time_ns"])
    retracted_ns, step = line.get("retracted_ns"), line.get("step")
    verdict = line.get("verdict") or {}
    return WatchdogReport(
        rank=rank,
        number=number,
        time_ns=time_ns,
        unix_ns=None if to_unix_ns is None else time_ns + to_unix_ns,
        step=None if step is None else int(step),
        kind=str(verdict.get("kind", "")),
        sentence=str(verdict.get("sentence") or line.get("message", "")),
        text=str(line.get("message", "")),
        retracted_ns=None if retracted_ns is None else int(retracted_ns),
        stacks_path=folder / f"stacks_{number}.txt",
    )


def _to_unix_ns(folder: Path) -> int | None:
    try:
        sample = json.loads((folder / RANK_FILE).read_text(encoding="utf-8"))["clock_samples"][0]
        return int(sample["unix_ns"]) - int(sample["monotonic_ns"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
