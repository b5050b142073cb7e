"""What a recording says of itself at once: from its small files and its newest records, while it runs or afterwards."""

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
"""Records read from the end of an event log: some steps, even with a record for each gradient."""


_MOST_TIMES: Final = 60
"""Step times above which neighbours are taken together: as many as a small picture shows."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of steps that follow each other."""

    first: int
    """Number of the first."""
    last: int
    times_ns: tuple[float, ...]
    """In their order; of many steps, means of neighbours."""

    @classmethod
    def of(cls, first: int, last: int, times_ns: Sequence[float] | npt.NDArray[np.float64]) -> StepTimes:
        """At least one, and any number of them."""
        parts = np.array_split(np.asarray(times_ns, dtype=np.float64), min(len(times_ns), _MOST_TIMES))
        return cls(first=first, last=last, times_ns=tuple(float(part.mean()) for part in parts))


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a recording is of, as far as it says so."""

    model: str = ""
    ranks: int | None = None
    device: str = ""
    """Kinds of devices: ``cpu``, ``cuda``."""
    started_unix_ns: int | None = None
    steps: int | None = None
    """Steps that its first rank has finished; None if that is none, or not known."""
    newest: StepTimes | None = None
    """Its newest ones, on its first rank; None if it has finished none."""
    newest_step_ns: float | None = None
    """How long a step takes now: the median of them."""


def run_facts(path: Path) -> RunFacts:
    """Read the facts of a recording, without its logs but for the end of one; of dumps, none.

    Args:
        path: of a recording, or of one of its attempts.
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
    """``cuda`` of ``cuda:3``."""
    return re.sub(r":\d+$", "", device) if isinstance(device, str) else ""


def _object_in(file: Path) -> dict[str, Any]:
    return read_json(file, []) if file.exists() else {}
