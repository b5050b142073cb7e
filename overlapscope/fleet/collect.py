"""All runs in some folders or at URLs, read by workers; what is known from before is taken from the cache."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.fleet.fleet_run import FleetRun, read_run
from overlapscope.fleet.result_cache import compute_run_fingerprint, load_run, store_run
from overlapscope.trace.cache import CONTENTS_FILE
from overlapscope.trace.folders import attempt_number, find_rank_folders, is_remote
from overlapscope.trace.runs import find_runs
from overlapscope.trace.schema import TABLES_FOLDER
from overlapscope.workers import Workers

_LOST: Final = "it was not read: the process that was to read it died; is there too little memory?"


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """A run that is to be read: the latest attempt of a job."""

    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class FoundLocations:
    """The runs in some folders and at URLs."""

    runs: tuple[RunLocation, ...]
    left_out: tuple[str, ...] = ()
    """Folders that were not searched, and why."""


def find_locations(places: Sequence[Path]) -> FoundLocations:
    """Find all runs in some folders and below some URLs; of a restarted job, its latest attempt.

    Raises:
        OverlapScopeError: there are none, or a URL can't be read.
    """
    folders = [place for place in places if not is_remote(place)]
    for folder in folders:
        if not folder.is_dir():
            find_rank_folders(folder)  # says what is wrong
    found = find_runs(folders)
    runs = [RunLocation(name=run.name, path=run.latest) for run in found.runs]
    runs += [run for place in places if is_remote(place) for run in _find_remote(place)]
    if not runs:
        raise OverlapScopeError(
            f"{', '.join(map(str, places))}: no recording in it; record a run with "
            "'overlapscope record -o FOLDER -- torchrun ...'"
        )
    return FoundLocations(runs=tuple(runs), left_out=found.left_out)


def _find_remote(url: Path) -> Iterable[RunLocation]:
    """Return the runs below a URL that have tables."""
    try:
        contents = [*url.glob(f"**/{TABLES_FOLDER}/{CONTENTS_FILE}")]
    except Exception as error:  # each kind of storage has its own errors
        raise OverlapScopeError(f"{url}: can't be read ({' '.join(str(error).split())})") from None
    latest: dict[str, Path] = {}
    for run in sorted((each.parent.parent for each in contents), key=_attempt_of):
        latest[str(run.parent if _attempt_of(run) else run)] = run
    return [RunLocation(name=name, path=path) for name, path in sorted(latest.items())]


def _attempt_of(path: Path) -> int:
    return attempt_number(Path(path.name))


@dataclass(frozen=True, kw_only=True)
class _Task:
    location: RunLocation
    cache: Path | None


def read_runs(
    locations: Sequence[RunLocation],
    workers: Workers,
    cache_folder: Path | None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[FleetRun, ...]:
    """Read all runs, in their order.

    Args:
        cache_folder: folder of what is known from before, see ``result_cache``; None without.
        progress: called with (runs done, runs in all).
    """
    tasks = [_Task(location=location, cache=cache_folder) for location in locations]
    found: dict[int, FleetRun] = {}
    try:
        for index, run in workers.map(_read, tasks):
            found[index] = run
            if progress:
                progress(len(found), len(tasks))
    except OverlapScopeError:  # of workers that died, again and again: those that are left are too large
        if not found:
            raise
    return tuple(found.get(index) or _mark_lost(location) for index, location in enumerate(locations))


def _mark_lost(location: RunLocation) -> FleetRun:
    return FleetRun(name=location.name, path=str(location.path), state="unreadable", reason=_LOST)


@cache
def _freeze_loaded_modules() -> None:
    """Leave what a worker has loaded out of garbage collections: that makes each several times as quick."""
    if parent_process() is not None:
        gc.collect()
        gc.freeze()


def _read(task: _Task) -> FleetRun:
    """Read a run in a worker, or take it from the cache."""
    _freeze_loaded_modules()
    name, path, folder = task.location.name, task.location.path, task.cache
    # From before it is read: what changes meanwhile is read again the next time.
    fingerprint = "" if folder is None or is_remote(path) else compute_run_fingerprint(path)
    if folder is None or not fingerprint:
        return read_run(name, path)
    if (known := load_run(folder, path, fingerprint)) is not None:
        return replace(known, name=name)
    run = read_run(name, path)
    if run.state == "read":
        store_run(folder, path, fingerprint, run)
    return run


def drop_copies(runs: Sequence[FleetRun]) -> tuple[tuple[FleetRun, ...], int]:
    """Return the runs without copies of others, and how many these were."""
    seen: Counter[str] = Counter()
    kept = []
    for run in runs:
        if not run.identity or not seen[run.identity]:
            kept.append(run)
        seen[run.identity] += 1
    return tuple(kept), len(runs) - len(kept)
