"""Where a rank stood, for how long, and what its watchdog saw it do there, from its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapscope.diagnosis.entries import phase_name
from overlapscope.diagnosis.evidence import EarlierVerdict, Entry, Standing
from overlapscope.diagnosis.stacks import user_line
from overlapscope.trace.format import NO_INDEX, STACKS_PATTERN, Kind, Phase
from overlapscope.trace.log import Problem, Records
from overlapscope.trace.standstill import Standstill, read_standstill

_NOT_OF_THE_TRAINING: Final = (Kind.PAUSE, Kind.INCIDENT)
"""Garbage is collected, and a watchdog reports, while nothing goes on."""
_FATAL: Final = "Fatal Python error"
"""Marks the stacks of a process that aborts."""
_AFTER: Final = dict.fromkeys((Phase.BACKWARD, Phase.FINALISE, Phase.EVALUATION), "loop")
"""What a rank is in when a phase is over and no other has begun."""
_BETWEEN_STEPS: Final = (Phase.DATA_WAIT, Phase.LOOP)
"""Version 0.1 wrote the first, whatever the loop did."""
_LONGEST_STACKS_BYTES: Final = 64 * 1024


def standing_of(records: Records, newest: Entry | None, interrupted_ns: int | None = None) -> Standing | None:
    """Where the rank was: in the newest phase it entered; without an event log, what the newest collective says.

    Args:
        interrupted_ns: when the whole job was told to end. A wait that is left after that, and before its collective
            is over, was left for it, as by a ``KeyboardInterrupt`` that torch.multiprocessing.spawn passes over.
    """
    entered = records[records["kind"] == Kind.ENTER]
    if not len(entered):
        if newest is None:
            return None
        return Standing(step=newest.step, phase=newest.phase, call_site=newest.call_site, since_ns=newest.announced_ns)
    enter = entered[-1]
    phase = Phase(int(enter["index"]))
    until_ns = interrupted_ns if newest is not None and newest.state != "completed" else None
    site = newest.call_site if newest and newest.announced_ns >= int(enter["start_ns"]) else None
    step = int(enter["step"])
    if phase in _BETWEEN_STEPS:
        step += 1  # entered when the optimizer is done, with the number of its step, and belongs to the next one
    return Standing(
        step=step,
        phase=_AFTER.get(phase) if _is_over(records, enter, until_ns) else phase_name(phase),
        bucket=_next_bucket(records, enter) if phase is Phase.BACKWARD else None,
        call_site=site,
        since_ns=int(enter["start_ns"]),
        is_after_update=step > 0 and phase in (*_BETWEEN_STEPS, Phase.EVALUATION),
    )


def _is_over(records: Records, enter: Any, until_ns: int | None) -> bool:
    """Whether the phase that was entered has ended, by then if a time is given."""
    is_end = (records["kind"] == Kind.PHASE) & (records["sequence"] > enter["sequence"])
    is_end &= records["index"] == enter["index"]
    if until_ns is not None:
        is_end &= records["end_ns"] < until_ns
    return bool(is_end.any())


def with_line(
    standing: Standing | None, stacks: str, reports: tuple[EarlierVerdict, ...], *, is_of_now: bool
) -> Standing | None:
    """With the line that the stacks show, if they were written since."""
    if standing is None or standing.call_site is not None:
        return standing
    is_since = bool(reports) and reports[-1].time_ns >= standing.since_ns
    site = user_line(stacks) if is_since or is_of_now or _FATAL in stacks else None
    return standing if site is None else replace(standing, call_site=site)


def seen_in_this_standstill(
    folder: Path, records: Records, newest: Entry | None, problems: list[Problem]
) -> Standstill | None:
    """What the watchdog last saw, if nothing has happened since."""
    seen = read_standstill(folder, problems)
    return seen if seen is not None and seen.time_ns >= _newest_ns(records, newest) else None


def idle_ns(records: Records, newest: Entry | None, now_ns: int) -> int:
    """How long nothing has happened, or had happened when the rank was last heard from."""
    newest_ns = _newest_ns(records, newest)
    return max(0, now_ns - newest_ns) if newest_ns else 0


def stacks_of(folder: Path, seen: str | None) -> str:
    """The newest stacks from the watchdog, and those that faulthandler wrote at an abort.

    Args:
        seen: what it last saw; None if that is not of now.
    """
    found = {
        int(number): path
        for path in folder.glob(STACKS_PATTERN)
        if (number := path.stem.removeprefix("stacks_")).isdecimal()
    }
    newest = 0 if seen is not None else max(found, default=0)
    wanted = {path for number, path in found.items() if number in (0, newest)}
    texts = []
    for path in sorted(wanted):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                texts.append(file.read(_LONGEST_STACKS_BYTES))
        except OSError:
            continue
    return "\n".join(text for text in (*texts, seen or "") if text.strip())


def _next_bucket(records: Records, backward: Any) -> int | None:
    """None in a pass that has waited in between: its buckets were not all launched since, nor need they be in order."""
    before = records[(records["kind"] == Kind.ENTER) & (records["sequence"] < backward["sequence"])]
    if len(before) and before[-1]["index"] == Phase.FINALISE:
        return None
    is_launch = (records["kind"] == Kind.LAUNCH) & (records["sequence"] > backward["sequence"])
    launched = records["index"][is_launch & (records["index"] != NO_INDEX)]
    return int(launched.max()) + 1 if len(launched) else 0


def _newest_ns(records: Records, newest: Entry | None) -> int:
    """When the training last came to anything; 0 if it never did."""
    own = records[~np.isin(records["kind"], _NOT_OF_THE_TRAINING)]
    times = [int(own["end_ns"].max())] if len(own) else [0]
    if newest is not None:
        times += [newest.announced_ns, newest.completed_ns or 0]
    return max(times)
