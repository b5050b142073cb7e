"""The collectives of the user's own that a rank has waited for, from its collective logs.

Only those of the host count, whose line went on when they were over: how long a rank waits for one that is waited for
later, or by a device, is not in the log.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import read_lines
from overlapscope.trace.format import GROUP_PATTERN, SIGNATURES_FILE
from overlapscope.trace.group_file import GroupFile
from overlapscope.trace.group_log import AWAITED, ENTRY_DTYPE, Entries
from overlapscope.trace.log import Problem


def user_collectives(folder: Path, problems: list[Problem]) -> npt.NDArray[np.int64]:
    """(2, n) from when until when a rank waited for each of them.

    Args:
        folder: of the rank.
        problems: told if the log has come round. What else is wrong with logs ``group_reader`` says to those who read
            them for the order.
    """
    entries = _entries(folder, problems) if _has_any(folder) else np.empty(0, dtype=ENTRY_DTYPE)
    entries = entries[((entries["flags"] & AWAITED) != 0) & (entries["completed_ns"] > 0)]
    return np.stack([entries[name].astype(np.int64) for name in ("announced_ns", "completed_ns")])


def _has_any(folder: Path) -> bool:
    """Logs are long, and most trainings have none."""
    return any(read_lines(folder / SIGNATURES_FILE, [], lambda line: [line["role"] == "user"]))


def _entries(folder: Path, problems: list[Problem]) -> Entries:
    parts = [np.empty(0, dtype=ENTRY_DTYPE)]
    for path in sorted(folder.glob(GROUP_PATTERN)):
        try:
            log = GroupFile(path)
        except OverlapScopeError:
            continue
        entries = log.read(log.oldest, log.newest)
        if log.oldest > 1 and ((entries["flags"] & AWAITED) != 0).any():
            text = f"{path}: came round; waits in collectives of the user's own before entry {log.oldest} are not known"
            problems.append(Problem("note", text))
        parts.append(entries)
    return np.concatenate(parts)
