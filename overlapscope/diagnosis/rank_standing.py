"""Last known position of a rank, for how long it was there, and what its watchdog saw, from its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapscope.diagnosis.entries import phase_name
from overlapscope.diagnosis.evidence import Entry, RankPosition, ReportedVerdict
from overlapscope.diagnosis.stacks import find_user_line
from overlapscope.trace.format import NO_INDEX, STACKS_PATTERN, Kind, Phase
from overlapscope.trace.log import Problem, Records
from overlapscope.trace.standstill import StallSnapshot, read_stall_snapshot

_NON_PROGRESS_KINDS: Final = (Kind.PAUSE, Kind.INCIDENT)
"""Kinds of records that don't indicate progress: garbage collection and watchdog reports also occur during a stall."""
_FATAL: Final = "Fatal Python error"
"""Marker of the stacks of a process that aborts."""
_AFTER: Final = dict.fromkeys((Phase.BACKWARD, Phase.FINALIZE, Phase.EVALUATION), "loop")
"""Phase of a rank after a phase has ended and before another begins."""
_BETWEEN_STEPS: Final = (Phase.DATA_WAIT, Phase.LOOP)
"""Phases between steps; version 0.1 recorded only the first, whatever the loop did."""
_MAX_STACKS_BYTES: Final = 64 * 1024


def find_position(records: Records, latest: Entry | None, interrupted_ns: int | None = None) -> RankPosition | None:
    """Return the rank's position: the latest phase it entered; without an event log, that of the latest collective.

    Args:
        interrupted_ns: when the whole job was signaled to end. A wait that ends after that, and before its collective
            is complete, was aborted by the signal, as by a ``KeyboardInterrupt`` that torch.multiprocessing.spawn
            ignores.
    """
    entered = records[records["kind"] == Kind.PHASE_BEGIN]
    if not len(entered):
        if latest is None:
            return None
        return RankPosition(
            step=latest.step, phase=latest.phase, call_site=latest.call_site, since_ns=latest.announced_ns
        )
    enter = entered[-1]
    phase = Phase(int(enter["index"]))
    until_ns = interrupted_ns if latest is not None and latest.state != "completed" else None
    site = latest.call_site if latest and latest.announced_ns >= int(enter["start_ns"]) else None
    step = int(enter["step"])
    if phase in _BETWEEN_STEPS:
        step += 1  # entered after the optimizer step, with its number, but part of the next step
    return RankPosition(
        step=step,
        phase=_AFTER.get(phase) if _is_over(records, enter, until_ns) else phase_name(phase),
        bucket=_next_bucket(records, enter) if phase is Phase.BACKWARD else None,
        call_site=site,
        since_ns=int(enter["start_ns"]),
        is_after_update=step > 0 and phase in (*_BETWEEN_STEPS, Phase.EVALUATION),
    )


def _is_over(records: Records, enter: Any, until_ns: int | None) -> bool:
    """Return True if the phase that was entered has ended; if a time is given, by then."""
    is_end = (records["kind"] == Kind.PHASE) & (records["sequence"] > enter["sequence"])
    is_end &= records["index"] == enter["index"]
    if until_ns is not None:
        is_end &= records["end_ns"] < until_ns
    return bool(is_end.any())


def add_call_site(
    position: RankPosition | None, stacks: str, reports: tuple[ReportedVerdict, ...], *, is_current: bool
) -> RankPosition | None:
    """Add the line that the stacks show, if they were written since the rank reached this position."""
    if position is None or position.call_site is not None:
        return position
    is_since = bool(reports) and reports[-1].time_ns >= position.since_ns
    site = find_user_line(stacks) if is_since or is_current or _FATAL in stacks else None
    return position if site is None else replace(position, call_site=site)


def read_current_stall(
    folder: Path, records: Records, latest: Entry | None, problems: list[Problem]
) -> StallSnapshot | None:
    """Return the last stall snapshot of the watchdog, if there was no activity afterwards."""
    seen = read_stall_snapshot(folder, problems)
    return seen if seen is not None and seen.time_ns >= _newest_ns(records, latest) else None


def compute_idle_ns(records: Records, latest: Entry | None, now_ns: int) -> int:
    """Return how long there has been no activity, or had been when the rank was last heard from."""
    newest_ns = _newest_ns(records, latest)
    return max(0, now_ns - newest_ns) if newest_ns else 0


def read_stacks(folder: Path, seen: str | None) -> str:
    """Return the latest stacks from the watchdog, and those that faulthandler wrote on an abort.

    Args:
        seen: stacks of the current stall snapshot; None if there is none.
    """
    found = {
        int(number): path
        for path in folder.glob(STACKS_PATTERN)
        if (number := path.stem.removeprefix("stacks_")).isdecimal()
    }
    latest = 0 if seen is not None else max(found, default=0)
    wanted = {path for number, path in found.items() if number in (0, latest)}
    texts = []
    for path in sorted(wanted):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                texts.append(file.read(_MAX_STACKS_BYTES))
        except OSError:
            continue
    return "\n".join(text for text in (*texts, seen or "") if text.strip())


def _next_bucket(records: Records, backward: Any) -> int | None:
    """Return the next bucket of a backward; None if it has waited meanwhile: launches since may be out of order."""
    before = records[(records["kind"] == Kind.PHASE_BEGIN) & (records["sequence"] < backward["sequence"])]
    if len(before) and before[-1]["index"] == Phase.FINALIZE:
        return None
    is_launch = (records["kind"] == Kind.LAUNCH) & (records["sequence"] > backward["sequence"])
    launched = records["index"][is_launch & (records["index"] != NO_INDEX)]
    return int(launched.max()) + 1 if len(launched) else 0


def _newest_ns(records: Records, latest: Entry | None) -> int:
    """Return the time of the last activity of the training; 0 if there was none."""
    own = records[~np.isin(records["kind"], _NON_PROGRESS_KINDS)]
    times = [int(own["end_ns"].max())] if len(own) else [0]
    if latest is not None:
        times += [latest.announced_ns, latest.completed_ns or 0]
    return max(times)
