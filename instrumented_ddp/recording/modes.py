"""Recording modes of this rank: what is recorded of each step, as ``overlapscope control`` asks for it."""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.environment import DEFAULT_EVERY, Detail
from overlapscope.trace.recording_modes import OFF, BegunMode, RecordingMode, is_full_step, read_control
from overlapscope.trace.schema import CONTROL_FILE, MODES_FILE

_log = logging.getLogger(__name__)

LOOK_INTERVAL_NS: Final = 200_000_000
"""Minimum time between two looks at the file, which take about 2 us each."""


class ModeFollower:
    """Follows the modes that this rank is asked for, and notes which it has begun.

    Asked between two steps, so that a step is recorded in one mode. A request names the first step, chosen far enough
    ahead for all ranks to see it in time; one that does not begins at once, and its note has both numbers.

    Args:
        folder: folder of this rank, inside the attempt's.
        every: which steps are recorded in full until a user asks for others, as in ``RecordingMode``.
        detail: level of detail until then.
    """

    def __init__(self, folder: Path, *, every: int, detail: Detail) -> None:
        self._control = folder.parent / CONTROL_FILE
        self._notes = folder / MODES_FILE
        self._asked = RecordingMode(from_step=-1, every=every, detail=detail)
        self._begun = DEFAULT_EVERY, detail
        self._coming: deque[RecordingMode] = deque()
        self._seen: tuple[int, int] | None = None
        self._next_look_ns = 0
        self.is_held = False
        """True while steps are recorded in full whatever was asked for, because they are measured."""
        self._was_held = False
        self.is_on = every != OFF
        """True if the step is recorded."""
        self.is_full = is_full_step(0, every)
        """True if the step is recorded in full."""
        self.is_marked = self.is_on
        """True if times are taken: the step is recorded, or the next one is, which begins with the end of this one."""
        self.detail: Detail = detail
        """Level of detail of full steps."""
        if every != DEFAULT_EVERY:
            self._note(0, every, detail)

    def on_step_start(self, step: int) -> None:
        """Decide what is recorded of the step that begins."""
        now_ns = host_now_ns()
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_INTERVAL_NS
            self._look()
        while self._coming and self._coming[0].from_step <= step:
            self._asked = self._coming.popleft()
        every = 1 if self.is_held else self._asked.every
        self.detail = self._asked.detail
        if (every, self.detail) != self._begun:
            self._note(step, every, self.detail)
        self._was_held = self.is_held
        self.is_on = every != OFF
        self.is_full = is_full_step(step, every)
        self.is_marked = self.is_on or self._begins_with(step + 1)

    def _begins_with(self, step: int) -> bool:
        return bool(self._coming) and self._coming[0].from_step == step and self._coming[0].every != OFF

    def _look(self) -> None:
        """Read the file if it has changed."""
        try:
            status = os.stat(self._control)
        except OSError:
            return
        if (seen := (status.st_mtime_ns, status.st_ino)) == self._seen:
            return
        self._seen = seen
        try:
            asked = read_control(self._control)
        except OverlapScopeError as error:  # replaced at once, so it is not half written
            _log.warning("%s; what is recorded stays as it is", error)
            return
        self._coming = deque(mode for mode in asked if mode.from_step > self._asked.from_step)

    def _note(self, step: int, every: int, detail: Detail) -> None:
        self._begun = every, detail
        is_by_measurement = self.is_held or self._was_held  # which all ranks begin and end at the same steps
        agreed_step = step if is_by_measurement else max(0, self._asked.from_step)
        begun = BegunMode(step=step, agreed_step=agreed_step, every=every, detail=detail, time_ns=host_now_ns())
        with suppress(OSError), self._notes.open("a", encoding="utf-8") as file:  # a full disk
            file.write(begun.to_json())
