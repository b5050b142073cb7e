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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from instrumented_ddp.watchdog.live_evidence import SILENT_AFTER_NS, RankKnowledge, liveness_of, make_evidence
from instrumented_ddp.watchdog.peer_channel import Alarm, DivergenceLocation, Heartbeat, Outcome
from instrumented_ddp.watchdog.process_state import (
    GONE,
    STACKS_SIGNAL,
    STOPPED,
    ProcessState,
    can_be_signaled,
    read_process_state,
)
from overlapscope.diagnosis.collective_order import RecordedOrder
from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.process_state import find_user_line
from overlapscope.diagnosis.rank_snapshot import RankSnapshot, make_snapshot
from overlapscope.diagnosis.rank_state import read_rank
from overlapscope.diagnosis.report_text import format_report
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.trace.clocks import get_boot_id, host_now_ns
from overlapscope.trace.collective_log_reader import open_collective_logs
from overlapscope.trace.dataclass_json import from_json
from overlapscope.trace.process_files import read_exits
from overlapscope.trace.schema import LIVENESS_FILE, rank_folder

# Snapshots of ranks that can't publish one, read from their files: such a rank is dead, stopped, or holds the GIL.


def read_snapshot(run_folder: Path, rank: int, differences: Mapping[str, int]) -> RankSnapshot | None:
    """Return the snapshot of a rank from its files.

    Args:
        differences: by group, the entry number around which entries are wanted.

    Returns:
        None if the rank has left no files here.
    """
    folder = rank_folder(run_folder, rank)
    if not folder.exists():
        return None
    logs = open_collective_logs({rank: folder})
    source = RecordedOrder(logs)
    exits = read_exits(run_folder, [])  # the launcher may have seen its exit by now
    evidence = read_rank(rank, folder, source.newest_of(rank), is_closed=False, exits=exits).evidence
    site = find_user_line(evidence.stacks)  # the stacks were requested just now, if possible
    if evidence.position is not None and site is not None:
        evidence = replace(evidence, position=replace(evidence.position, call_site=site))
    return make_snapshot(
        evidence,
        [group.files[rank] for group in logs.groups.values()],
        signature_of=logs.signatures(rank).get,
        call_site_of=source.call_sites(rank).get,
        differences=differences,
    )


def is_exit_recorded(run_folder: Path, pid: int) -> bool:
    """Return whether the launcher of a process on this host has recorded how it ended."""
    here = get_boot_id()
    return any(each.pid == pid and each.boot_id == here and not each.is_command for each in read_exits(run_folder, []))


def last_awake_ns(run_folder: Path, rank: int) -> int:
    """Return when the watchdog of a rank on this host was last awake, even if it could not publish it; 0 if unknown."""
    try:
        return int.from_bytes((rank_folder(run_folder, rank) / LIVENESS_FILE).read_bytes()[:8], "little")
    except OSError:
        return 0


_COLLECT_TIMEOUT_S: Final = 1.2
"""Time in seconds within which every rank that wakes up has answered."""
_MIN_OBSERVATION_NS: Final = 400_000_000
"""Minimum time in ns to observe the process of a rank that does not answer, or to wait for its exit status."""
_ELECTION_INTERVAL_S: Final = 0.7
_MAX_ELECTION_INTERVALS: Final = 3
INVESTIGATION_TIMEOUT_S: Final = 6.0


@dataclass
class Investigation:
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
    snapshots: dict[int, RankSnapshot] = field(default_factory=dict)
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)
    is_judge: bool = False
    outcome: Outcome | None = None
    """Outcome that the judge has published; None until then."""
    _previous_snapshots: dict[int, RankSnapshot] = field(default_factory=dict)
    """Snapshots of the previous investigation, by ranks that may be gone now."""
    _first_observations: dict[int, tuple[int, ProcessState]] = field(default_factory=dict)

    @property
    def claims(self) -> dict[str, str]:
        """Return the keys to claim: ranks apply as judge one after another, so that the lowest wins."""
        turn_s = _ELECTION_INTERVAL_S * min(self.rank, _MAX_ELECTION_INTERVALS)
        if self.is_judge or time.monotonic() - self.began_s < turn_s:
            return {}
        return {f"judge.{self.number}": str(self.rank)}

    @property
    def keys_to_poll(self) -> list[str]:
        """Return the keys to poll on the board."""
        if not self.is_judge:
            return [f"verdict.{self.number}"]
        missing = [rank for rank in range(self.world_size) if rank not in self.snapshots]
        return [
            key
            for rank in missing
            for key in (f"card.{self.number}.{rank}", f"card.{self.number - 1}.{rank}", f"beat.{rank}")
        ]

    def on_replies(self, replies: Mapping[str, bytes]) -> None:
        """Process the replies from the board."""
        if replies.get(f"judge.{self.number}") == str(self.rank).encode():
            self.is_judge = True
        published = replies.get(f"verdict.{self.number}")
        if published is not None:
            self.outcome = from_json(Outcome, published)
        for rank in range(self.world_size) if self.is_judge else ():
            if (card := replies.get(f"card.{self.number}.{rank}")) is not None:
                self.snapshots[rank] = from_json(RankSnapshot, card)
            elif (card := replies.get(f"card.{self.number - 1}.{rank}")) is not None:
                self._previous_snapshots[rank] = from_json(RankSnapshot, card)
            if (heartbeat := replies.get(f"beat.{rank}")) is not None:
                self.heartbeats[rank] = from_json(Heartbeat, heartbeat)

    def is_ready_to_judge(self, host: str) -> bool:
        """Return whether this rank is the judge, and all ranks that will answer have answered."""
        if not self.is_judge:
            return False
        missing = [rank for rank in range(self.world_size) if rank not in self.snapshots]
        for rank in missing:
            self._observe_process(rank, host)
        if all(self._is_unresponsive(rank, host) for rank in missing):
            return True
        return time.monotonic() - self.began_s >= _COLLECT_TIMEOUT_S

    @property
    def has_timed_out(self) -> bool:
        """Return whether no rank will judge, as this has taken too long."""
        return time.monotonic() - self.began_s >= INVESTIGATION_TIMEOUT_S

    def judge(self, host: str, divergences: Sequence[DivergenceLocation]) -> Outcome:
        """Judge what is wrong from everything known so far.

        Args:
            host: identity of this host, which tells whose processes can be inspected.
            pointers: known divergences.
        """
        undecided_time_ns = None
        try:
            evidence = self._evidence(host, divergences)
            verdict = judge(evidence)
            if not verdict.is_fault:
                undecided_time_ns = Facts(evidence).undecided_time_ns
            message = format_report(verdict, evidence)
        except Exception as error:  # a gap in the rules is no reason to be silent
            sentence = f"Rank {self.alarm.by} has raised an alarm ({self.alarm.why}) that can't be judged"
            verdict = Verdict(kind="cannot tell", sentence=f"{sentence}: {error!r}.")
            message = verdict.sentence
        return Outcome(
            judge=self.rank,
            verdict=verdict,
            message=message,
            listening=tuple(endpoint for card in self.snapshots.values() for endpoint in card.listening),
            undecided_time_ns=undecided_time_ns,
        )

    def _evidence(self, host: str, divergences: Sequence[DivergenceLocation]) -> Evidence:
        differences = {divergence.group: divergence.difference.number for divergence in divergences}
        known = {rank: self._known(rank, host, differences) for rank in range(self.world_size)}
        return make_evidence(self.world_size, known, divergences)

    def _known(self, rank: int, host: str, differences: Mapping[str, int]) -> RankKnowledge:
        card, heartbeat = self.snapshots.get(rank), self.heartbeats.get(rank)
        if card is not None:
            return RankKnowledge(card=card, heartbeat=heartbeat)
        card = read_snapshot(self.run_folder, rank, differences) or self._previous_snapshots.get(rank)
        if heartbeat is None:
            return RankKnowledge(card=card)
        now_ns = host_now_ns()
        if heartbeat.host_id != host:
            waited_ns = now_ns - self.began_ns
            return RankKnowledge(
                card=card, has_answered=False, heartbeat=heartbeat, silent_ns=waited_ns + SILENT_AFTER_NS
            )
        process = read_process_state(heartbeat.pid, heartbeat.start_ticks)
        before = self._first_observations.get(rank)
        share = None
        if before is not None and now_ns - before[0] > SILENT_AFTER_NS // 10:
            share = (process.cpu_ns - before[1].cpu_ns) / (now_ns - before[0])
        return RankKnowledge(
            card=card,
            has_answered=False,
            heartbeat=heartbeat,
            silent_ns=self._silent_ns(heartbeat),
            process=process,
            cpu_share=share,
        )

    def _observe_process(self, rank: int, host: str) -> None:
        heartbeat = self.heartbeats.get(rank)
        if heartbeat is None or heartbeat.host_id != host or rank in self._first_observations:
            return
        process = read_process_state(heartbeat.pid, heartbeat.start_ticks)
        self._first_observations[rank] = host_now_ns(), process
        if self._silent_ns(heartbeat) >= SILENT_AFTER_NS and liveness_of(heartbeat, process, None) in (
            "running",
            "sleeping",
        ):
            with suppress(OSError):
                if heartbeat.dumps_stacks and can_be_signaled(heartbeat.pid, process):
                    os.kill(heartbeat.pid, STACKS_SIGNAL)

    def _is_unresponsive(self, rank: int, host: str) -> bool:
        heartbeat = self.heartbeats.get(rank)
        if heartbeat is None or heartbeat.host_id != host:
            return False
        process = read_process_state(heartbeat.pid, heartbeat.start_ticks)
        if process.state in STOPPED or heartbeat.how == "ended":
            return True
        now_ns = host_now_ns()
        seen_ns = self._first_observations[rank][0] if rank in self._first_observations else now_ns
        has_looked = now_ns - seen_ns >= _MIN_OBSERVATION_NS
        if process.state == GONE:  # its launcher, which knows the exit status, may be about to notice
            return has_looked or heartbeat.how != "runs" or is_exit_recorded(self.run_folder, heartbeat.pid)
        return has_looked and self._silent_ns(heartbeat) >= SILENT_AFTER_NS

    def _silent_ns(self, heartbeat: Heartbeat) -> int:
        """Return how long a rank on this host has given no sign of life, neither on the board nor in its folder."""
        return host_now_ns() - max(heartbeat.time_ns, last_awake_ns(self.run_folder, heartbeat.rank))
