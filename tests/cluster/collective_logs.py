"""What a rank has recorded of its collectives, and what its watchdog has reported, as tests compare it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overlapscope.trace.collective_log import Entries, Signature
from overlapscope.trace.collective_log_reader import open_collective_logs
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.schema import REPORTS_FILE, rank_folder

Logged = list[tuple[Signature, Any]]
"""Of each entry, in order: what it is, and its fields in the log."""


def logged(folder: Path, rank: int = 0) -> Logged:
    """All collectives of a rank, group by group in the order of their first use, of the groups that it is in."""
    logs = open_collective_logs(find_rank_folders(folder))
    assert not [problem for problem in logs.problems if problem.severity == "error"]
    signatures = logs.signatures(rank)
    found: Logged = []
    for files in (each for each in logs.groups.values() if rank in each):
        entries: Entries = files[rank].read(1, files[rank].latest)
        found += [(signatures[int(entry["signature"])], entry) for entry in entries]
    return found


def reports_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The reports of a rank's watchdog, in the order in which they were made."""
    path = rank_folder(folder, rank) / REPORTS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
