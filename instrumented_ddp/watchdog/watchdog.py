"""Watches a rank while it trains: compares its collectives with its neighbours', and notices when nothing goes on.

A thread per rank. It holds no lock that the training waits for beyond a look at a few entries of a log, never touches
a device, and talks to the other ranks on yet another thread (``watchdog_channel``). What it finds it hands to the
rules of ``overlapscope.diagnosis``, which also judge a job that is over.
"""

from __future__ import annotations

import json
import os
import random
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from instrumented_ddp.timing import host_now_ns
from instrumented_ddp.watchdog.channel import Board, Channel, FolderBoard, Round, connect, sees_all_ranks
from instrumented_ddp.watchdog.held_stacks import HeldStacks
from instrumented_ddp.watchdog.inquiry import Inquiry
from instrumented_ddp.watchdog.live_evidence import Pointer, liveness_of
from instrumented_ddp.watchdog.neighbours import Neighbours, neighbours_of
from instrumented_ddp.watchdog.own_state import OwnState
from instrumented_ddp.watchdog.process_state import look_at
from instrumented_ddp.watchdog.reports import Reports, say
from instrumented_ddp.watchdog.stall import PATIENCE_WITH_THE_DEAD_S
from instrumented_ddp.watchdog.stopping import EXIT_CODE, listening, stop_training
from overlapscope.diagnosis.evidence import CallSite, Failure
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report import report_text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.format import ALIVE_FILE, WATCHDOG_FOLDER
from overlapscope.trace.group_log import GroupLog

if TYPE_CHECKING:
    from instrumented_ddp.collective_log.collectives import Collectives

_USUAL_INTERVAL_S: Final = 0.5
_FIRST_INTERVAL_S: Final = 0.1
_LEARNS_FOR_S: Final = 5.0
_INTERVAL_WHEN_IDLE_S: Final = 0.25
_INTERVAL_OF_INQUIRY_S: Final = 0.08
_IDLE_AFTER_S: Final = 0.8
_MOST_ROUNDS: Final = 3
"""Each time that it wakes: one is enough unless there are questions or alarms."""
_CLOSE_LOOKS_S: Final = 2.0
"""Before somebody may lose patience, it is looked at closely what this process does."""
_ANSWER_WITHIN_S: Final = 1.0
_SILENT_ROUNDS: Final = 2
_LAST_WORDS_S: Final = 2.5
"""How long a process that fails waits for the others to say what they know."""
_FAREWELL_S: Final = 0.3
_ALIVE: Final = struct.Struct("<qqq")
_NO_FAULT: Final = ("KeyboardInterrupt", "SystemExit", "IncidentError")
"""Exceptions by which somebody ends the job on purpose."""
_STALLS: Final = ("stuck", "waits for data", "holds the GIL", "stopped", "gradients never ready", "uneven inputs")
"""What is retracted if the job goes on."""


class Watchdog:
    """Watches this process.

    Args:
        collectives: of this process.
        stops_job: what it finds ends the training, on all ranks.
    """

    def __init__(self, collectives: Collectives, *, stops_job: bool = False) -> None:
        self._stops_job = stops_job
        self._collectives = collectives
        self._own = OwnState(collectives)
        self._neighbours = Neighbours(collectives.rank, collectives.signatures)
        self._reports = Reports(collectives.folder)
        self._beats: dict[int, dict[str, Any]] = {}
        self._pointers: list[Pointer] = []
        self._alarms = 0
        self._inquiry: Inquiry | None = None
        self._raising: dict[str, Any] | None = None
        self._reported: set[tuple[Any, ...]] = set()
        self._quiet_until_idle_s = 0.0
        self._retractable: tuple[int, int, bool] | None = None
        self._channel: Channel | None = None
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._rounds_without_answer = 0
        self._uses_folder = False
        self._put_down = (0, False)
        self._closing = False
        self._wake = threading.Event()
        self._failure_is_told = threading.Event()
        self._held_stacks: HeldStacks | None = None
        with suppress(OSError, RuntimeError, ValueError):
            self._held_stacks = HeldStacks(collectives.folder)
            self._own.writes_stacks = True
        self._thread = threading.Thread(target=self._run, name="overlapscope-watchdog", daemon=True)
        self._thread.start()

    # -- called on the training thread ---------------------------------------------------------------------------

    def failed(self, what: dict[str, Any]) -> None:
        """An exception ends this process. Tell the others, and hear what they know, for a moment.

        Args:
            what: as in ``ended.json``.
        """
        if os.getpid() != self._own.pid or not self._thread.is_alive() or what["type"] in _NO_FAULT:
            return
        site = None
        if "file" in what:
            site = CallSite(file=what["file"], line=what["line"], function=what["function"])
        self._own.failure = Failure(
            type=what["type"],
            message=what["message"],
            call_site=site,
            traceback=what["traceback"],
            time_ns=host_now_ns(),
        )
        self._own.how = "failed"
        self._wake.set()
        self._failure_is_told.wait(_LAST_WORDS_S)

    def close(self) -> None:
        """Say farewell. May be called twice."""
        if os.getpid() != self._own.pid:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(2 * _FAREWELL_S)
        if self._held_stacks is not None:
            self._held_stacks.close()
            self._held_stacks = None

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            with (self._collectives.folder / ALIVE_FILE).open("wb", buffering=0) as alive:
                while not self._closing:
                    self._say_that_it_lives(alive)
                    self._look()
                    self._wake.wait(self._interval_s(time.monotonic() - began_s))
                    self._wake.clear()
            self._say_farewell()
        except Exception as error:
            self._failure_is_told.set()
            if not self._closing:
                say(f"overlapscope: rank {self._own.rank}: the watchdog has failed and watches no more: {error!r}")

    def _interval_s(self, age_s: float) -> float:
        if self._inquiry is not None or self._raising is not None or self._neighbours.awaited():
            return _INTERVAL_OF_INQUIRY_S
        if self._own.rhythm.idle_s(time.monotonic()) > _IDLE_AFTER_S:
            interval_s = _INTERVAL_WHEN_IDLE_S
        else:
            share = min(1.0, age_s / _LEARNS_FOR_S)
            interval_s = _FIRST_INTERVAL_S + (_USUAL_INTERVAL_S - _FIRST_INTERVAL_S) * share
        return interval_s * random.uniform(0.8, 1.0)  # ranks began together, and shall not ask all at the same time

    def _say_that_it_lives(self, alive: Any) -> None:
        with suppress(OSError):
            alive.seek(0)
            alive.write(_ALIVE.pack(host_now_ns(), *self._own.memory))

    def _look(self) -> None:
        own = self._own
        has_advanced = own.look()
        if has_advanced:
            self._quiet_until_idle_s = 0.0
        idle_s = own.rhythm.idle_s(time.monotonic())
        if self._inquiry is not None or idle_s > max(_IDLE_AFTER_S, own.rhythm.limit_s - _CLOSE_LOOKS_S):
            own.look_closely()
        self._retract_if_it_goes_on()
        if self._inquiry is None and self._raising is None:
            self._raising = self._alarm()
        for _ in range(_MOST_ROUNDS):
            if not self._talk():
                break
        if self._inquiry is not None:
            self._proceed(self._inquiry)

    def _alarm(self) -> dict[str, Any] | None:
        """What is amiss here, if anything is."""
        own, now_s = self._own, time.monotonic()
        if own.failure is not None and not self._failure_is_told.is_set():
            return {"by": own.rank, "why": "failure"}
        if self._collectives.unreduced is not None and ("not reduced",) not in self._reported:
            self._reported.add(("not reduced",))
            return {"by": own.rank, "why": "not reduced"}
        waits_since_ns = own.waits_since_ns()
        if waits_since_ns is None:
            return None
        idle_s = min(own.rhythm.idle_s(now_s), (host_now_ns() - waits_since_ns) / 1e9)
        limit_s = own.rhythm.limit_s
        if self._somebody_is_gone():
            limit_s = PATIENCE_WITH_THE_DEAD_S
        if idle_s >= max(limit_s, self._quiet_until_idle_s):
            return {"by": own.rank, "why": "stall"}
        return None

    def _somebody_is_gone(self) -> bool:
        return any(
            beat["host_id"] == self._own.host_id
            and liveness_of(beat, look_at(int(beat["pid"]), int(beat["started"])), None) == "gone"
            for beat in self._beats.values()
        )

    # -- talking -------------------------------------------------------------------------------------------------

    def _talk(self) -> bool:
        """One round over the board: say where this rank is, hear where its neighbours are.

        Returns:
            Whether there is more to say at once.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            self._leave_the_board()
            return False
        if self._group() is not _get_default_group():  # of another store
            self._leave_the_board()
            self._group = weakref.ref(_get_default_group())
        logs, own, inquiry = list(self._collectives.logs), self._own, self._inquiry
        neighbours = sorted({rank for ranks in neighbours_of(logs, own.rank).values() for rank in ranks})
        next_alarm = f"alarm.{self._alarms + 1}"
        says = {f"beat.{own.rank}": json.dumps(own.beat() | {"asks": self._neighbours.questions()})}
        says |= self._neighbours.answers(logs, self._beats)
        claims: dict[str, str] = {}
        asks = [*(f"beat.{rank}" for rank in neighbours), *self._neighbours.awaited()]
        if inquiry is None:
            asks.append(next_alarm)
            if self._raising is not None:
                claims[next_alarm] = json.dumps(self._raising)
        else:
            says |= self._card_for(inquiry)
            claims |= inquiry.claims
            asks += inquiry.asks
        answers = self._exchange(Round(says=says, asks=asks, claims=claims))
        if answers is None:
            return False
        self._beats |= {rank: json.loads(answers[key]) for rank in neighbours if (key := f"beat.{rank}") in answers}
        if inquiry is not None:
            inquiry.hear(answers)
        elif next_alarm in answers:
            self._begin_inquiry(json.loads(answers[next_alarm]))
            return True
        return self._compare(logs, answers)

    def _card_for(self, inquiry: Inquiry) -> dict[str, str]:
        """This rank's card, unless it has been put down and nothing has come to it."""
        edition = (inquiry.number, self._own.failure is not None)
        if edition == self._put_down:
            return {}
        self._put_down = edition
        # Ranks that have different models fail when these are wrapped, or launch different buckets.
        may_be_the_models = self._own.failure is not None or self._own.step == 0 or bool(self._pointers)
        card = self._own.card({one.group: one.number for one in self._pointers}, with_models=may_be_the_models)
        card["listening"] = listening() if self._stops_job else []
        return {f"card.{inquiry.number}.{self._own.rank}": json.dumps(card)}

    def _compare(self, logs: list[GroupLog], answers: dict[str, bytes]) -> bool:
        """Compare with the neighbours.

        Returns:
            Whether there is something to ask them, to tell them, or to raise an alarm about.
        """
        asked_before = self._neighbours.questions()
        self._neighbours.look(logs, self._beats)
        found = self._neighbours.hear(answers)
        for pointer in found:
            self._add_pointer(pointer)
            self._raising = {"by": self._own.rank, "why": "difference", **asdict(pointer)}
        has_asked = self._neighbours.questions() != asked_before
        return has_asked or self._neighbours.is_asked(self._beats) or (bool(found) and self._inquiry is None)

    def _exchange(self, round_: Round) -> dict[str, bytes] | None:
        if self._channel is None:
            self._channel = Channel(self._connect)
        done = self._channel.exchange(round_, _ANSWER_WITHIN_S)
        if done is not None and done.error is None:
            self._rounds_without_answer = 0
            return done.answers
        self._rounds_without_answer += 1
        self._put_down = (0, False)
        is_amiss = self._own.failure is not None or self._own.rhythm.idle_s(time.monotonic()) > _IDLE_AFTER_S
        if self._rounds_without_answer >= _SILENT_ROUNDS and is_amiss and not self._uses_folder:
            if sees_all_ranks(self._collectives.folder.parent, self._own.world_size):
                self._uses_folder = True
                self._channel = Channel(self._connect)
            else:
                self._speak_alone(done)
        return None

    def _connect(self) -> Board:
        run_folder = self._collectives.folder.parent
        if self._uses_folder:
            return FolderBoard(run_folder / WATCHDOG_FOLDER, self._own.rank, self._own.world_size)
        return connect(run_folder, self._own.rank, self._own.world_size)

    def _add_pointer(self, pointer: Pointer) -> None:
        self._neighbours.stop_comparing(pointer.group)
        if all(known.group != pointer.group for known in self._pointers):
            self._pointers.append(pointer)

    # -- an inquiry ----------------------------------------------------------------------------------------------

    def _begin_inquiry(self, alarm: dict[str, Any]) -> None:
        self._alarms += 1
        self._raising = None
        self._inquiry = Inquiry(
            self._alarms, alarm, self._own.rank, self._own.world_size, self._collectives.folder.parent
        )
        if alarm["why"] == "difference":
            pointer = Pointer(group=alarm["group"], number=alarm["number"], divergence=alarm["divergence"])
            self._add_pointer(pointer)

    def _proceed(self, inquiry: Inquiry) -> None:
        own = self._own
        if inquiry.outcome is None and inquiry.can_judge(own.host_id):
            inquiry.outcome = self._judge(inquiry)
            self._exchange(Round(says={f"verdict.{inquiry.number}": json.dumps(inquiry.outcome)}, asks=()))
        if inquiry.outcome is not None:
            self._inquiry = None
            self._conclude(inquiry.outcome)
            if own.failure is not None:
                self._failure_is_told.set()
        elif inquiry.is_hopeless:
            self._inquiry = None

    def _judge(self, inquiry: Inquiry) -> dict[str, Any]:
        evidence = inquiry.evidence(self._own.host_id, self._pointers)
        try:
            verdict = judge(evidence)
            message = report_text(verdict, evidence)
        except Exception as error:  # a gap in the rules is no reason to be silent
            sentence = f"Rank {inquiry.alarm['by']} has raised an alarm ({inquiry.alarm['why']}) that is not understood"
            verdict = Verdict(kind="cannot tell", sentence=f"{sentence}: {error!r}.")
            message = verdict.sentence
        return {
            "verdict": verdict.as_dict(),
            "is_fault": verdict.is_fault,
            "message": message,
            "judge": self._own.rank,
            "listening": [endpoint for card in inquiry.cards.values() for endpoint in card["listening"]],
        }

    def _conclude(self, outcome: dict[str, Any]) -> None:
        own, verdict = self._own, outcome["verdict"]
        is_judge = outcome["judge"] == own.rank
        if not outcome["is_fault"]:
            if is_judge and verdict["kind"] == "slow" and self._quiet_until_idle_s == 0.0:
                say(f"overlapscope: {verdict['sentence']}")
            self._quiet_until_idle_s = 2 * own.rhythm.idle_s(time.monotonic())
            return
        self._quiet_until_idle_s = float("inf")
        fault = (verdict["kind"], verdict["group"], verdict["number"], *verdict["blamed"])
        if fault in self._reported:
            return
        self._reported.add(fault)
        number = self._reports.add(verdict, outcome["message"], step=own.step, process_state=own.process.state)
        if verdict["kind"] in _STALLS:
            self._retractable = number, own.progress, is_judge
        if self._collectives.recorder is not None:
            self._collectives.recorder.incident()
        if is_judge:
            say(outcome["message"])
        else:
            say(f"overlapscope: rank {own.rank}: {own.standing_text()}; rank {outcome['judge']} has the report")
        if self._stops_job and own.failure is None:
            self._say_farewell()
            self._closing = True
            self._failure_is_told.set()  # nobody needs to be asked why this process ends
            stop_training(verdict["sentence"], set(outcome["listening"]), self._flush)

    def _flush(self) -> None:
        """The process is about to be ended: keep what it has recorded."""
        recorder = self._collectives.recorder
        if recorder is not None:
            recorder.log.close()
        for log in self._collectives.logs:
            log.close()
        say(f"overlapscope: rank {self._own.rank}: ended with exit code {EXIT_CODE}, because it does not react")

    def _speak_alone(self, round_: Round | None) -> None:
        """The others can't be asked, nor their folders be seen."""
        if self._own.failure is not None:
            self._failure_is_told.set()
            return
        if ("store",) in self._reported or self._alarm() is None:
            return
        self._reported.add(("store",))
        why = "does not answer" if round_ is None else f"can't be reached ({round_.error})"
        say(
            f"overlapscope: rank {self._own.rank}: {self._own.standing_text()} for "
            f"{self._own.rhythm.idle_s(time.monotonic()):.1f} s, and the job's store {why}: is the process that holds "
            "it, mostly rank 0, still there?"
        )

    def _retract_if_it_goes_on(self) -> None:
        if self._retractable is None or self._own.progress <= self._retractable[1] or self._own.failure is not None:
            return
        number, _, was_judge = self._retractable
        self._retractable = None
        self._reported.clear()
        self._reports.retract(number)
        if was_judge:
            say(f"overlapscope: the job goes on (step {self._own.step}): slow, not stuck; the report is withdrawn")

    # -- the end -------------------------------------------------------------------------------------------------

    def _say_farewell(self) -> None:
        """Tell the others that this rank was not killed. Nobody waits if the board does not answer at once."""
        if self._own.how == "runs":
            self._own.how = "ended"
        self._leave_the_board()

    def _leave_the_board(self) -> None:
        channel, self._channel = self._channel, None
        if channel is None:
            return
        how = "ended" if self._own.how == "runs" else self._own.how
        beat = json.dumps(self._own.beat() | {"how": how})
        channel.exchange(Round(says={f"beat.{self._own.rank}": beat}, asks=()), _FAREWELL_S)
        channel.close(_FAREWELL_S)
