"""The watchdog of a rank: compares its collectives with its neighbors', and notices stalls, while it trains.

It runs about every 0.7 s on the housekeeper's thread. It holds no lock that the training waits for beyond a read of a
few log entries, and never uses a device. Its findings are judged by the rules of ``overlapscope.diagnosis``, which
also judge finished jobs.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from instrumented_ddp.collective_log.collectives import Collectives
from instrumented_ddp.recording.housekeeper import Housekeeper
from instrumented_ddp.recording.models import Models
from instrumented_ddp.replicas.replicas import Replicas
from instrumented_ddp.watchdog.alarms import what_is_amiss
from instrumented_ddp.watchdog.channel import Round
from instrumented_ddp.watchdog.conclusions import Conclusions
from instrumented_ddp.watchdog.conversation import Conversation
from instrumented_ddp.watchdog.held_stacks import HeldStacks
from instrumented_ddp.watchdog.inquiry import Inquiry
from instrumented_ddp.watchdog.messages import Alarm, Beat, Outcome, Pointer
from instrumented_ddp.watchdog.neighbours import Neighbours, neighbours_of
from instrumented_ddp.watchdog.own_state import OwnState
from instrumented_ddp.watchdog.replica_check import ReplicaCheck
from instrumented_ddp.watchdog.stopping import end_waits, listening, raise_in_training, wait_until_all_have_heard
from overlapscope.diagnosis.evidence import ExitCall, Failure
from overlapscope.diagnosis.plain import from_json, to_json
from overlapscope.trace.alive import AliveBoard
from overlapscope.trace.exits import STATUS_OF_STOPPED
from overlapscope.trace.group_log import GroupLog

_log: Final = logging.getLogger(__name__)

_USUAL_INTERVAL_S: Final = 0.8
_FIRST_INTERVAL_S: Final = 0.1
_LEARNS_FOR_S: Final = 5.0
_INTERVAL_WHEN_IDLE_S: Final = 0.25
_INTERVAL_OF_INQUIRY_S: Final = 0.08
_IDLE_AFTER_S: Final = 0.8
_MOST_ROUNDS: Final = 3
"""Maximum number of rounds per run: one is enough unless there are requests or alarms."""
_CLOSE_LOOKS_S: Final = 2.0
"""Time in seconds before the stall limit at which the activity of this process begins to be sampled."""
_LAST_WORDS_S: Final = 2.5
"""Time in seconds that a failing process waits for the verdict."""
_ENDS_WITHIN_S: Final = 0.15
"""Time in seconds within which all ranks have read that the job is aborted."""
_NO_FAULT: Final = ("KeyboardInterrupt", "SystemExit", "IncidentError")
"""Exceptions by which a job is ended on purpose."""


class Watchdog:
    """The watchdog of this process; a ``Job``.

    Args:
        collectives: collective log of this process.
        models: DDP instances of this process.
        replicas: fingerprints of the models.
        housekeeper: scheduler that runs the watchdog.
        stops_after_s: minimum stall in seconds before a possibly slow job is aborted on all ranks; proven faults abort
            it at once. None to never abort.
        on_fault: called when a fault was found.
        before_exit: called before this process is ended.
    """

    name = "the watchdog"

    def __init__(
        self,
        collectives: Collectives,
        models: Models,
        replicas: Replicas,
        housekeeper: Housekeeper,
        *,
        stops_after_s: float | None,
        on_fault: Callable[[], None],
        before_exit: Callable[[], None],
    ) -> None:
        self._stops_after_s = stops_after_s
        self._collectives = collectives
        self._models = models
        self._before_exit = before_exit
        self._own = OwnState(collectives, models, replicas)
        self._replica_check = ReplicaCheck(replicas)
        self._neighbours = Neighbours(collectives.rank, collectives.signatures)
        self._conclusions = Conclusions(collectives.folder, self._own, on_fault)
        self._conversation = Conversation(
            collectives.folder.parent, collectives.rank, lambda: self._own.world_size, self._farewell
        )
        self._beats: dict[int, Beat] = {}
        self._pointers: list[Pointer] = []
        self._alarms = 0
        self._inquiry: Inquiry | None = None
        self._raising: Alarm | None = None
        self._put_down = (0, False)
        self._failure_is_told = threading.Event()
        self._held_stacks: HeldStacks | None = None
        with suppress(OSError, RuntimeError, ValueError):
            self._held_stacks = HeldStacks(collectives.folder)
            self._own.writes_stacks = True
        self._began_s = time.monotonic()
        self._alive = AliveBoard(collectives.folder)
        self._housekeeper = housekeeper
        housekeeper.add(self)

    # -- called on the training thread ---------------------------------------------------------------------------

    def failed(self, failure: Failure) -> None:
        """Report an exception that ends this process, and wait briefly for the verdict of all ranks."""
        if os.getpid() != self._own.pid or not self._housekeeper.does(self) or failure.type in _NO_FAULT:
            return
        self._own.failure = failure
        self._own.how = "failed"
        self._housekeeper.wake(self)
        self._failure_is_told.wait(_LAST_WORDS_S)

    def recording_ends(self, why: str) -> None:
        """Note that recording has ended, and why. The rank still communicates, but its position is unknown."""
        self._own.unrecorded_because = why

    def exits(self, call: ExitCall | None) -> None:
        """Note that the process exits, perhaps by a call of ``sys.exit``."""
        self._own.exit_call = call

    def close(self) -> None:
        """Unregister faulthandler. May be called twice."""
        if self._held_stacks is not None:
            self._held_stacks.close()
            self._held_stacks = None

    # -- called on the housekeeper's thread ----------------------------------------------------------------------

    def turn(self) -> float:
        """Observe this rank, communicate, and investigate after an alarm.

        Returns:
            The time until the next run, in seconds.
        """
        try:
            self._alive.write(*self._own.memory)
            self._look()
        except Exception:
            self._failure_is_told.set()
            raise
        return self._interval_s(time.monotonic() - self._began_s)

    def end(self) -> None:
        """Publish the final heartbeat, and stop."""
        self._say_farewell()
        self._alive.close()

    def _interval_s(self, age_s: float) -> float:
        if self._inquiry is not None or self._raising is not None or self._neighbours.awaited():
            return _INTERVAL_OF_INQUIRY_S
        if self._own.rhythm.idle_s(time.monotonic()) > _IDLE_AFTER_S:
            interval_s = _INTERVAL_WHEN_IDLE_S
        else:
            share = min(1.0, age_s / _LEARNS_FOR_S)
            interval_s = _FIRST_INTERVAL_S + (_USUAL_INTERVAL_S - _FIRST_INTERVAL_S) * share
        return interval_s * random.uniform(0.8, 1.0)  # ranks start together, and must not poll all at the same time

    def _look(self) -> None:
        own = self._own
        if own.look():
            self._conclusions.goes_on()
        idle_s = own.rhythm.idle_s(time.monotonic())
        if self._inquiry is not None or idle_s > max(_IDLE_AFTER_S, own.rhythm.noticed_after_s - _CLOSE_LOOKS_S):
            own.look_closely()
        self._conclusions.retract_if_it_goes_on()
        if self._inquiry is None and self._raising is None:
            self._raising = self._what_is_amiss()
        for _ in range(_MOST_ROUNDS):
            if not self._talk():
                break
        if self._inquiry is not None:
            self._proceed(self._inquiry)

    def _what_is_amiss(self) -> Alarm | None:
        is_news = not self._failure_is_told.is_set()
        return what_is_amiss(
            self._own,
            self._models,
            self._conclusions,
            self._beats.values(),
            failure_is_news=is_news,
            patience_s=self._stops_after_s,
        )

    # -- communication -------------------------------------------------------------------------------------------

    def _talk(self) -> bool:
        """Do one round over the board: publish the heartbeat of this rank, and read those of its neighbors.

        Returns:
            True if another round should follow at once.
        """
        if not self._conversation.is_possible():
            return False
        logs, own, inquiry = list(self._collectives.logs), self._own, self._inquiry
        neighbours = sorted({rank for ranks in neighbours_of(logs, own.rank).values() for rank in ranks})
        next_alarm = f"alarm.{self._alarms + 1}"
        says = {f"beat.{own.rank}": to_json(own.beat(self._neighbours.questions()))}
        says |= self._neighbours.answers(logs, self._beats)
        claims: dict[str, str] = {}
        asks = [*(f"beat.{rank}" for rank in neighbours), *self._neighbours.awaited()]
        if inquiry is None:
            asks.append(next_alarm)
            if self._raising is not None:
                claims[next_alarm] = to_json(self._raising)
        else:
            says |= self._card_for(inquiry)
            claims |= inquiry.claims
            asks += inquiry.asks
        answers = self._exchange(Round(says=says, asks=asks, claims=claims))
        if answers is None:
            return False
        self._beats |= {
            rank: from_json(Beat, answers[key]) for rank in neighbours if (key := f"beat.{rank}") in answers
        }
        if inquiry is not None:
            inquiry.hear(answers)
        elif next_alarm in answers:
            self._begin_inquiry(from_json(Alarm, answers[next_alarm]))
            return True
        return self._compare(logs, answers)

    def _card_for(self, inquiry: Inquiry) -> dict[str, str]:
        """Return this rank's snapshot as a message; empty if it was published and nothing was added since."""
        edition = (inquiry.number, self._own.failure is not None)
        if edition == self._put_down:
            return {}
        self._put_down = edition
        # Ranks that have different models fail when these are wrapped, or launch different buckets.
        may_be_the_models = self._own.failure is not None or self._own.step == 0 or bool(self._pointers)
        card = self._own.card(
            {one.group: one.difference.number for one in self._pointers},
            with_models=may_be_the_models,
            with_replicas=inquiry.alarm.why == "replicas differ",
            listening=listening() if self._stops_after_s is not None else (),
        )
        return {f"card.{inquiry.number}.{self._own.rank}": to_json(card)}

    def _compare(self, logs: list[GroupLog], answers: dict[str, bytes]) -> bool:
        """Compare collectives and replicas with the neighbors'.

        Returns:
            True if there is something to request from them, to reply, or to raise an alarm about.
        """
        asked_before = self._neighbours.questions()
        self._neighbours.look(logs, self._beats)
        found = self._neighbours.hear(answers)
        for pointer in found:
            self._add_pointer(pointer)
            self._raising = Alarm(by=self._own.rank, why="difference", pointer=pointer)
        is_quiet = self._inquiry is None and self._raising is None and not self._pointers
        if is_quiet and self._replica_check.found(self._beats):
            self._raising = Alarm(by=self._own.rank, why="replicas differ")
        has_asked = self._neighbours.questions() != asked_before
        return has_asked or self._neighbours.is_asked(self._beats) or (bool(found) and self._inquiry is None)

    def _exchange(self, round_: Round) -> dict[str, bytes] | None:
        done = self._conversation.exchange(round_)
        if done is not None and done.error is None:
            return done.answers
        self._put_down = (0, False)
        is_amiss = self._own.failure is not None or self._own.rhythm.idle_s(time.monotonic()) > _IDLE_AFTER_S
        if self._conversation.is_silent and is_amiss and not self._conversation.turn_to_folder():
            self._speak_alone(done)
        return None

    def _add_pointer(self, pointer: Pointer) -> None:
        self._neighbours.stop_comparing(pointer.group)
        if all(known.group != pointer.group for known in self._pointers):
            self._pointers.append(pointer)

    # -- investigation -------------------------------------------------------------------------------------------

    def _begin_inquiry(self, alarm: Alarm) -> None:
        self._alarms += 1
        self._raising = None
        self._inquiry = Inquiry(
            self._alarms, alarm, self._own.rank, self._own.world_size, self._collectives.folder.parent
        )
        if alarm.pointer is not None:
            self._add_pointer(alarm.pointer)
        if alarm.why == "replicas differ":
            self._replica_check.is_judged()

    def _proceed(self, inquiry: Inquiry) -> None:
        own = self._own
        if inquiry.outcome is None and inquiry.can_judge(own.host_id):
            inquiry.outcome = inquiry.judge(own.host_id, self._pointers)
            self._exchange(Round(says={f"verdict.{inquiry.number}": to_json(inquiry.outcome)}, asks=()))
        if inquiry.outcome is not None:
            self._inquiry = None
            is_news = self._conclusions.draw(inquiry.outcome)
            limit_s, alarm = self._stops_after_s, inquiry.alarm
            if limit_s is not None and self._conclusions.is_the_end(inquiry.outcome, alarm, limit_s, is_news=is_news):
                self._stop(inquiry, inquiry.outcome)
            if own.failure is not None:
                self._failure_is_told.set()
        elif inquiry.is_hopeless:
            self._inquiry = None

    def _stop(self, inquiry: Inquiry, outcome: Outcome) -> None:
        wait_until_all_have_heard(inquiry, outcome, self._exchange)
        self._failure_is_told.set()  # the other ranks know why this process ends
        if self._own.rank in outcome.verdict.named:  # it may run Python, and exit at once: ranks that wait come first
            time.sleep(_ENDS_WITHIN_S)
        raise_in_training(outcome.verdict.sentence)
        self._say_farewell()
        time.sleep(_ENDS_WITHIN_S)
        end_waits(set(outcome.listening), self._flush)

    def _flush(self) -> None:
        """Flush logs before the process is ended."""
        self._before_exit()
        _log.warning("rank %d: ended with exit code %d: it did not respond", self._own.rank, STATUS_OF_STOPPED)

    def _speak_alone(self, round_: Round | None) -> None:
        """Log this rank's position, as neither the other ranks nor their folders can be reached."""
        if self._own.failure is not None:
            self._failure_is_told.set()
            return
        if self._what_is_amiss() is not None:
            why = "does not answer" if round_ is None else f"can't be reached ({round_.error})"
            self._conclusions.nobody_answers(why)

    # -- shutdown ------------------------------------------------------------------------------------------------

    def _say_farewell(self) -> None:
        """Publish that this rank was not killed. Does not wait if the board does not answer at once."""
        if self._own.how == "runs":
            self._own.how = "ended"
        self._conversation.leave()

    def _farewell(self) -> dict[str, str]:
        beat = self._own.beat()
        return {f"beat.{beat.rank}": to_json(replace(beat, how="ended" if beat.how == "runs" else beat.how))}
