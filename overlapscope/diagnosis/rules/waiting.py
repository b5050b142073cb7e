"""Rules for ranks that the others wait for: past their loop, in no_sync(), in the data loader, or elsewhere.

While a job runs, a stall is only a suspicion: a slow operation looks the same until it completes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from overlapscope.diagnosis.evidence import Entry, GroupOrder, RankEvidence
from overlapscope.diagnosis.failures import is_timeout
from overlapscope.diagnosis.process_state import WaitReason, find_wait_reason
from overlapscope.diagnosis.stall_timeout import is_busy
from overlapscope.diagnosis.text import (
    at_line,
    capitalize,
    collective_text,
    format_position,
    format_round,
    format_seconds,
    group_text,
    in_step,
    join_and,
    loop_step,
    plural,
    rank_list,
)
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wait_graph import Facts, SegmentMessage, Wait, has_finished, runs_on_device
from overlapscope.trace.schema import NO_BUCKET, POINT_TO_POINT

# Notes on where ranks wait within a bucket sum that a strategy builds from sends and receives, for any verdict.

_MAX_WAIT_NOTES: Final = 8


def note_segment_waits(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return the rounds in which ranks wait, and for whom, one sentence each."""
    if verdict.kind in ("healthy", "interrupted"):
        return ()
    others = sorted(facts.ranks.keys() - {*verdict.named})
    sentences = [text for rank in others for text in list(_waits(facts, rank)) or _undelivered(facts, rank)]
    return tuple(sentences[:_MAX_WAIT_NOTES])


def _waits(facts: Facts, rank: int) -> Iterator[str]:
    """Yield, for each round in progress, a sentence about ranks that have not posted their side."""
    waits: dict[str, list[SegmentMessage]] = {}
    for one in facts.messages_of(rank):
        if not one.is_answered and one.peer not in facts.unrecorded:
            waits.setdefault(_describe_round(one), []).append(one)
    for round_name, messages in waits.items():
        lacks = {op: sorted({one.peer for one in messages if one.entry.signature.op == op}) for op in POINT_TO_POINT}
        what = [
            f"{rank_list(peers)}{_peer_wait_text(facts, peers)} to {'send' if op == 'recv' else 'receive'} its part"
            for op, peers in lacks.items()
            if peers
        ]
        yield f"Rank {rank} waits in {round_name} for {join_and(what)}."


def _peer_wait_text(facts: Facts, peers: list[int]) -> str:
    """Return for whom a single peer waits itself."""
    wait = next((wait for wait in facts.waits if [wait.rank] == peers), None)
    return "" if wait is None else f", which waits for {rank_list(wait.late)},"


def _undelivered(facts: Facts, rank: int) -> Iterator[str]:
    """Yield a sentence if a message does not arrive although both sides have posted it; only while the job runs."""
    receives = [one for one in facts.messages_of(rank) if one.entry.signature.op == "recv" and one.is_answered]
    # Several are waited for in order, so it is unknown which are complete; a single one is given some time.
    if len(receives) == 1 and facts.evidence.is_live and facts.is_stuck(rank):
        peer = receives[0].peer
        yield f"Rank {rank} waits in {_describe_round(receives[0])} for what rank {peer} sends, and it has not arrived."


def _describe_round(message: SegmentMessage) -> str:
    """Format the round: ``round 2 of 3 (reduce-scatter) of the sum of bucket 1 by ring in step 12``."""
    signature = message.entry.signature
    model = f" of model {signature.model}" if signature.model else ""
    what = f"the sum of bucket {signature.bucket}{model} by {signature.strategy}{in_step(message.entry)}"
    where = format_round(signature)
    return f"{where} of {what}" if signature.rounds > 1 else f"{what} ({where})"


_MAY_RECOVER: Final = "something that takes this long once looks the same from here"
_MIGHT_HAVE_RECOVERED: Final = (
    "something that takes this long once looks the same, and the job may have been ended too early"
)
_WAITING: Final[dict[WaitReason, str]] = {
    "data loader": "waiting for data",
    "thread": "waiting for a lock or another thread",
    "process": "waiting for another process",
    "socket": "waiting for a socket",
    "file": "reading or writing a file",
    "torch.distributed": "in a call of torch.distributed",
}
_ADVICE_ON_KERNELS: Final = (
    "Look for a kernel that is slow there or never ends, such as one that waits for another stream or process: "
    "cuda-gdb, or a run with CUDA_LAUNCH_BLOCKING=1."
)
_END_OF_SCRIPT: Final = re.compile(r"in (destroy_process_group|_shutdown|barrier|_exit_function|_python_exit)\b")


def find_no_sync_rank(facts: Facts) -> Verdict | None:
    """Find a rank that went through the step in which others wait for its bucket, without reducing anything."""
    ranks = tuple(rank for rank in facts.awaited if (one := facts.ranks.get(rank)) and one.no_sync_since is not None)
    wait = facts.wait_for(ranks)
    if wait is None:
        return None
    missed = wait.first_missed_by(ranks)
    passed = tuple(
        rank for rank in ranks if (facts.ranks[rank].no_sync_since or 0) <= missed.step < facts.ranks[rank].steps_done
    )
    if not passed or missed.signature.bucket == NO_BUCKET:
        return None
    since = min(facts.ranks[rank].no_sync_since or 0 for rank in passed)
    return Verdict(
        kind="not reduced",
        sentence=f"{capitalize(rank_list(passed))} {plural(passed, 'has', 'have')} run every backward from step "
        f"{since} on under no_sync(), and {rank_list(facts.waiting)} {plural(facts.waiting, 'waits', 'wait')} for "
        f"{plural(passed, 'it', 'them')}{in_step(missed)}: {collective_text(missed)}{at_line(missed.call_site)}.",
        blamed=passed if 2 * len(passed) < len(facts.world) else (),
        concerned=tuple(sorted({*passed, *facts.waiting})),
        evidence=tuple(f"Rank {rank} has done {facts.ranks[rank].steps_done} steps." for rank in passed[:4]),
        advice=("Enter no_sync() on all ranks or on none, for the same batches.",),
        **wait_fields(facts, wait, passed),
    )


def find_uneven_inputs(facts: Facts) -> Verdict | None:
    """Find a rank that has left its loop, while the others wait for it in a step that it never began."""
    at_end = tuple(rank for rank in facts.awaited if _has_left_loop(facts.ranks.get(rank)))
    wait = facts.wait_for(at_end)
    if wait is None:
        return None
    missed = wait.first_missed_by(at_end)
    ended = tuple(rank for rank in at_end if facts.ranks[rank].liveness == "ended")
    steps = {rank: one.steps_done for rank, one in facts.ranks.items()}
    short = ", ".join(f"rank {rank} after {steps[rank]} steps" for rank in at_end[:4] if steps[rank])
    call = facts.ranks[at_end[0]].exit_call
    how = "left the training loop" if call is None else f"exited with status {call.status}{at_line(call.call_site)}"
    few = 2 * len(at_end) < len(facts.world)
    return Verdict(
        kind="uneven inputs",
        sentence=f"{capitalize(rank_list(at_end))} {how}{f' ({short})' if short else ''}, and "
        f"{rank_list(facts.waiting)} {plural(facts.waiting, 'waits', 'wait')} for {plural(at_end, 'it', 'them')}"
        f"{in_step(missed)}: {collective_text(missed)}{at_line(missed.call_site)}.",
        blamed=at_end if few and len(facts.world) > 2 else (),
        concerned=tuple(sorted({*at_end, *facts.waiting})),
        evidence=(f"{capitalize(rank_list(ended))} ended without an error.",)
        if ended
        else (f"{capitalize(rank_list(at_end))} {plural(at_end, 'is', 'are')} past the training loop.",),
        alternative="" if ended else _alternative(facts),
        advice=(
            "Give all ranks the same number of batches (drop_last, DistributedSampler), or train inside join().",
            "If it was a break or an early stop: let the ranks agree on it, with an all_reduce of the decision.",
        ),
        **wait_fields(facts, wait, at_end),
    )


def find_data_loader_wait(facts: Facts) -> Verdict | None:
    """Find a rank that the others wait for and that has been in its data loader all along."""
    ranks = tuple(rank for rank in _culprits(facts) if find_wait_reason(facts.ranks[rank].stacks) == "data loader")
    return _stall_verdict(
        facts,
        ranks,
        "waits for data",
        f"{plural(ranks, 'has', 'have')} been waiting for data",
        "Look at the data loader of that rank: its workers, its storage, a lock; py-spy dump shows where it is.",
    )


def find_stuck_rank(facts: Facts) -> Verdict | None:
    """Find a rank that the others wait for and that is stuck elsewhere; or all have entered and nothing happens."""
    ranks = _culprits(facts)
    if ranks:
        silent = all(facts.ranks[rank].liveness == "silent" for rank in ranks if rank in facts.ranks)
        what = f"{plural(ranks, 'has', 'have')} made no progress"
        if silent:
            what = f"{plural(ranks, 'has', 'have')} been unreachable (process, host or network gone)"
        elif is_busy(facts.ranks[ranks[0]]):
            what = f"{plural(ranks, 'has', 'have')} been busy without getting anywhere"
        elif (waiting := find_wait_reason(facts.ranks[ranks[0]].stacks)) is not None:
            what = f"{plural(ranks, 'has', 'have')} been {_WAITING[waiting]}"
        return _stall_verdict(
            facts, ranks, "stuck", what, "Look at that rank's stacks, or run py-spy dump on its process."
        )
    return _device_behind(facts) or _all_inside(facts)


def _culprits(facts: Facts) -> tuple[int, ...]:
    held_up = {*facts.waiting, *facts.awaited}
    return tuple(
        rank
        for rank in facts.awaited
        if rank in facts.ranks
        and facts.is_stuck(rank)
        and not facts.is_only_slow(rank)
        and facts.ranks[rank].liveness not in ("ended",)
        and held_up.isdisjoint(facts.awaited_in_new_group(rank))  # otherwise it waits itself, and for one of these
    )


def _alternative(facts: Facts) -> str:
    """Return the alternative to a stall; none if ranks waited until a timeout, which is too long in any case."""
    if facts.evidence.is_live:
        return _MAY_RECOVER
    return "" if any(is_timeout(one.failure) for one in facts.ranks.values()) else _MIGHT_HAVE_RECOVERED


def _device_behind(facts: Facts) -> Verdict | None:
    """Find a collective that all hosts have launched, but not all devices have reached."""
    stuck = {rank for rank in facts.late_devices if facts.is_stuck(rank) and not facts.is_only_slow(rank)}
    wait = next((wait for wait in facts.device_waits if stuck & set(wait.late)), None)
    if wait is None:
        return None
    ranks, entry, group = tuple(rank for rank in wait.late if rank in stuck), wait.entry, wait.group
    waiting = tuple(one.rank for one in facts.device_waits if one.group is group and one.entry.number == entry.number)
    one = facts.ranks[ranks[0]]
    since = f" for {format_seconds(one.idle_ns)}" if one.idle_ns else ""
    shown = {rank: group.oldest_incomplete[rank] for rank in sorted((*ranks[:4], *waiting[:4]))}
    return Verdict(
        kind="stuck",
        sentence=f"The {plural(ranks, 'device', 'devices')} of {rank_list(ranks)} {plural(ranks, 'has', 'have')} not come "
        f"to collective {entry.number} of {group_text(group)}{in_step(entry)}{since}, in which "
        f"{plural(waiting, 'that', 'those')} of {rank_list(waiting)} {plural(waiting, 'waits', 'wait')}: "
        f"{collective_text(entry)}{at_line(entry.call_site)}.",
        blamed=ranks,
        concerned=tuple(sorted({*ranks, *waiting})),
        evidence=(
            f"{plural(ranks, 'Its host has', 'Their hosts have')} launched it; what is before it has not ended.",
        ),
        advice=(
            _ADVICE_ON_KERNELS,
            "Look at that device with nvidia-smi: its clocks, its temperature, its errors.",
        ),
        alternative=_alternative(facts),
        **_collective(group, entry),
        call_sites={rank: first.call_site for rank, first in shown.items() if first.call_site} or None,
        windows=_windows_with(group, shown),
    )


def _all_inside(facts: Facts) -> Verdict | None:
    """Return a verdict if all ranks are in the same collective and it does not complete."""
    stuck = [
        rank
        for rank in facts.blocked
        if facts.is_stuck(rank) and not (facts.is_device_busy(rank) and facts.is_only_slow(rank))
    ]
    if len(stuck) < len(facts.ranks) or not stuck:
        return None
    held_up = {rank: facts.first_open(rank) for rank in stuck}
    group, entry = held_up[stuck[0]]
    if any(other[0].name != group.name or other[1].number != entry.number for other in held_up.values()):
        return None
    reached = {entry.is_reached for _, entry in held_up.values()}
    return Verdict(
        kind="stuck",
        sentence=f"All ranks that left a log have launched collective {entry.number} of {group_text(group)}"
        f"{in_step(entry)} ({collective_text(entry)}{at_line(entry.call_site)}); it never completed.",
        concerned=tuple(stuck),
        **_collective(group, entry),
        windows=_windows_with(group, {rank: held_up[rank][1] for rank in stuck[:8]}),
        alternative=_alternative(facts),
        evidence=(
            "They agree on all collectives up to there, so no rank's order is at fault.",
            *_reached_text(group, reached),
        ),
        advice=(_ADVICE_ON_KERNELS,)
        if reached == {False}
        else ("Look at the network between the hosts, and at the backend's own log (NCCL_DEBUG=INFO).",),
    )


def _collective(group: GroupOrder, entry: Entry) -> dict[str, Any]:
    """Return the fields of a verdict that identify its collective."""
    signature = entry.signature
    return {
        "step": loop_step(entry),
        "group": group.name,
        "number": entry.number,
        "bucket": signature.bucket if signature.bucket != NO_BUCKET else None,
        "parameters": signature.parameters,
    }


def _windows_with(group: GroupOrder, entries: Mapping[int, Entry]) -> dict[int, tuple[Entry, ...]]:
    """Return the latest entries of ranks in a group, and an entry of each that may be far before them."""
    windows = {rank: group.windows[rank] for rank in entries}
    return {rank: own if entries[rank] in own else (entries[rank], *own) for rank, own in windows.items()}


def _reached_text(group: GroupOrder, reached: set[bool | None]) -> tuple[str, ...]:
    """Format the progress of the devices of ranks that have all launched the same."""
    if not runs_on_device(group):
        return ()
    if reached == {True}:
        return ("All devices have come to it.",)
    if reached == {False}:
        return ("No device has come to it: each is still at what was launched before.",)
    return ("A device that is still at what was launched before it looks the same: hosts run ahead.",)


def _stall_verdict(facts: Facts, ranks: tuple[int, ...], kind: FaultKind, what: str, advice: str) -> Verdict | None:
    wait = facts.wait_for(ranks)
    if not ranks or wait is None:
        return None
    one, missed = facts.ranks[ranks[0]], wait.first_missed_by(ranks)
    location = wait_fields(facts, wait, ranks)
    if one.position is not None:
        location["step"] = loop_step(one.position)
    since = f" for {format_seconds(one.idle_ns)}" if one.idle_ns else ""
    where = f" ({format_position(one.position)})" if one.position else ""
    evidence = []
    if one.liveness == "unknown":
        evidence.append("Whether the processes still run is unknown from here.")
    if one.cpu_share is not None:
        evidence.append(f"Rank {ranks[0]} uses {100 * one.cpu_share:.0f} % of a core.")
    return Verdict(
        kind=kind,
        sentence=f"{capitalize(rank_list(ranks))} {what}{since}{where}, while {rank_list(facts.waiting)} "
        f"{plural(facts.waiting, 'waits', 'wait')} in collective {missed.number} of {group_text(wait.group)}: "
        f"{collective_text(missed)}{at_line(missed.call_site)}.",
        blamed=ranks,
        concerned=tuple(sorted({*ranks, *facts.waiting})),
        evidence=tuple(evidence),
        advice=(advice,),
        alternative=_alternative(facts),
        **location,
    )


def _has_left_loop(one: RankEvidence | None) -> bool:
    if one is None or one.failure is not None or one.exit_status or one.was_signaled:
        return False
    return has_finished(one) or (
        one.position is not None
        and one.position.phase in (None, "loop")
        and _END_OF_SCRIPT.search(one.stacks) is not None
    )


def wait_fields(facts: Facts, wait: Wait, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a verdict that identify where the others wait."""
    missed = wait.first_missed_by(ranks)
    sites = {rank: s.call_site for rank in ranks if rank in facts.ranks and (s := facts.ranks[rank].position)}
    sites |= {one.rank: one.entry.call_site for one in facts.waits[:8]}
    shown = [rank for rank in (*ranks[:4], *facts.waiting[:4]) if rank in wait.group.windows]
    return {
        **_collective(wait.group, missed),
        "call_sites": {rank: site for rank, site in sorted(sites.items()) if site} or None,
        "windows": {rank: wait.group.windows[rank] for rank in sorted(shown)},
    }
