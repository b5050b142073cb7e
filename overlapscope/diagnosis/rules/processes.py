"""Rules for processes that failed, exited, were killed, or don't run."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from signal import Signals
from typing import Final

from overlapscope.diagnosis.evidence import CallSite, Failure, RankEvidence
from overlapscope.diagnosis.failures import has_own_failure, is_consequence, is_interrupted, is_timeout
from overlapscope.diagnosis.text import (
    at_line,
    capitalize,
    format_position,
    format_positions,
    format_seconds,
    in_step,
    plural,
    rank_list,
    truncate_words,
)
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wait_graph import Facts

_MEMORY_ERRORS: Final = ("MemoryError", "OutOfMemoryError")
_OUT_OF_MEMORY: Final = re.compile(r"out of memory|can'?t allocate memory|cannot allocate memory", re.IGNORECASE)
_TORCH_SOURCE_PREFIX: Final = re.compile(r"^\[[^\]]+\.(cc|cpp|h|hpp):\d+\]\s*")
"""Prefix of messages, such as ``[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]``, that is of no use."""
_LESS_MEMORY: Final = "Use a smaller batch, accumulate gradients, or checkpoint activations."
_NEARLY_ALL_MEMORY: Final = 0.9
_SAME_TIME_NS: Final = 1_000_000_000


def find_failure(facts: Facts) -> Verdict | None:
    """Find an exception that is not the consequence of another rank's end."""
    own = [
        rank
        for rank, one in sorted(facts.ranks.items())
        if one.failure and has_own_failure(one) and one.failure.type != "SystemExit"
    ]
    if not own:
        return None
    first = min(own, key=lambda rank: facts.ranks[rank].failure.time_ns)  # type: ignore[union-attr]
    one = facts.ranks[first]
    failure = one.failure
    assert failure is not None
    is_memory = _is_of_memory(failure)
    message = failure.message.strip().splitlines()[0] if failure.message.strip() else ""
    what = f"{failure.type}: {message}" if message else failure.type
    how = "ran out of memory" if is_memory else "failed"
    alike = [rank for rank in own if facts.ranks[rank].failure.type == failure.type]  # type: ignore[union-attr]
    explanation = truncate_words(what, 300)
    sentence = f"{capitalize(rank_list(alike))} {how}{_in_step(one, failure.call_site)}{at_line(failure.call_site)}: {explanation}"
    rest = [rank for rank, other in sorted(facts.ranks.items()) if is_consequence(other.failure)]
    evidence = [f"{capitalize(rank_list(rest))} failed as a result: {_first_line(facts, rest)}"] if rest else []
    return Verdict(
        kind="out of memory" if is_memory else "failed",
        sentence=sentence if explanation.endswith((".", "…")) else f"{sentence}.",
        blamed=() if len(own) == len(facts.world) > 1 else tuple(own),
        concerned=(*own, *rest),
        step=one.position.loop_step if one.position else None,
        call_sites={rank: f.call_site for rank in own if (f := facts.ranks[rank].failure) and f.call_site} or None,
        evidence=(*evidence, *_memory(facts, own)) if is_memory else tuple(evidence),
        advice=(_LESS_MEMORY if is_memory else "Fix this exception; the other ranks' errors are consequences.",),
    )


def find_error_exit(facts: Facts) -> Verdict | None:
    """Find ranks whose exit status indicates a failure, although no exception ended them."""
    own = [rank for rank, one in sorted(facts.ranks.items()) if _has_exited_with_an_error(one)]
    if not own:
        return None
    first = min(own, key=lambda rank: facts.ranks[rank].ended_ns or 0)
    alike = [rank for rank in own if facts.ranks[rank].exit_status == facts.ranks[first].exit_status]
    one = facts.ranks[first]
    call = one.exit_call
    is_memory = call is not None and call.caught is not None and _is_of_memory(call.caught)
    site = call.call_site if call is not None else None
    sentence = (
        f"{capitalize(rank_list(alike))} exited with status {one.exit_status}{_in_step(one, site)}{at_line(site)}"
    )
    if call is not None and call.caught is not None:
        caught = call.caught
        explanation = truncate_words(f"{caught.type}: {caught.message.strip().partition(chr(10))[0]}".rstrip(": "), 300)
        sentence += f", after catching {explanation.removesuffix('.')}{at_line(caught.call_site)}"
    elif call is not None and (text := call.text.strip()):
        sentence += f": {truncate_words(text.partition(chr(10))[0], 300).removesuffix('.')}"
    rest = [rank for rank, other in sorted(facts.ranks.items()) if _ended_as_consequence(other)]
    return Verdict(
        kind="out of memory" if is_memory else "failed",
        sentence=sentence if sentence.endswith("…") else f"{sentence}.",
        blamed=() if len(own) == len(facts.world) > 1 else tuple(own),
        concerned=tuple(sorted({*own, *rest})),
        step=one.position.loop_step if one.position else None,
        call_sites={first: site} if site else None,
        evidence=_describe_consequences(facts, rest),
        advice=(_LESS_MEMORY,)
        if is_memory
        else ("Look at what the script prints before it exits; the other ranks' errors are consequences.",),
    )


def _has_exited_with_an_error(one: RankEvidence) -> bool:
    """Return True unless the error is because another rank had ended, or because the rank was signaled to end."""
    caught = one.exit_call.caught if one.exit_call is not None else None
    is_status = one.exit_status is not None and one.exit_status > 0
    return is_status and one.failure is None and not one.was_signaled and not is_consequence(caught)


def _describe_consequences(facts: Facts, rest: list[int]) -> tuple[str, ...]:
    """Format what happened to ranks that ended because another one had."""
    signaled = [rank for rank in rest if facts.ranks[rank].was_signaled and facts.ranks[rank].failure is None]
    failed = [rank for rank in rest if rank not in signaled]
    explanation = [f"{capitalize(rank_list(failed))} failed as a result."] if failed else []
    if signaled:
        explanation.append(
            f"{capitalize(rank_list(signaled))} {plural(signaled, 'was', 'were')} ended by the launcher after that."
        )
    return tuple(explanation)


def _ended_as_consequence(one: RankEvidence) -> bool:
    """Return True if a rank ended because another one had."""
    caught = one.exit_call.caught if one.exit_call is not None else None
    return one.was_signaled or is_consequence(one.failure) or is_consequence(caught)


def find_stopped_process(facts: Facts, ranks: tuple[int, ...] | None = None) -> Verdict | None:
    """Find ranks stopped by a signal or a debugger.

    Args:
        ranks: ranks for which this is known; by default determined from their liveness.
    """
    return _not_running(
        facts,
        facts.ranks_with_liveness("stopped") if ranks is None else ranks,
        "stopped",
        "stopped (SIGSTOP, Ctrl-Z or a debugger)",
        "Resume it with kill -CONT, or end it.",
    )


def find_gil_holder(facts: Facts, ranks: tuple[int, ...] | None = None) -> Verdict | None:
    """Find ranks whose process runs while none of its Python threads does.

    Args:
        ranks: ranks for which this is known; by default determined from their current state.
    """
    holding = ranks or tuple(
        rank for rank, one in sorted(facts.ranks.items()) if one.holds_gil and one.liveness in ("running", "sleeping")
    )
    found = _not_running(
        facts,
        holding,
        "holds the GIL",
        "in native code that holds Python's global interpreter lock, so that none of its Python code can run",
        "Look at the native frames with py-spy dump --native or gdb.",
    )
    if found is None or not facts.evidence.is_live:
        return found
    return replace(found, alternative="native code that computes for this long once looks the same from here")


def find_killed_process(facts: Facts) -> Verdict | None:
    """Find ranks that are gone without logging an error, while others are alive or failed because of that."""
    gone = tuple(rank for rank in facts.ranks_with_liveness("gone") if _may_have_been_killed(facts.ranks[rank]))
    if any(_reports_dead_peer(one) for one in facts.ranks.values()):
        # Nobody can check the ranks of which nothing is known, but a connection was closed.
        gone = gone or facts.ranks_with_liveness("unknown", "silent")
    # A parent process that saw an exit status knows more than peers that lost the connection.
    gone = tuple(rank for rank in gone if facts.ranks[rank].exit_status) or gone
    others = [rank for rank in facts.ranks if rank not in gone]
    if not gone or any(is_timeout(facts.ranks[rank].failure) for rank in others):
        # A rank that dies closes its connections: a timeout means waiting for one that was still there.
        return None
    hung = [rank for rank in gone if facts.had_hung(rank)]
    harmed = [rank for rank in others if facts.ranks[rank].liveness != "ended"]
    if len(hung) == len(gone) or (not harmed and (hung or facts.evidence.reports)):
        return None  # someone ended a job that hung, or its watchdogs' reports say more than its end
    first = _first_to_die(facts, gone)
    one = facts.ranks[first[0]]
    how = _how_it_died(one)
    standings = {rank: position for rank in first if (position := facts.ranks[rank].position)}
    sentence = (
        f"{capitalize(rank_list(first))} {plural(first, 'was', 'were')} {how} without logging an error"
        f"{format_positions(standings)}."
    )
    likely = [rank for rank in first if _memory_share(facts.ranks[rank]) >= _NEARLY_ALL_MEMORY]
    if likely:
        sentence += f" {capitalize(rank_list(likely))} had used nearly all memory: the kernel's OOM killer is likely."
    evidence = [*_memory(facts, first)]
    consequences = [rank for rank in others if is_consequence(facts.ranks[rank].failure)]
    if consequences:
        evidence.append(f"{capitalize(rank_list(consequences))} failed as a result: {_first_line(facts, consequences)}")
    later = tuple(rank for rank in gone if rank not in first)
    if later:
        evidence.append(f"{capitalize(rank_list(later))} died later.")
    if len(first) > 1:
        evidence.append("Their logs don't say which of them died first.")
    if not others:
        evidence.append("No rank survived to see the others die.")
    return Verdict(
        kind="killed",
        sentence=sentence,
        blamed=first if len(first) < len(facts.world) else (),
        concerned=tuple(sorted({*gone, *consequences})),
        step=one.position.loop_step if one.position else None,
        bucket=one.position.bucket if one.position else None,
        call_sites={rank: position.call_site for rank, position in standings.items() if position.call_site} or None,
        evidence=tuple(evidence),
        advice=("Look for its signal in the launcher's output, and for the OOM killer in its host's dmesg.",),
    )


def find_killed_at_shutdown(facts: Facts) -> Verdict | None:
    """Find ranks that reached the end of their script, and died of a signal while Python shut down."""
    own = [
        rank
        for rank in facts.ranks_with_liveness("ended")
        if (facts.ranks[rank].exit_status or 0) < 0 and not facts.ranks[rank].was_signaled
    ]
    if not own:
        return None
    how = _how_it_died(facts.ranks[own[0]])
    rest = tuple(rank for rank, one in sorted(facts.ranks.items()) if one.was_signaled)
    return Verdict(
        kind="killed",
        sentence=f"{capitalize(rank_list(own))} came to the end of {plural(own, 'its', 'their')} script and "
        f"{plural(own, 'was', 'were')} then {how}, while Python shut down.",
        blamed=tuple(own) if len(own) < len(facts.world) else (),
        concerned=tuple(sorted({*own, *rest})),
        evidence=(f"{capitalize(rank_list(rest))} {plural(rest, 'was', 'were')} ended because of that.",)
        if rest
        else (),
        advice=(
            "Call torch.distributed.destroy_process_group() at the end of the script: threads of a backend that still "
            "run abort the process.",
        ),
    )


def _may_have_been_killed(one: RankEvidence) -> bool:
    """Return True if a rank was not ended by its launcher, and did not exit with a status."""
    return not one.was_signaled and (one.exit_status is None or one.exit_status < 0)


def _reports_dead_peer(one: RankEvidence) -> bool:
    return is_consequence(one.failure) and not is_timeout(one.failure) and not is_interrupted(one.failure)


def _first_to_die(facts: Facts, gone: tuple[int, ...]) -> tuple[int, ...]:
    """Return ranks whose last sign of life is the oldest; if that is unknown, those that the others waited for."""
    ages = {rank: facts.ranks[rank].silent_for_ns for rank in gone}
    known = [age for age in ages.values() if age is not None]
    if len(known) < len(gone):
        return tuple(rank for rank in gone if rank in facts.awaited) or gone
    return tuple(rank for rank in gone if (ages[rank] or 0) >= max(known) - _SAME_TIME_NS)


def _how_it_died(one: RankEvidence) -> str:
    if one.exit_status is not None and one.exit_status < 0:
        with suppress(ValueError):
            return f"killed by signal {-one.exit_status} ({Signals(-one.exit_status).name})"
    for text, how in (
        ("Fatal Python error: Aborted", "aborted (SIGABRT)"),
        ("Segmentation fault", "killed by a segmentation fault (SIGSEGV)"),
    ):
        if text in one.stacks:
            return how
    return "killed, or ended by os._exit,"


def _not_running(facts: Facts, ranks: tuple[int, ...], kind: FaultKind, what: str, advice: str) -> Verdict | None:
    if not ranks:
        return None
    one = facts.ranks[ranks[0]]
    is_now = one.liveness in ("running", "sleeping", "stopped")
    where = f": {format_position(one.position)}" if one.position else ""
    since = (
        f" for {format_seconds(one.silent_for_ns)}" if one.silent_for_ns and one.silent_for_ns > _SAME_TIME_NS else ""
    )
    be = plural(ranks, "is", "are") if is_now else plural(ranks, "was", "were")
    return Verdict(
        kind=kind,
        sentence=f"{capitalize(rank_list(ranks))} {be} {what}{since}{where}.",
        blamed=ranks,
        concerned=tuple(sorted({*ranks, *facts.waiting})),
        step=one.position.loop_step if one.position else None,
        bucket=one.position.bucket if one.position else None,
        call_sites={ranks[0]: one.position.call_site} if one.position and one.position.call_site else None,
        evidence=(f"{capitalize(rank_list(facts.waiting))} {plural(facts.waiting, 'waits', 'wait')}.",)
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


def _is_of_memory(failure: Failure) -> bool:
    return failure.type.rpartition(".")[2] in _MEMORY_ERRORS or _OUT_OF_MEMORY.search(failure.message) is not None


def _in_step(one: RankEvidence, site: CallSite | None) -> str:
    """Format where a rank was; no phase if the line is known, which is more precise: the phase may be over."""
    if one.position is None:
        return ""
    return in_step(one.position) if site is not None else f" {format_position(one.position).partition(',')[0]}"


def _first_line(facts: Facts, ranks: list[int]) -> str:
    failure = facts.ranks[ranks[0]].failure
    text = failure.message.strip().splitlines()[0] if failure and failure.message.strip() else ""
    return truncate_words(_TORCH_SOURCE_PREFIX.sub("", text), 200)
