"""Times in which a rank waited for collectives of user code, from its collective logs.

Only collectives on the host are included whose line waited for them to complete: for others, which are waited for later
or by a device, the log doesn't show how long the rank waited.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import read_lines
from overlapscope.trace.format import GROUP_PATTERN, SIGNATURES_FILE
from overlapscope.trace.group_file import CollectiveLogFile
from overlapscope.trace.group_log import AWAITED, ENTRY_DTYPE, Entries
from overlapscope.trace.log import Problem


def read_user_collectives(folder: Path, problems: list[Problem]) -> npt.NDArray[np.int64]:
    """Read begin and end of a rank's waits for user collectives, shape (2, n).

    Args:
        folder: folder of the rank.
        problems: receives a problem if the log has wrapped around. Other problems with logs are reported by
            ``group_reader``, when they are read for the order of collectives.
    """
    entries = _entries(folder, problems) if _has_user_collectives(folder) else np.empty(0, dtype=ENTRY_DTYPE)
    entries = entries[((entries["flags"] & AWAITED) != 0) & (entries["completed_ns"] > 0)]
    return np.stack([entries[name].astype(np.int64) for name in ("announced_ns", "completed_ns")])


def _has_user_collectives(folder: Path) -> bool:
    """Return whether a rank has user collectives, because reading logs takes long, and most trainings have none."""
    return any(read_lines(folder / SIGNATURES_FILE, [], lambda line: [line["role"] == "user"]))


def _entries(folder: Path, problems: list[Problem]) -> Entries:
    parts = [np.empty(0, dtype=ENTRY_DTYPE)]
    for path in sorted(folder.glob(GROUP_PATTERN)):
        try:
            log = CollectiveLogFile(path)
        except OverlapScopeError:
            continue
        entries = log.read(log.oldest, log.latest)
        if log.oldest > 1 and ((entries["flags"] & AWAITED) != 0).any():
            text = f"{path}: came round; waits in collectives of the user's own before entry {log.oldest} are not known"
            problems.append(Problem("note", text))
        parts.append(entries)
    return np.concatenate(parts)
