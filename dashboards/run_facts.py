"""Basic facts of a recording that can be read at once, also while it runs: from small files and the latest records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.description import describe_models
from overlapscope.trace.event_log import read_latest_records, read_step_bounds
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.json_files import read_json
from overlapscope.trace.rank_folder import RankFolder
from overlapscope.trace.schema import EVENTS_FILE, RANK_FILE, RUN_FILE, Kind

_LATEST_RECORDS: Final = 2048
"""Number of records read from the end of an event log: some steps, even with a record for each gradient."""


_MAX_TIMES: Final = 60
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
        parts = np.array_split(np.asarray(times_ns, dtype=np.float64), min(len(times_ns), _MAX_TIMES))
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
    """Number of steps that its first rank has finished since the first recorded one, which is not step 0 in an imported
    profile; None if there are none, or if it is unknown."""
    latest: StepTimes | None = None
    """Times of its latest steps on its first rank; None if it has finished none."""
    latest_step_ns: float | None = None
    """Current step time: the median of these."""


def read_run_facts(path: Path) -> RunFacts:
    """Read the facts of a recording without reading its logs, except for the end of one; empty for dumps.

    Args:
        path: Folder of a recording, or of one of its attempts.
    """
    try:
        folders = find_rank_folders(path)
    except OverlapScopeError:
        return RunFacts()
    runs = (RankFolder(folder).run() for folder in folders.values() if (folder / RUN_FILE).exists())
    run = next((found for found in runs if found), {})
    world_size = run.get("world_size")
    devices = {_device_kind(_read_object(folder / RANK_FILE).get("device")) for folder in folders.values()}
    log = next(iter(folders.values())) / EVENTS_FILE
    records = read_latest_records(log, _LATEST_RECORDS)
    steps = records[records["kind"] == Kind.STEP]
    times_ns = steps["end_ns"] - steps["start_ns"]
    has_steps, numbers = bool(len(steps)), steps["step"]
    first = next(iter(read_step_bounds(log)), 0)
    return RunFacts(
        model=describe_models(run),
        ranks=world_size if isinstance(world_size, int) else len(folders),
        device=", ".join(sorted(devices - {""})),
        started_unix_ns=run.get("started_unix_ns"),
        steps=int(numbers[-1]) - first + 1 if has_steps else None,
        latest=StepTimes.of(int(numbers[0]), int(numbers[-1]), times_ns) if has_steps else None,
        latest_step_ns=float(np.median(times_ns)) if has_steps else None,
    )


def _device_kind(device: object) -> str:
    """Return the kind of a device: ``cuda`` for ``cuda:3``."""
    return re.sub(r":\d+$", "", device) if isinstance(device, str) else ""


def _read_object(file: Path) -> dict[str, Any]:
    return read_json(file, []) if file.exists() else {}
