"""Basic facts of a recording that can be read at once, also while it runs: from small files and the latest records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapscope.analysis.models import describe_models
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import find_rank_folders, read_json
from overlapscope.trace.format import EVENTS_FILE, RANK_FILE, RUN_FILE, Kind
from overlapscope.trace.log import newest_records

_NEWEST_RECORDS: Final = 2048
"""Number of records read from the end of an event log: some steps, even with a record for each gradient."""


_MOST_TIMES: Final = 60
"""Maximum number of step times, as many as a small chart shows: of more, neighbors are averaged."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of consecutive steps."""

    first: int
    """Number of the first step."""
    last: int
    """Number of the last step."""
    times_ns: tuple[float, ...]
    """Step times in order; of many steps, means of neighbors."""

    @classmethod
    def of(cls, first: int, last: int, times_ns: Sequence[float] | npt.NDArray[np.float64]) -> StepTimes:
        """Create from one or more step times."""
        parts = np.array_split(np.asarray(times_ns, dtype=np.float64), min(len(times_ns), _MOST_TIMES))
        return cls(first=first, last=last, times_ns=tuple(float(part.mean()) for part in parts))


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Basic facts of a recording, as far as they are recorded."""

    model: str = ""
    ranks: int | None = None
    device: str = ""
    """Kinds of devices: ``cpu``, ``cuda``."""
    started_unix_ns: int | None = None
    steps: int | None = None
    """Number of steps that its first rank has finished; None if there are none, or if it is unknown."""
    newest: StepTimes | None = None
    """Times of its latest steps on its first rank; None if it has finished none."""
    newest_step_ns: float | None = None
    """Current step time: the median of these."""


def run_facts(path: Path) -> RunFacts:
    """Read the facts of a recording without reading its logs, except for the end of one; empty for dumps.

    Args:
        path: Folder of a recording, or of one of its attempts.
    """
    try:
        folders = find_rank_folders(path)
    except OverlapScopeError:
        return RunFacts()
    runs = (_object_in(folder / RUN_FILE) for folder in folders.values())
    run = next((found for found in runs if found), {})
    world_size, started_ns = run.get("world_size"), run.get("started_unix_ns")
    devices = {_kind_of(_object_in(folder / RANK_FILE).get("device")) for folder in folders.values()}
    records = newest_records(next(iter(folders.values())) / EVENTS_FILE, _NEWEST_RECORDS)
    steps = records[records["kind"] == Kind.STEP]
    times_ns = steps["end_ns"] - steps["start_ns"]
    has_steps, numbers = bool(len(steps)), steps["step"]
    return RunFacts(
        model=describe_models(run),
        ranks=world_size if isinstance(world_size, int) else len(folders),
        device=", ".join(sorted(devices - {""})),
        started_unix_ns=started_ns if isinstance(started_ns, int) else None,
        steps=int(numbers[-1]) + 1 if has_steps else None,
        newest=StepTimes.of(int(numbers[0]), int(numbers[-1]), times_ns) if has_steps else None,
        newest_step_ns=float(np.median(times_ns)) if has_steps else None,
    )


def _kind_of(device: object) -> str:
    """Return the kind of a device: ``cuda`` for ``cuda:3``."""
    return re.sub(r":\d+$", "", device) if isinstance(device, str) else ""


def _object_in(file: Path) -> dict[str, Any]:
    return read_json(file, []) if file.exists() else {}
