"""Detection of missing ranks in ``init_process_group``, where nothing is recorded yet and no watchdog runs.

A rank that never gets there, or was given another world size, leaves the others waiting. So each process first writes
down its rank and world size, and a thread polls which ranks in the run's folder have done the same. A process may call
it again, after ``destroy_process_group``: calls are numbered, and compared with the same call of other ranks.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from instrumented_ddp.collectives.call_sites import describe_frame, find_user_frame
from instrumented_ddp.recording.console import log_to_stderr
from instrumented_ddp.recording.metadata import collect_environment, collect_versions, find_attempt_folder
from overlapscope.diagnosis.evidence import JOINING, STARTING, CallSite
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report_text import format_report
from overlapscope.errors import OverlapScopeError
from overlapscope.text import capitalize, rank_list
from overlapscope.trace import clocks
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.early_ends import EARLY_END_PATTERN, find_run_folder
from overlapscope.trace.environment import read_recording_options
from overlapscope.trace.json_files import parse_json_text, write_json
from overlapscope.trace.process_files import EXITS_PATTERN, ReportLog
from overlapscope.trace.schema import JOINING_FILE, REJOINING_FILE, SIGNATURES_FILE, rank_folder

_log: Final = logging.getLogger(__name__)

_POLL_INTERVAL_S: Final = 0.5
_RETRACT_TIMEOUT_S: Final = 2.0
_calls: Final[list[InitCall]] = []
"""Calls of this process so far: the latest one, if there was any."""
_EARLY_ENDS: Final = ("failed", "out of memory", "killed")
"""Kinds of verdicts on ranks that ended before they joined."""
_is_joining: Final = threading.Event()
"""Set while a process joins: with ``attach`` in a script under ``overlapscope record`` the call is seen twice."""
_MIN_WAIT_S: Final = 10.0
"""Minimum wait in seconds, as hosts take different times to import. Different world sizes are reported at once."""


@dataclass(kw_only=True)
class InitCall:
    """A call of ``init_process_group`` by this process."""

    number: int
    """Number of the call, from 1."""
    folder: Path
    rank: int
    world_size: int
    call_site: CallSite | None
    since_ns: int
    has_joined: bool = False
    """True if all ranks have joined."""


def get_latest_init_call() -> InitCall | None:
    """Return the latest call of ``init_process_group`` of this process; None if it is not recorded."""
    return _calls[-1] if _calls else None


@contextmanager
def watch_rendezvous(
    init_process_group: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Watch the wait for the other ranks in ``init_process_group``, which gets these arguments and runs inside."""
    watch = None if _is_joining.is_set() else _begin(init_process_group, args, kwargs)
    if watch is None:
        yield
        return
    _is_joining.set()
    try:
        yield
        watch.on_joined()
    finally:
        _is_joining.clear()
        watch.end()


class _JoinWatcher:
    """A thread that watches whether the other ranks join."""

    def __init__(self, call: InitCall) -> None:
        self._call = call
        self._is_over = threading.Event()
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="overlapscope-joining", daemon=True)
        self._thread.start()

    def on_joined(self) -> None:
        """Note that all ranks have joined; if that is never noted, this process has given up."""
        self._call.has_joined = True
        if self._call.number > 1:
            _write_call(self._call)

    def end(self) -> None:
        """Stop watching, and wait until a report is retracted: before other parts write reports here."""
        self._is_over.set()
        self._thread.join(_RETRACT_TIMEOUT_S)

    def _watch(self) -> None:
        """Report once why ranks are missing, if the run's folder shows it, and retract the report if they join."""
        rank, world_size, folder = self._call.rank, self._call.world_size, self._call.folder
        known_ends = 0
        while not self._is_over.wait(_POLL_INTERVAL_S):
            sizes = _world_sizes(folder.parent, self._call.number)
            ends = _count_ends(folder.parent)
            is_late = self._waited_s() >= _MIN_WAIT_S and bool(set(range(world_size)) - sizes.keys())
            if is_late and os.environ.get("LOCAL_WORLD_SIZE") != str(world_size):
                # Ranks on other hosts may record to local disks: from here it is unknown who is missing.
                _log.warning("rank %d has waited in init_process_group for %.0f s", rank, self._waited_s())
                return
            has_new_end, known_ends = ends > known_ends, ends
            if not (is_late or has_new_end or len(set(sizes.values())) > 1):
                continue
            # Once there is a watchdog, it writes the reports of this process.
            reports = ReportLog(folder) if self._call.number == 1 else None
            is_reporter = rank == min(sizes, default=rank)
            reported = _report(folder, rank, reports, is_reporter=is_reporter)
            if reported is not None or not has_new_end:
                break
        else:
            return
        self._is_over.wait()
        if reported is not None and self._call.has_joined:
            self._retract(*reported, reports, is_reporter=is_reporter)

    def _retract(self, number: int, who: str, reports: ReportLog | None, *, is_reporter: bool) -> None:
        if reports is not None:
            reports.retract(number)
        if is_reporter:
            _log.warning("%s joined after %.1f s: the report is withdrawn", who, self._waited_s())

    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s


def _begin(
    init_process_group: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _JoinWatcher | None:
    """Start watching; return None if this process is not recorded, or can't be watched."""
    try:
        log_to_stderr()
        identity = _process_identity(init_process_group, args, kwargs)
        if identity is None:
            return None
        frame = find_user_frame(sys._getframe(1))
        call = InitCall(
            number=_calls[-1].number + 1 if _calls and _has_recorded(_calls[-1].folder) else 1,
            folder=identity[0],
            rank=identity[1],
            world_size=identity[2],
            call_site=None if frame is None else CallSite(**describe_frame(frame)),
            since_ns=host_now_ns(),
        )
        if call.number > 1:  # it may be given another rank
            call.folder = _calls[-1].folder
        _calls[:] = [call]
        _write_call(call)
        return _JoinWatcher(call)
    except Exception as error:
        _log.debug("its wait in init_process_group is not watched: %r", error)
        return None


def _process_identity(
    init_process_group: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Path, int, int] | None:
    """Return the folder, rank and world size of this process; None if it is not recorded, or they are unknown."""
    try:
        recording = read_recording_options(None)
        given = inspect.signature(init_process_group).bind(*args, **kwargs).arguments
        rank = int(given.get("rank", -1))
        world_size = int(given.get("world_size", -1))
        rank = rank if rank >= 0 else int(os.environ["RANK"])
        world_size = world_size if world_size >= 0 else int(os.environ["WORLD_SIZE"])
    except (OverlapScopeError, TypeError, ValueError, KeyError):  # if they are unknown, torch raises its own error
        return None
    return (
        None
        if recording is None
        else (rank_folder(find_attempt_folder(recording.folder, rank), rank), rank, world_size)
    )


def _has_recorded(folder: Path) -> bool:
    return (folder / SIGNATURES_FILE).exists()


def _write_call(call: InitCall) -> None:
    """Write down a call before it waits: the first one, which says most, and the latest."""
    content = {
        "rank": call.rank,
        "world_size": call.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": clocks.get_boot_id(),
        "time_ns": call.since_ns,
        **({} if call.call_site is None else asdict(call.call_site)),
    }
    with suppress(OSError):  # the recorder reports problems with the folder later
        if call.number > 1:
            write_json(call.folder / REJOINING_FILE, content | {"call": call.number, "has_joined": call.has_joined})
        elif not _has_recorded(call.folder):  # left by a previous run
            call.folder.mkdir(parents=True, exist_ok=True)
            versions, environment = collect_versions(), collect_environment()
            write_json(call.folder / JOINING_FILE, content | {"versions": versions, "environment": environment})


def _report(folder: Path, rank: int, reports: ReportLog | None, *, is_reporter: bool) -> tuple[int, str] | None:
    """Judge from the files of the ranks on this host.

    Args:
        reports: log to which the report is added; None if another part of this process keeps it.

    Returns:
        The number of the report, or 0, and the ranks at fault as text; None if nothing is wrong.
    """
    try:
        evidence, _ = read_evidence(folder.parent)
        verdict = judge(evidence)
    except OverlapScopeError:
        return None
    has_joined = {
        each
        for each, one in evidence.ranks.items()
        if one.position is None or one.position.phase not in (STARTING, JOINING)
    }
    is_before_joining = verdict.kind in _EARLY_ENDS and not has_joined & set(verdict.blamed or verdict.concerned)
    if verdict.kind not in ("never started", "wrong world size") and not is_before_joining:
        return None
    message = format_report(verdict, evidence)
    if is_reporter:
        _log.warning(message)
    else:
        _log.warning("rank %d waits in init_process_group", rank)
    number = 0 if reports is None else reports.add(verdict.as_dict(), message, step=0, process_state="S")
    return number, capitalize(rank_list(verdict.blamed)) if verdict.blamed else "All ranks"


def _count_ends(trace_folder: Path) -> int:
    """Return how much is known of processes that have ended: those that had not joined, and children of launchers."""
    early = list(find_run_folder(trace_folder).glob(EARLY_END_PATTERN))
    with suppress(OSError):
        return len(early) + sum(path.stat().st_size for path in trace_folder.glob(EXITS_PATTERN))
    return len(early)


def _world_sizes(trace_folder: Path, call: int) -> dict[int, int]:
    """Return the world size that each rank that came this far was given in one of its calls, by rank."""
    sizes = {}
    for path in trace_folder.glob(f"rank_*/{JOINING_FILE if call == 1 else REJOINING_FILE}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = parse_json_text(path.read_bytes())
            if int(content.get("call", 1)) == call:
                sizes[int(content["rank"])] = int(content["world_size"])
    return sizes
