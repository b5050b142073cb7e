"""Rules for ranks that the others wait for: past their loop, in no_sync(), in the data loader, or elsewhere.

While a job runs, a stall is only a suspicion: a slow operation looks the same until it completes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from overlapscope.diagnosis.evidence import Entry, GroupOrder, RankEvidence
from overlapscope.diagnosis.failures import is_timeout
from overlapscope.diagnosis.process_state import find_callbacks, find_wait_reason
from overlapscope.diagnosis.rules.replicas import find_unreduced_gradients
from overlapscope.diagnosis.stall_timeout import is_busy
from overlapscope.diagnosis.text import loop_step
from overlapscope.diagnosis.texts import collectives as collective_texts
from overlapscope.diagnosis.texts import waiting as text
from overlapscope.diagnosis.verdict import FaultKind, Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts, SegmentMessage, Wait, has_finished, runs_on_device
from overlapscope.trace.collective_log import POINT_TO_POINT
from overlapscope.trace.schema import NO_BUCKET

_MAX_WAIT_NOTES: Final = 8
_END_OF_SCRIPT: Final = re.compile(r"in (destroy_process_group|_shutdown|barrier|_exit_function|_python_exit)\b")


def note_segment_waits(facts: Facts, verdict: Verdict) -> tuple[str, ...]:
    """Return where ranks wait within a bucket sum that a strategy builds from sends and receives, for any verdict."""
    if verdict.kind in ("healthy", "interrupted"):
        return ()
    others = sorted(facts.ranks.keys() - {*verdict.named})
    notes = [note for rank in others for note in list(_unposted(facts, rank)) or _undelivered(facts, rank)]
    return tuple(notes[:_MAX_WAIT_NOTES])


def _unposted(facts: Facts, rank: int) -> Iterator[str]:
    """Yield, for each round in progress, a sentence about ranks that have not posted their side."""
    rounds: dict[str, list[SegmentMessage]] = {}
    for one in facts.messages_of(rank):
        if not one.is_answered and one.peer not in facts.unrecorded:
            rounds.setdefault(text.round_text(one), []).append(one)
    for name, messages in rounds.items():
        lacking = {op: sorted({one.peer for one in messages if one.entry.signature.op == op}) for op in POINT_TO_POINT}
        parts = [text.unposted(peers, _awaited_by(facts, peers), op) for op, peers in lacking.items() if peers]
        yield text.waits_for_message(rank, name, parts)


def _awaited_by(facts: Facts, peers: list[int]) -> tuple[int, ...]:
    """Return for whom a single peer waits itself."""
    return next((wait.late for wait in facts.waits if [wait.rank] == peers), ())


def _undelivered(facts: Facts, rank: int) -> Iterator[str]:
    """Yield a sentence if a message does not arrive although both sides have posted it; only while the job runs."""
    receives = [one for one in facts.messages_of(rank) if one.entry.signature.op == "recv" and one.is_answered]
    # Several are waited for in order, so it is unknown which are complete; a single one is given some time.
    if len(receives) == 1 and facts.evidence.is_live and facts.is_stuck(rank):
        yield text.undelivered(rank, receives[0])


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
    members = [facts.ranks[rank] for rank in passed]
    since = min(one.no_sync_since or 0 for one in members)
    return Verdict(
        kind="not reduced",
        **text.in_no_sync(members, since, facts.waiting, missed),
        blamed=passed if 2 * len(passed) < len(facts.world) else (),
        concerned=tuple(sorted({*passed, *facts.waiting})),
        **wait_fields(facts, wait, passed),
    )


def find_rank_without_reductions(facts: Facts) -> Verdict | None:
    """Find a rank whose updates tell that it no longer reduces, while others wait for its bucket."""
    found = find_unreduced_gradients(facts)
    if found is None or found.step is None:
        return None
    ranks = tuple(rank for rank in found.concerned if rank in facts.awaited)
    wait = facts.wait_for(ranks) if ranks else None
    if wait is None or {*found.concerned} & {*facts.waiting}:
        return None
    missed = wait.first_missed_by(ranks)
    if missed.signature.bucket == NO_BUCKET or missed.step < found.step:
        return None
    return replace(found, evidence=(*found.evidence, collective_texts.others_launch_bucket(facts.waiting, missed)))


def find_uneven_inputs(facts: Facts) -> Verdict | None:
    """Find a rank that has left its loop, while the others wait for it in a step that it never began."""
    at_end = tuple(rank for rank in facts.awaited if _has_left_loop(facts.ranks.get(rank)))
    wait = facts.wait_for(at_end)
    if wait is None:
        return None
    members = [facts.ranks[rank] for rank in at_end]
    few = 2 * len(at_end) < len(facts.world)
    return Verdict(
        kind="uneven inputs",
        **text.left_loop(
            members,
            members[0].exit_call,
            facts.waiting,
            wait.first_missed_by(at_end),
            ended=[one.rank for one in members if one.liveness == "ended"],
            alternative=_alternative(facts),
        ),
        blamed=at_end if few and len(facts.world) > 2 else (),
        concerned=tuple(sorted({*at_end, *facts.waiting})),
        **wait_fields(facts, wait, at_end),
    )


def find_data_loader_wait(facts: Facts) -> Verdict | None:
    """Find a rank that the others wait for and that has been in its data loader all along."""
    ranks = tuple(rank for rank in _culprits(facts) if find_wait_reason(facts.ranks[rank].stacks) == "data loader")
    return _stalled(facts, "waits for data", ranks)


def find_stuck_rank(facts: Facts) -> Verdict | None:
    """Find a rank that the others wait for and that is stuck elsewhere; or all have entered and nothing happens."""
    ranks = _culprits(facts)
    return _stalled(facts, "stuck", ranks) if ranks else _device_behind(facts) or _all_inside(facts)


def _stalled(facts: Facts, kind: FaultKind, ranks: tuple[int, ...]) -> Verdict | None:
    """Return a verdict on ranks that hold up the others, located by the first."""
    wait = facts.wait_for(ranks)
    if wait is None:
        return None
    one = facts.ranks[ranks[0]]
    words = text.stalled(
        ranks,
        one,
        facts.waiting,
        wait,
        is_live=facts.evidence.is_live and one.liveness not in ("gone", "failed", "ended"),
        is_silent=all(facts.ranks[rank].liveness == "silent" for rank in ranks),
        is_busy=is_busy(one),
        gave_up=facts.timed_out_ranks,
        gave_up_ns=max((facts.gave_up_ns[rank] for rank in ranks if rank in facts.gave_up_ns), default=None),
        reason=find_wait_reason(one.stacks),
        alternative=_alternative(facts),
    )
    location = wait_fields(facts, wait, ranks)
    if one.position is not None:
        location["step"] = loop_step(one.position)
    return Verdict(kind=kind, **words, **location, blamed=ranks, concerned=tuple(sorted({*ranks, *facts.waiting})))


def _culprits(facts: Facts) -> tuple[int, ...]:
    held_up = {*facts.waiting, *facts.awaited}
    return tuple(
        rank
        for rank in facts.awaited
        if rank in facts.ranks
        and not facts.is_uncertain(rank)
        and facts.is_stuck(rank)
        and not facts.is_only_slow(rank)
        and facts.ranks[rank].liveness not in ("ended",)
        and held_up.isdisjoint(facts.awaited_in_new_group(rank))  # otherwise it waits itself, and for one of these
    )


def _alternative(facts: Facts) -> str:
    """Return the alternative to a stall; none if ranks waited until a timeout, which is too long in any case."""
    if facts.gave_up_ns or any(is_timeout(one.failure) for one in facts.ranks.values()):
        return ""
    return text.MAY_RECOVER if facts.evidence.is_live else text.MIGHT_HAVE_RECOVERED


def _device_behind(facts: Facts) -> Verdict | None:
    """Find a collective that all hosts have launched, but not all devices have reached."""
    stuck = {rank for rank in facts.late_devices if facts.is_stuck(rank) and not facts.is_only_slow(rank)}
    wait = next((wait for wait in facts.device_waits if stuck & set(wait.late)), None)
    return None if wait is None else _device_verdict(facts, tuple(rank for rank in wait.late if rank in stuck), wait)


def _device_verdict(facts: Facts, ranks: tuple[int, ...], wait: Wait) -> Verdict:
    entry, group = wait.entry, wait.group
    waiting = tuple(one.rank for one in facts.device_waits if one.group is group and one.entry.number == entry.number)
    idle_ns = facts.ranks[ranks[0]].idle_ns
    shown = {rank: group.oldest_incomplete[rank] for rank in sorted((*ranks[:4], *waiting[:4]))}
    return Verdict(
        kind="stuck",
        **text.device_behind(ranks, idle_ns, waiting, wait, alternative=_alternative(facts)),
        blamed=ranks,
        concerned=tuple(sorted({*ranks, *waiting})),
        **_collective(group, entry),
        call_sites=known_sites({rank: first.call_site for rank, first in shown.items()}),
        windows=_windows_with(group, shown),
    )


def _all_inside(facts: Facts) -> Verdict | None:
    """Return a verdict if all ranks are in the same collective and it does not complete."""
    stuck = _find_stuck(facts)
    if len(stuck) < len(facts.ranks) or not stuck:
        return None
    held_up = {rank: facts.first_open(rank) for rank in stuck}
    if any(entry.signature.op in POINT_TO_POINT for _, entry in held_up.values()):
        return None if facts.waits else _all_in_messages(facts, held_up)
    group, entry = held_up[stuck[0]]
    if {(other.name, open_.number) for other, open_ in held_up.values()} != {(group.name, entry.number)}:
        return None
    reached = {entry.is_reached for _, entry in held_up.values()}
    callbacks = {rank: find_callbacks(facts.ranks[rank].stacks) for rank in stuck}
    return Verdict(
        kind="stuck",
        **text.all_inside(
            group, entry, reached, callbacks, on_device=runs_on_device(group), alternative=_alternative(facts)
        ),
        concerned=tuple(stuck),
        **_collective(group, entry),
        windows=_windows_with(group, {rank: held_up[rank][1] for rank in stuck[:8]}),
    )


def _find_stuck(facts: Facts) -> list[int]:
    return [
        rank
        for rank in facts.blocked
        if facts.is_stuck(rank) and not (facts.is_device_busy(rank) and facts.is_only_slow(rank))
    ]


def _all_in_messages(facts: Facts, held_up: Mapping[int, tuple[GroupOrder, Entry]]) -> Verdict | None:
    """Return a verdict if all ranks are in messages, and none is known to lack its other side."""
    entries = {rank: entry for rank, (_, entry) in held_up.items()}
    if not all(entry.signature.op in POINT_TO_POINT for entry in entries.values()):
        return None
    group, first = held_up[min(held_up)]
    return Verdict(
        kind="stuck",
        **text.all_in_messages(entries, alternative=_alternative(facts)),
        concerned=tuple(held_up),
        step=loop_step(first),
        group=group.name,
        call_sites=known_sites({rank: entry.call_site for rank, entry in entries.items()}),
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
    windows = group.windows_of(entries)
    return {rank: own if entries[rank] in own else (entries[rank], *own) for rank, own in windows.items()}


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
    return {
        **_collective(wait.group, missed),
        "call_sites": known_sites(sites),
        "windows": {} if wait.is_point_to_point else wait.group.windows_of((*ranks[:4], *facts.waiting[:4])),
    }
