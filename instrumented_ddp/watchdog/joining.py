"""Says that this process is about to join the job, before it waits for the others in ``init_process_group``.

A rank that never gets there, or one that believes in another number of ranks, leaves the others waiting where nothing
is recorded yet and no watchdog runs. So each process writes down beforehand what it was told, and has a thread look now
and then who else of the run's folder has come as far.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from instrumented_ddp import clock
from instrumented_ddp.collective_log.call_sites import is_users_code
from instrumented_ddp.timing import host_now_ns
from instrumented_ddp.watchdog.reports import Reports, say
from overlapscope.diagnosis.from_logs import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report import report_text
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import recording_from_environment
from overlapscope.trace.format import JOINING_FILE, SIGNATURES_FILE, rank_folder, write_json

_LOOK_EVERY_S: Final = 0.5
_PATIENCE_S: Final = 10.0
"""Hosts import for different times. Different world sizes are said at once."""


@contextmanager
def joining(init_process_group: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Inside, this process waits for the others in ``init_process_group``, which is given these arguments."""
    place = _place(init_process_group, args, kwargs)
    if place is None:
        yield
        return
    folder, rank, world_size = place
    _announce(folder, rank, world_size)
    has_joined = threading.Event()
    threading.Thread(
        target=_watch, args=(folder, rank, world_size, has_joined), name="overlapscope-joining", daemon=True
    ).start()
    try:
        yield
    finally:
        has_joined.set()


def _place(
    init_process_group: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Path, int, int] | None:
    """The folder, rank and world size of this process; None if it is not recorded, or nobody knows them yet."""
    try:
        recording = recording_from_environment(None)
        given = inspect.signature(init_process_group).bind(*args, **kwargs).arguments
        rank = int(given.get("rank", -1))
        world_size = int(given.get("world_size", -1))
        rank = rank if rank >= 0 else int(os.environ["RANK"])
        world_size = world_size if world_size >= 0 else int(os.environ["WORLD_SIZE"])
    except (OverlapScopeError, TypeError, ValueError, KeyError):  # torch says so in its own words, if it can't know
        return None
    return None if recording is None else (rank_folder(recording.folder, rank), rank, world_size)


def _announce(folder: Path, rank: int, world_size: int) -> None:
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users_code(frame):
        frame = frame.f_back
    with suppress(OSError):  # whoever records later says what is wrong with the folder
        if (folder / SIGNATURES_FILE).exists():  # of a run before
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            folder / JOINING_FILE,
            {
                "rank": rank,
                "world_size": world_size,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "boot_id": clock.boot_identity(),
                "time_ns": host_now_ns(),
                "file": frame.f_code.co_filename,
                "line": frame.f_lineno,
                "function": frame.f_code.co_qualname,
            },
        )


def _watch(folder: Path, rank: int, world_size: int, has_joined: threading.Event) -> None:
    """Say once what keeps the others from coming, if that can be seen in the run's folder."""
    waited_s = 0.0
    while not has_joined.wait(_LOOK_EVERY_S):
        waited_s += _LOOK_EVERY_S
        sizes = _world_sizes(folder.parent)
        is_late = waited_s >= _PATIENCE_S and bool(set(range(world_size)) - sizes.keys())
        if is_late and os.environ.get("LOCAL_WORLD_SIZE") != str(world_size):
            # Ranks on other hosts may record to disks of their own: who is missing can't be told from here.
            say(f"overlapscope: rank {rank} has waited in init_process_group for {waited_s:.0f} s")
            return
        if is_late or len(set(sizes.values())) > 1:
            break
    else:
        return
    reports = Reports(folder)
    number = _report(folder, rank, reports, is_speaker=rank == min(sizes, default=rank))
    has_joined.wait()
    if number is not None:
        reports.retract(number)
        say(f"overlapscope: rank {rank} has joined after {waited_s:.0f} s or more: what it waited for has come")


def _report(folder: Path, rank: int, reports: Reports, *, is_speaker: bool) -> int | None:
    """Judge from what the ranks of this host have left.

    Returns:
        The number of the report, if something is wrong.
    """
    try:
        evidence, _ = read_evidence(folder.parent)
        verdict = judge(evidence)
    except OverlapScopeError:
        return None
    if verdict.kind not in ("never started", "wrong world size"):
        return None
    message = report_text(verdict, evidence)
    say(f"overlapscope: {message}" if is_speaker else f"overlapscope: rank {rank} waits in init_process_group")
    return reports.add(verdict.as_dict(), message, step=0, process_state="S")


def _world_sizes(trace_folder: Path) -> dict[int, int]:
    """What the ranks were told that have come as far, by rank."""
    sizes = {}
    for path in trace_folder.glob(f"rank_*/{JOINING_FILE}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_text(encoding="utf-8"))
            sizes[int(said["rank"])] = int(said["world_size"])
    return sizes
