"""From what ranks have told each other to ``Evidence``, for the rules that also judge a job that is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from instrumented_ddp.watchdog.plain import from_plain
from instrumented_ddp.watchdog.process_state import GONE, STOPPED, ProcessState
from overlapscope.diagnosis.evidence import (
    CallSite,
    Divergence,
    Entry,
    Evidence,
    Failure,
    GroupOrder,
    Liveness,
    RankEvidence,
    Standing,
)
from overlapscope.trace.format import Phase
from overlapscope.trace.group_log import UNEVEN_INPUTS, UNKNOWN, UNKNOWN_PHASE, step_that_must_agree
from overlapscope.trace.signature import Signature

SILENT_AFTER_NS: Final = 2_500_000_000
"""A watchdog that has not been heard of for so long does not wake."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of one rank."""

    card: Mapping[str, Any] | None = None
    """What it has said in full, or has left behind."""
    has_answered: bool = True
    """It has said that itself, and now."""
    beat: Mapping[str, Any] | None = None
    """What it has last said in short."""
    silent_ns: int | None = None
    """How long ago that was."""
    process: ProcessState | None = None
    """What the kernel says, if it is on this host."""
    cpu_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """Where ranks begin to differ, found while the job went on."""

    group: str
    number: int
    divergence: Divergence


def make_evidence(world_size: int, known: Mapping[int, Known], pointers: Sequence[Pointer]) -> Evidence:
    """Put together what is known of all ranks.

    Args:
        known: by rank.
        pointers: at most one a group.
    """
    by_group = {pointer.group: pointer for pointer in pointers}
    logs: dict[tuple[str, bool], dict[int, Mapping[str, Any]]] = {}
    windows: dict[tuple[str, bool], dict[int, tuple[Entry, ...]]] = {}
    for rank, one in sorted(known.items()):
        if one.card is None:
            continue
        signatures = dict(Signature.from_json(line) for line in one.card["signatures"])
        sites = {int(number): from_plain(CallSite, site) for number, site in one.card["call_sites"].items()}
        for log in one.card["groups"]:
            key = (log["name"], log["point_to_point"])
            logs.setdefault(key, {})[rank] = log
            windows.setdefault(key, {})[rank] = tuple(_entry(raw, signatures, sites) for raw in log["entries"])
    orders = {
        key: _order(key, logs[key], windows[key], known, None if key[1] else by_group.get(key[0]))
        for key in sorted(logs)
    }
    return Evidence(
        expected_ranks=tuple(range(world_size)),
        ranks={rank: evidence for rank, one in sorted(known.items()) if (evidence := _rank(rank, one)) is not None},
        groups=tuple(order for key, order in orders.items() if not key[1]),
        conversations=tuple(order for key, order in orders.items() if key[1]),
        is_live=True,
    )


def _rank(rank: int, one: Known) -> RankEvidence | None:
    told = None if one.card is None else from_plain(RankEvidence, one.card["evidence"])
    beat = one.beat
    if one.has_answered or beat is None:
        return told
    liveness = liveness_of(beat, one.process, one.silent_ns)
    is_there = liveness in ("running", "sleeping")
    if told is None:
        told = RankEvidence(
            rank=rank,
            host=str(beat["host"]),
            pid=int(beat["pid"]),
            standing=Standing(step=int(beat["step"]), phase=beat["phase"], since_ns=int(beat["since_ns"])),
            steps_done=int(beat["step"]),
        )
    return replace(
        told,
        liveness=liveness,
        failure=told.failure if beat["failure"] is None else from_plain(Failure, beat["failure"]),
        step_time_ns=beat["step_ns"],
        idle_ns=one.silent_ns,
        heard_ns_ago=one.silent_ns,
        cpu_share=one.cpu_share,
        is_working=None,
        holds_gil=is_there and (one.silent_ns or 0) >= SILENT_AFTER_NS,
        rss_bytes=beat["memory"][0],
        memory_limit_bytes=beat["memory"][1] or None,
    )


def liveness_of(beat: Mapping[str, Any], process: ProcessState | None, silent_ns: int | None) -> Liveness:
    """Whether a rank is there that has said nothing in full.

    Args:
        process: what the kernel says of it; None if it is on another host.
    """
    if beat["how"] != "runs":
        return "failed" if beat["how"] == "failed" else "ended"
    if process is None:
        return "silent" if (silent_ns or 0) >= SILENT_AFTER_NS else "unknown"
    if process.state == GONE:
        return "gone"
    if process.state in STOPPED:
        return "stopped"
    return "running" if process.state == "R" else "sleeping"


def _order(
    key: tuple[str, bool],
    logs: Mapping[int, Mapping[str, Any]],
    windows: dict[int, tuple[Entry, ...]],
    known: Mapping[int, Known],
    pointer: Pointer | None,
) -> GroupOrder:
    name, is_point_to_point = key
    any_log = next(iter(logs.values()))
    newest = {rank: int(log["newest"]) for rank, log in logs.items()}
    if not is_point_to_point:
        for rank, one in known.items():
            if not one.has_answered and one.beat is not None and name in one.beat["heads"]:
                newest[rank] = max(newest.get(rank, 0), int(one.beat["heads"][name][0]))
    order = GroupOrder(
        name=name,
        ranks=tuple(any_log["ranks"]),
        description=str(any_log["description"]),
        backend=str(any_log["backend"]),
        newest=dict(sorted(newest.items())),
        windows=windows,
    )
    if is_point_to_point:
        return order
    if pointer is not None:
        return replace(order, first_divergence=pointer.number, divergence=pointer.divergence)
    return _with_difference_in(order)


def _with_difference_in(order: GroupOrder) -> GroupOrder:
    """A difference among the newest entries, else that some ranks have fewer."""
    by_number: dict[int, set[tuple[int, int]]] = {}
    for window in order.windows.values():
        for entry in window:
            what = (entry.signature.hash, step_that_must_agree(entry.signature, entry.step, entry.flags))
            by_number.setdefault(entry.number, set()).add(what)
    for number in sorted(by_number):
        sides = by_number[number]
        if len(sides) > 1:
            is_step = len({signature for signature, _ in sides}) == 1
            return replace(order, first_divergence=number, divergence="step" if is_step else "signature")
    shortest, longest = min(order.newest.values(), default=0), max(order.newest.values(), default=0)
    if shortest == longest:
        return order
    return replace(order, first_divergence=shortest + 1, divergence="length")


def _entry(raw: Sequence[Any], signatures: Mapping[int, Signature], sites: Mapping[int, CallSite]) -> Entry:
    """An entry from its fields, see ``group_log.ENTRY_FIELDS``."""
    number, signature, site, step, batch, phase, flags, _, _, _, announced_ns, launched_ns, completed_ns = raw
    return Entry(
        number=number,
        signature=signatures.get(signature, Signature(op="unknown")),
        step=step,
        batch=None if batch == UNKNOWN or flags & UNEVEN_INPUTS else batch,
        phase=None if phase == UNKNOWN_PHASE else Phase(phase).name.lower(),
        call_site=sites.get(site),
        flags=flags,
        announced_ns=announced_ns,
        launched_ns=launched_ns or None,
        completed_ns=completed_ns or None,
    )
