"""What this rank can say of itself: to its neighbours all the time, and to all in full when something is amiss."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from instrumented_ddp.clock import boot_identity
from instrumented_ddp.timing import host_now_ns
from instrumented_ddp.watchdog.comparison import head_of, read_gently
from instrumented_ddp.watchdog.process_state import (
    ProcessState,
    bytes_read_and_written,
    cpu_ns_of_children,
    look_at,
    memory_limit_bytes,
)
from instrumented_ddp.watchdog.stall import Rhythm
from overlapscope.diagnosis.evidence import CallSite, Failure, RankEvidence, Standing, Unreduced
from overlapscope.diagnosis.rank_models import models_of, unready_parameters
from overlapscope.trace.format import Phase
from overlapscope.trace.group_log import UNKNOWN_PHASE, GroupLog

if TYPE_CHECKING:
    from types import FrameType

    from instrumented_ddp.collective_log.collectives import Collectives

_WINDOW_BEFORE: Final = 6
_WINDOW_AFTER: Final = 8
_NEWEST: Final = 12
_FRAMES: Final = 12
_IN_FLIGHT: Final = 16
"""Collectives of a group that may be on the wire at the same time, or about."""
_ACTIVITY_OVER_NS: Final = 1_000_000_000
_MOVES: Final = 3
"""Places in Python's code, seen within a second, that tell work from waiting in a loop."""
_MUCH_DATA_BYTES: Final = 1024**2
_NOBODYS: Final = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
"""Between a line of the user's and where it waits may be Python's own."""


@dataclass(frozen=True)
class _Sample:
    time_ns: int
    cpu_ns: int
    data_bytes: int
    place: tuple[int, ...]


class OwnState:
    """Looks at this process.

    Args:
        collectives: of this process.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.rank = collectives.rank
        self.pid = os.getpid()
        self.process: ProcessState = look_at(self.pid)
        self.rhythm = Rhythm()
        self.failure: Failure | None = None
        self.how = "runs"
        """runs, ended, failed."""
        self._collectives = collectives
        self._host = socket.gethostname()
        self.host_id = _host_id()
        self.writes_stacks = False
        """faulthandler answers a signal in this process."""
        self._limit_bytes = memory_limit_bytes()
        self._beats = 0
        self._world_size = 1
        self._samples: deque[_Sample] = deque(maxlen=32)

    # -- now and then --------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Take a look.

        Returns:
            Whether anything has happened since the last one.
        """
        has_ended = [int(entry["completed_ns"] > 0) for entry in self._newest_entries()]
        mark = (*self._collectives.where(), self._phase_since_ns(), *(log.newest for log in self._logs), *has_ended)
        self.process = look_at(self.pid, self.process.start_ticks)
        return self.rhythm.observe(time.monotonic(), self.step if self._counts_steps else None, mark)

    def look_closely(self) -> None:
        """Take a sample of what it does, while it is asked whether it does anything."""
        cpu_ns = time.process_time_ns() + cpu_ns_of_children(self.pid)
        place = tuple(part for frame in self._frames()[:_FRAMES] for part in (id(frame.f_code), frame.f_lasti))
        self._samples.append(_Sample(host_now_ns(), cpu_ns, bytes_read_and_written(self.pid), place))

    @property
    def memory(self) -> tuple[int, int]:
        """Resident bytes, and the most there may be."""
        return self.process.resident_bytes, self._limit_bytes

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        if dist.is_initialized():
            self._world_size = dist.get_world_size()
        return self._world_size

    @property
    def step(self) -> int:
        """The optimizer step that it is in."""
        return self._collectives.where()[0]

    @property
    def progress(self) -> int:
        """Grows while the training goes on, and not because a collective fails: steps, else collectives."""
        return self.step if self._counts_steps else sum(log.newest for log in self._logs) // 2

    def waits_since_ns(self) -> int | None:
        """Since when it has been in a collective that has not ended; None if it is in none.

        That need not be the newest one: gloo runs two at a time, and the second may end first.
        """
        entries = (entry for log in self._logs for entry in log.read(max(1, log.newest - _IN_FLIGHT + 1), log.newest))
        waits = [int(e["announced_ns"]) for e in entries if not e["completed_ns"] and e["announced_ns"]]
        return min(waits, default=None)

    def beat(self) -> dict[str, Any]:
        """What neighbours are told all the time."""
        self._beats += 1
        heads = {}
        for log in self._logs:
            if not log.header.point_to_point and (head := head_of(log, self._collectives.signatures)) is not None:
                heads[log.header.name] = head.to_plain()
        return {
            "beat": self._beats,
            "rank": self.rank,
            "host": self._host,
            "host_id": self.host_id,
            "pid": self.pid,
            "started": self.process.start_ticks,
            "writes_stacks": self.writes_stacks,
            "time_ns": host_now_ns(),
            "failure": None if self.failure is None else asdict(self.failure),
            "how": self.how,
            "step": self.step,
            "phase": self._phase_name(),
            "since_ns": self._phase_since_ns(),
            "step_ns": self._step_ns(),
            "memory": self.memory,
            "heads": heads,
        }

    def standing_text(self) -> str:
        """Where it is, for people."""
        standing = self._standing()
        where = f" in {standing.call_site}" if standing.call_site is not None else ""
        phase = "" if standing.phase is None else f", {standing.phase.replace('_', ' ')}"
        return f"step {standing.step}{phase}{where}"

    # -- in full -------------------------------------------------------------------------------------------------

    def card(self, differences: Mapping[str, int], *, with_models: bool) -> dict[str, Any]:
        """Everything that is known here.

        Args:
            differences: by group, the number around which collectives are wanted; of others the newest are.
            with_models: also the parameters of all models, which are long.
        """
        signatures: set[int] = set()
        sites: set[int] = set()
        groups = []
        for log in self._logs:
            header = log.header
            first, last = log.newest - _NEWEST + 1, log.newest
            if header.name in differences and not header.point_to_point:
                number = differences[header.name]
                first, last = number - _WINDOW_BEFORE, number + _WINDOW_AFTER
            entries = [entry.tolist() for entry in read_gently(log, max(1, first), last)]
            signatures.update(entry[1] for entry in entries)
            sites.update(entry[2] for entry in entries)
            groups.append(
                {
                    "name": header.name,
                    "ranks": header.ranks,
                    "description": header.description,
                    "backend": header.backend,
                    "point_to_point": header.point_to_point,
                    "newest": log.newest,
                    "entries": entries,
                }
            )
        known = self._collectives.signatures
        return {
            "beat": self.beat(),
            "evidence": asdict(self.evidence(with_models=with_models)),
            "groups": groups,
            "signatures": [json.loads(known[n - 1].to_json(n)) for n in sorted(signatures) if 0 < n <= len(known)],
            "call_sites": {n: asdict(site) for n in sorted(sites) if (site := self._site(n)) is not None},
        }

    def evidence(self, *, with_models: bool) -> RankEvidence:
        """What the rules want to know of a rank."""
        now_s = time.monotonic()
        state = self.process.state
        folder = self._collectives.folder
        return RankEvidence(
            rank=self.rank,
            host=self._host,
            pid=self.pid,
            liveness="failed" if self.failure is not None else "running" if state == "R" else "sleeping",
            failure=self.failure,
            standing=self._standing(),
            steps_done=self.step,
            step_time_ns=self._step_ns(),
            idle_ns=round(self.rhythm.idle_s(now_s) * 1e9),
            heard_ns_ago=0,
            cpu_share=self._cpu_share(),
            is_working=self._is_working(),
            rss_bytes=self.memory[0],
            memory_limit_bytes=self.memory[1] or None,
            unready=unready_parameters(folder, []),
            models=models_of(folder, []) if with_models else (),
            unreduced=self._unreduced(),
            world_size=self.world_size,
            stacks=stacks(),
        )

    def _unreduced(self) -> Unreduced | None:
        what = self._collectives.unreduced
        if what is None:
            return None
        return Unreduced(model=what["model"], step=what["step"], call_site=self._site(what["call_site"]))

    def _standing(self) -> Standing:
        phase = self._phase_name()
        return Standing(
            step=self.step,
            phase=phase,
            bucket=self._next_bucket() if phase == "backward" else None,
            call_site=self._call_site(),
            since_ns=self._phase_since_ns(),
        )

    def _call_site(self) -> CallSite | None:
        """The line of the user's that runs, or has failed."""
        if self.failure is not None:
            return self.failure.call_site
        is_the_users = self._collectives.call_sites.is_the_users
        for frame in self._frames():
            code = frame.f_code
            is_nobodys = code.co_filename.startswith(_NOBODYS) and "site-packages" not in code.co_filename
            if is_the_users(frame) and not is_nobodys:
                return CallSite(file=code.co_filename, line=frame.f_lineno, function=code.co_qualname)
        return None

    def _next_bucket(self) -> int:
        """The bucket after the newest one of this step."""
        step, known = self.step, self._collectives.signatures
        for entry in self._newest_entries():
            number = int(entry["signature"])
            if 0 < number <= len(known) and known[number - 1].role == "bucket" and int(entry["step"]) == step:
                return known[number - 1].bucket + 1
        return 0

    def _phase_since_ns(self) -> int:
        recorder = self._collectives.recorder
        return 0 if recorder is None else recorder.phase_since_ns

    def _phase_name(self) -> str | None:
        phase = self._collectives.where()[1]
        return None if phase == UNKNOWN_PHASE else Phase(phase).name.lower()

    def _step_ns(self) -> int | None:
        step_s = self.rhythm.step_s
        return None if step_s is None else round(step_s * 1e9)

    def _cpu_share(self) -> float | None:
        now = self._samples[-1] if self._samples else None
        before = self._sample_before(now)
        if now is None or before is None or now.time_ns == before.time_ns:
            return None
        return (now.cpu_ns - before.cpu_ns) / (now.time_ns - before.time_ns)

    def _is_working(self) -> bool | None:
        """It moves through Python's code, or reads and writes. What CPU it uses is said apart."""
        now = self._samples[-1] if self._samples else None
        before = self._sample_before(now)
        if now is None or before is None:
            return None
        recent = {sample.place for sample in self._samples if sample.time_ns >= before.time_ns}
        return (
            len(recent) >= _MOVES or now.data_bytes - before.data_bytes >= _MUCH_DATA_BYTES or self.process.state == "D"
        )

    def _sample_before(self, now: _Sample | None) -> _Sample | None:
        """The oldest sample of the last second or so."""
        if now is None:
            return None
        return next((s for s in self._samples if now.time_ns - s.time_ns <= 1.5 * _ACTIVITY_OVER_NS), None)

    # -- small parts ---------------------------------------------------------------------------------------------

    @property
    def _logs(self) -> list[GroupLog]:
        return list(self._collectives.logs)

    @property
    def _counts_steps(self) -> bool:
        return self._collectives.recorder is not None or self.step > 0

    def _newest_entries(self) -> list[Any]:
        """Of each group."""
        return [entry for log in self._logs for entry in log.read(log.newest, log.newest)]

    def _site(self, number: int) -> CallSite | None:
        place = self._collectives.call_sites.place(number)
        return None if place is None else CallSite(file=place[0], line=place[1], function=place[2])

    def _frames(self) -> list[FrameType]:
        """Of the main thread, the innermost first."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames


def _host_id() -> str:
    """Processes that have this in common see each other in /proc, and share a clock."""
    with suppress(OSError):
        return f"{boot_identity()} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {os.getpid()}"


def stacks() -> str:
    """What Python is doing, on all threads, as faulthandler says it."""
    with suppress(OSError, RuntimeError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""
