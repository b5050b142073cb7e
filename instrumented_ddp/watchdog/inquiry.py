"""An investigation: after an alarm all ranks publish snapshots, and an elected rank judges and publishes the verdict.

Alarms are numbered, and of several ranks that raise alarm N the first one counts. All others poll for N + 1 whenever
they wake up. Each rank then publishes a snapshot of its state. The judge is the lowest rank that is able to, and not
the rank that raised the alarm, because many raise it at the same time. It collects the snapshots, adds what can be
found out about ranks that have not answered, and judges.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from instrumented_ddp.watchdog.held_stacks import STACKS_SIGNAL
from instrumented_ddp.watchdog.left_behind import card_of, is_end_known, last_awake_ns
from instrumented_ddp.watchdog.live_evidence import SILENT_AFTER_NS, Known, liveness_of, make_evidence
from instrumented_ddp.watchdog.messages import Alarm, Beat, Outcome, Pointer
from instrumented_ddp.watchdog.process_state import GONE, STOPPED, ProcessState, can_be_signalled, look_at
from overlapscope.diagnosis.card import Card
from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.facts import Facts
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.plain import from_json
from overlapscope.diagnosis.report import report_text
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.host import host_now_ns

_COLLECTS_FOR_S: Final = 1.2
"""Time in seconds within which every rank that wakes up has answered."""
_LOOKS_FOR_NS: Final = 400_000_000
"""Minimum time in ns to observe the process of a rank that does not answer, or to wait for its exit status."""
_NEXT_RANK_AFTER_S: Final = 0.7
_MOST_TURNS: Final = 3
GIVES_UP_AFTER_S: Final = 6.0


@dataclass
class Inquiry:
    """One investigation, as seen by one rank.

    Args:
        number: number of the alarm.
        alarm: who raised it, and why.
        rank: rank of this process.
        world_size: number of ranks.
        run_folder: folder in which ranks that don't answer may have left files.
    """

    number: int
    alarm: Alarm
    rank: int
    world_size: int
    run_folder: Path
    began_s: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=host_now_ns)
    cards: dict[int, Card] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)
    is_judge: bool = False
    outcome: Outcome | None = None
    """Outcome that the judge has published; None until then."""
    _cards_before: dict[int, Card] = field(default_factory=dict)
    """Snapshots of the previous investigation, by ranks that may be gone now."""
    _first_looks: dict[int, tuple[int, ProcessState]] = field(default_factory=dict)

    @property
    def claims(self) -> dict[str, str]:
        """Return the keys to claim: ranks apply as judge one after another, so that the lowest wins."""
        turn_s = _NEXT_RANK_AFTER_S * min(self.rank, _MOST_TURNS)
        if self.is_judge or time.monotonic() - self.began_s < turn_s:
            return {}
        return {f"judge.{self.number}": str(self.rank)}

    @property
    def asks(self) -> list[str]:
        """Return the keys to poll on the board."""
        if not self.is_judge:
            return [f"verdict.{self.number}"]
        missing = [rank for rank in range(self.world_size) if rank not in self.cards]
        return [
            key
            for rank in missing
            for key in (f"card.{self.number}.{rank}", f"card.{self.number - 1}.{rank}", f"beat.{rank}")
        ]

    def hear(self, answers: Mapping[str, bytes]) -> None:
        """Process the replies from the board."""
        if answers.get(f"judge.{self.number}") == str(self.rank).encode():
            self.is_judge = True
        told = answers.get(f"verdict.{self.number}")
        if told is not None:
            self.outcome = from_json(Outcome, told)
        for rank in range(self.world_size) if self.is_judge else ():
            if (card := answers.get(f"card.{self.number}.{rank}")) is not None:
                self.cards[rank] = from_json(Card, card)
            elif (card := answers.get(f"card.{self.number - 1}.{rank}")) is not None:
                self._cards_before[rank] = from_json(Card, card)
            if (beat := answers.get(f"beat.{rank}")) is not None:
                self.beats[rank] = from_json(Beat, beat)

    def can_judge(self, host: str) -> bool:
        """Return whether this rank is the judge, and all ranks that will answer have answered."""
        if not self.is_judge:
            return False
        missing = [rank for rank in range(self.world_size) if rank not in self.cards]
        for rank in missing:
            self._look_at(rank, host)
        if all(self._will_not_answer(rank, host) for rank in missing):
            return True
        return time.monotonic() - self.began_s >= _COLLECTS_FOR_S

    @property
    def is_hopeless(self) -> bool:
        """Return whether no rank will judge, as this has taken too long."""
        return time.monotonic() - self.began_s >= GIVES_UP_AFTER_S

    def judge(self, host: str, pointers: Sequence[Pointer]) -> Outcome:
        """Judge what is wrong from everything known so far.

        Args:
            host: identity of this host, which tells whose processes can be inspected.
            pointers: known divergences.
        """
        undecided_for_ns = None
        try:
            evidence = self._evidence(host, pointers)
            verdict = judge(evidence)
            if not verdict.is_fault:
                undecided_for_ns = Facts(evidence).undecided_for_ns
            message = report_text(verdict, evidence)
        except Exception as error:  # a gap in the rules is no reason to be silent
            sentence = f"Rank {self.alarm.by} has raised an alarm ({self.alarm.why}) that can't be judged"
            verdict = Verdict(kind="cannot tell", sentence=f"{sentence}: {error!r}.")
            message = verdict.sentence
        return Outcome(
            judge=self.rank,
            verdict=verdict,
            message=message,
            listening=tuple(endpoint for card in self.cards.values() for endpoint in card.listening),
            undecided_for_ns=undecided_for_ns,
        )

    def _evidence(self, host: str, pointers: Sequence[Pointer]) -> Evidence:
        differences = {pointer.group: pointer.difference.number for pointer in pointers}
        known = {rank: self._known(rank, host, differences) for rank in range(self.world_size)}
        return make_evidence(self.world_size, known, pointers)

    def _known(self, rank: int, host: str, differences: Mapping[str, int]) -> Known:
        card, beat = self.cards.get(rank), self.beats.get(rank)
        if card is not None:
            return Known(card=card, beat=beat)
        card = card_of(self.run_folder, rank, differences) or self._cards_before.get(rank)
        if beat is None:
            return Known(card=card)
        now_ns = host_now_ns()
        if beat.host_id != host:
            waited_ns = now_ns - self.began_ns
            return Known(card=card, has_answered=False, beat=beat, silent_ns=waited_ns + SILENT_AFTER_NS)
        process = look_at(beat.pid, beat.start_ticks)
        before = self._first_looks.get(rank)
        share = None
        if before is not None and now_ns - before[0] > SILENT_AFTER_NS // 10:
            share = (process.cpu_ns - before[1].cpu_ns) / (now_ns - before[0])
        return Known(
            card=card,
            has_answered=False,
            beat=beat,
            silent_ns=self._silent_ns(beat),
            process=process,
            cpu_share=share,
        )

    def _look_at(self, rank: int, host: str) -> None:
        beat = self.beats.get(rank)
        if beat is None or beat.host_id != host or rank in self._first_looks:
            return
        process = look_at(beat.pid, beat.start_ticks)
        self._first_looks[rank] = host_now_ns(), process
        if self._silent_ns(beat) >= SILENT_AFTER_NS and liveness_of(beat, process, None) in ("running", "sleeping"):
            with suppress(OSError):
                if beat.writes_stacks and can_be_signalled(beat.pid, process):
                    os.kill(beat.pid, STACKS_SIGNAL)

    def _will_not_answer(self, rank: int, host: str) -> bool:
        beat = self.beats.get(rank)
        if beat is None or beat.host_id != host:
            return False
        process = look_at(beat.pid, beat.start_ticks)
        if process.state in STOPPED or beat.how == "ended":
            return True
        now_ns = host_now_ns()
        seen_ns = self._first_looks[rank][0] if rank in self._first_looks else now_ns
        has_looked = now_ns - seen_ns >= _LOOKS_FOR_NS
        if process.state == GONE:  # its launcher, which knows the exit status, may be about to notice
            return has_looked or beat.how != "runs" or is_end_known(self.run_folder, beat.pid)
        return has_looked and self._silent_ns(beat) >= SILENT_AFTER_NS

    def _silent_ns(self, beat: Beat) -> int:
        """Return how long a rank on this host has given no sign of life, neither on the board nor in its folder."""
        return host_now_ns() - max(beat.time_ns, last_awake_ns(self.run_folder, beat.rank))
