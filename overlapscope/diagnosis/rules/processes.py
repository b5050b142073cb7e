"""Processes that are gone, or don't run."""

from __future__ import annotations

import re
from typing import Final

from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.facts import Facts, is_consequence, is_interrupted, is_timeout
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wording import (
    at,
    capitalised,
    ranks_text,
    seconds_text,
    shortened,
    standing_text,
    standings_text,
    verb,
)

_MEMORY_ERRORS: Final = ("MemoryError", "OutOfMemoryError")
_OUT_OF_MEMORY: Final = re.compile(r"out of memory|can'?t allocate memory|cannot allocate memory", re.IGNORECASE)
_PLACE_IN_TORCH: Final = re.compile(r"^\[[^\]]+\.(cc|cpp|h|hpp):\d+\]\s*")
"""Prefixes such as ``[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]``, which help nobody."""
_NEARLY_ALL_MEMORY: Final = 0.9
_SAME_TIME_NS: Final = 1_000_000_000


def failed(facts: Facts) -> Verdict | None:
    """An exception that is not the consequence of another rank's end."""
    own = [
        rank
        for rank, one in sorted(facts.ranks.items())
        if one.failure and not is_consequence(one.failure) and one.failure.type != "SystemExit"
    ]
    if not own:
        return None
    first = min(own, key=lambda rank: facts.ranks[rank].failure.time_ns)  # type: ignore[union-attr]
    one = facts.ranks[first]
    failure = one.failure
    assert failure is not None
    is_memory = failure.type.rpartition(".")[2] in _MEMORY_ERRORS or _OUT_OF_MEMORY.search(failure.message)
    message = failure.message.strip().splitlines()[0] if failure.message.strip() else ""
    what = f"{failure.type}: {message}" if message else failure.type
    how = "ran out of memory" if is_memory else "failed"
    alike = [rank for rank in own if facts.ranks[rank].failure.type == failure.type]  # type: ignore[union-attr]
    said = shortened(what, 300)
    sentence = f"{capitalised(ranks_text(alike))} {how}{_in_step(one)}{at(failure.call_site)}: {said}"
    rest = [rank for rank, other in sorted(facts.ranks.items()) if is_consequence(other.failure)]
    evidence = [f"{capitalised(ranks_text(rest))} failed as a result: {_first_line(facts, rest)}"] if rest else []
    return Verdict(
        kind="out of memory" if is_memory else "failed",
        sentence=sentence if said.endswith((".", "…")) else f"{sentence}.",
        blamed=() if len(own) == len(facts.world) > 1 else tuple(own),
        concerned=(*own, *rest),
        step=one.standing.step if one.standing else None,
        call_sites={rank: f.call_site for rank in own if (f := facts.ranks[rank].failure) and f.call_site} or None,
        evidence=(*evidence, *_memory(facts, own)) if is_memory else tuple(evidence),
        advice=("Use a smaller batch, accumulate gradients, or checkpoint activations.",)
        if is_memory
        else ("Fix this exception; the other ranks' errors are consequences.",),
    )


def stopped(facts: Facts, ranks: tuple[int, ...] | None = None) -> Verdict | None:
    """Ranks stopped by a signal or a debugger.

    Args:
        ranks: of which this is known; by default by their liveness.
    """
    return _not_running(
        facts,
        facts.with_liveness("stopped") if ranks is None else ranks,
        "stopped",
        "stopped (SIGSTOP, Ctrl-Z or a debugger)",
        "Resume it with kill -CONT, or end it.",
    )


def holds_the_gil(facts: Facts, ranks: tuple[int, ...] | None = None) -> Verdict | None:
    """Ranks whose process runs while none of its Python threads does.

    Args:
        ranks: of which this is known; by default by what is known of them now.
    """
    holding = ranks or tuple(
        rank for rank, one in sorted(facts.ranks.items()) if one.holds_gil and one.liveness in ("running", "sleeping")
    )
    return _not_running(
        facts,
        holding,
        "holds the GIL",
        "in native code that holds Python's global interpreter lock, so that none of its Python code can run",
        "Look at the native frames with py-spy dump --native or gdb.",
    )


def killed(facts: Facts) -> Verdict | None:
    """Ranks that are gone without logging an error, while others are there or failed because of that."""
    gone = facts.with_liveness("gone")
    if any(_says_that_one_is_gone(one) for one in facts.ranks.values()):
        # Nobody can check the ranks of which nothing is known, but a connection was closed.
        gone = gone or facts.with_liveness("unknown", "silent")
    others = [rank for rank in facts.ranks if rank not in gone]
    if not gone or any(is_timeout(facts.ranks[rank].failure) for rank in others):
        # A rank that dies closes its connections: a timeout means waiting for one that was still there.
        return None
    hung = [rank for rank in gone if facts.hung_before(rank)]
    harmed = [rank for rank in others if facts.ranks[rank].liveness != "ended"]
    if len(hung) == len(gone) or (not harmed and (hung or facts.evidence.reports)):
        return None  # someone ended a job that hung, or about which its watchdogs tell more than its end
    first = _first_to_die(facts, gone)
    one = facts.ranks[first[0]]
    how = _how_it_died(one)
    standings = {rank: standing for rank in first if (standing := facts.ranks[rank].standing)}
    sentence = (
        f"{capitalised(ranks_text(first))} {verb(first, 'was', 'were')} {how} without logging an error"
        f"{standings_text(standings)}."
    )
    likely = [rank for rank in first if _memory_share(facts.ranks[rank]) >= _NEARLY_ALL_MEMORY]
    if likely:
        sentence += f" {capitalised(ranks_text(likely))} had used nearly all memory: the kernel's OOM killer is likely."
    evidence = [*_memory(facts, first)]
    consequences = [rank for rank in others if is_consequence(facts.ranks[rank].failure)]
    if consequences:
        evidence.append(
            f"{capitalised(ranks_text(consequences))} failed as a result: {_first_line(facts, consequences)}"
        )
    later = tuple(rank for rank in gone if rank not in first)
    if later:
        evidence.append(f"{capitalised(ranks_text(later))} died later.")
    if len(first) > 1:
        evidence.append("Their logs don't say which of them died first.")
    if not others:
        evidence.append("No rank survived to see the others die.")
    return Verdict(
        kind="killed",
        sentence=sentence,
        blamed=first if len(first) < len(facts.world) else (),
        concerned=tuple(sorted({*gone, *consequences})),
        step=one.standing.step if one.standing else None,
        bucket=one.standing.bucket if one.standing else None,
        call_sites={rank: standing.call_site for rank, standing in standings.items() if standing.call_site} or None,
        evidence=tuple(evidence),
        advice=("Look for its signal in the launcher's output, and for the OOM killer in its host's dmesg.",),
    )


def _says_that_one_is_gone(one: RankEvidence) -> bool:
    return is_consequence(one.failure) and not is_timeout(one.failure) and not is_interrupted(one.failure)


def _first_to_die(facts: Facts, gone: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks whose last sign of life is the oldest; if that is unknown, those that the others waited for."""
    ages = {rank: facts.ranks[rank].heard_ns_ago for rank in gone}
    known = [age for age in ages.values() if age is not None]
    if len(known) < len(gone):
        return tuple(rank for rank in gone if rank in facts.awaited) or gone
    return tuple(rank for rank in gone if (ages[rank] or 0) >= max(known) - _SAME_TIME_NS)


def _how_it_died(one: RankEvidence) -> str:
    for text, how in (
        ("Fatal Python error: Aborted", "aborted (SIGABRT)"),
        ("Segmentation fault", "killed by a segmentation fault (SIGSEGV)"),
    ):
        if text in one.stacks:
            return how
    return "killed"


def _not_running(facts: Facts, ranks: tuple[int, ...], kind: FaultKind, what: str, advice: str) -> Verdict | None:
    if not ranks:
        return None
    one = facts.ranks[ranks[0]]
    is_now = one.liveness in ("running", "sleeping", "stopped")
    where = f": {standing_text(one.standing)}" if one.standing else ""
    since = f" for {seconds_text(one.heard_ns_ago)}" if one.heard_ns_ago and one.heard_ns_ago > _SAME_TIME_NS else ""
    be = verb(ranks, "is", "are") if is_now else verb(ranks, "was", "were")
    return Verdict(
        kind=kind,
        sentence=f"{capitalised(ranks_text(ranks))} {be} {what}{since}{where}.",
        blamed=ranks,
        concerned=tuple(sorted({*ranks, *facts.waiting})),
        step=one.standing.step if one.standing else None,
        bucket=one.standing.bucket if one.standing else None,
        call_sites={ranks[0]: one.standing.call_site} if one.standing and one.standing.call_site else None,
        evidence=(f"{capitalised(ranks_text(facts.waiting))} {verb(facts.waiting, 'waits', 'wait')}.",)
        if facts.waiting
        else (),
        advice=(advice,),
    )


def _memory_share(one: RankEvidence) -> float:
    return one.rss_bytes / one.memory_limit_bytes if one.rss_bytes and one.memory_limit_bytes else 0.0


def _memory(facts: Facts, ranks: tuple[int, ...] | list[int]) -> list[str]:
    return [
        f"Rank {rank} had {one.rss_bytes / 1024**3:.1f} GiB of {one.memory_limit_bytes / 1024**3:.1f} GiB in use."
        for rank in ranks
        if (one := facts.ranks[rank]).rss_bytes and one.memory_limit_bytes
    ]


def _in_step(one: RankEvidence) -> str:
    return f" {standing_text(one.standing).partition(',')[0]}" if one.standing else ""


def _first_line(facts: Facts, ranks: list[int]) -> str:
    failure = facts.ranks[ranks[0]].failure
    text = failure.message.strip().splitlines()[0] if failure and failure.message.strip() else ""
    return shortened(_PLACE_IN_TORCH.sub("", text), 200)
