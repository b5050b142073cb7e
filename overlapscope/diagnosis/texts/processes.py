"""Texts of verdicts on processes: failed, exited, killed, stopped, never started, or ended from outside."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from signal import SIGINT, Signals
from typing import Final

from overlapscope.diagnosis.evidence import (
    LIVE_STATES,
    CallSite,
    Entry,
    ExitCall,
    Failure,
    RankEvidence,
    RankPosition,
    RecordingGap,
)
from overlapscope.diagnosis.failures import UnreachableAddress
from overlapscope.diagnosis.text import (
    at_line,
    collective_text,
    exception_text,
    format_position,
    format_positions,
    format_seconds,
    in_step,
    main_line,
    plural,
    truncate_words,
)
from overlapscope.diagnosis.texts.waiting import gap_advice, gaps_text
from overlapscope.diagnosis.verdict import VerdictText
from overlapscope.text import capitalize, rank_list

_LESS_MEMORY: Final = "Use a smaller batch, accumulate gradients, or checkpoint activations."
_FIX_FIRST: Final = "Fix this exception; the other ranks' errors are consequences."
_NAME_INTERFACE: Final = (
    "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each host to the interface that connects them (see 'ip address')."
)
_LOOK_UP_HOST: Final = (
    "Without it, gloo takes the address of the host's own name: 'getent hosts $(hostname)' must not print 127.0.0.1 or "
    "127.0.1.1, which come from /etc/hosts."
)
_SAME_STORE: Final = "Compare MASTER_ADDR and MASTER_PORT, or --rdzv-endpoint of torchrun, on all hosts."
_REACH_STORE: Final = (
    "Was rank 0 started, or the torchrun that keeps the store? Does its name stand for the right address on the host "
    "that failed ('getent hosts NAME'), and does a firewall let the port through?"
)
_LOOK_AT_THE_OTHER: Final = "Look for a rank that ended at that time: its address can't be reached either."
_KNOWN_CAUSES: Final = {
    "Duplicate GPU detected": "Give each rank a device of its own before the first collective, as with "
    "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])).",
    "server socket has failed to listen": "Another process has that port, perhaps of a job that was not ended "
    "('ss -ltnp' names it): end it, or give another MASTER_PORT.",
}
"""What to do about an exception, by a phrase of its message: NCCL's and c10d's."""
_FIX_ALIKE: Final = "Fix this exception: each rank raised it by itself, at the same line."
_TORCH_SOURCE_PREFIX: Final = re.compile(r"^\[[^\]]+\.(cc|cpp|h|hpp):\d+\]\s*")
"""Prefix of messages, such as ``[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]``, that is of no use."""
_MAX_CAUSE_LENGTH: Final = 300
_MAX_CONSEQUENCE_LENGTH: Final = 200
_MIN_SILENCE_NS: Final = 1_000_000_000


def failed(
    ranks: Sequence[int],
    one: RankEvidence,
    failure: Failure,
    *,
    consequences: Sequence[RankEvidence],
    is_memory: bool,
    memory: Sequence[RankEvidence],
    is_alike: bool,
) -> VerdictText:
    """Describe an exception that ended ranks.

    Args:
        ranks: ranks that an exception of this type ended.
        one: the first of them.
        failure: its exception.
        consequences: ranks that failed because of that.
        memory: ranks whose memory is shown.
        is_alike: True if all ranks of the job raised it by themselves, at one line.
    """
    explanation = truncate_words(exception_text(failure), _MAX_CAUSE_LENGTH)
    how = "ran out of memory" if is_memory else "failed"
    advice = _LESS_MEMORY if is_memory else _FIX_ALIKE if is_alike and len(ranks) > 1 else _FIX_FIRST
    advice = next((known for phrase, known in _KNOWN_CAUSES.items() if phrase in failure.message), advice)
    sentence = (
        f"{capitalize(rank_list(ranks))} {how}{_in_step(one, failure.call_site)}{at_line(failure.call_site)}: "
        f"{explanation}"
    )
    return {
        "sentence": _end_sentence(sentence),
        "evidence": (*_failed_as_result(consequences), *_memory_in_use(memory)),
        "advice": (advice,),
    }


def exited(
    ranks: Sequence[int],
    one: RankEvidence,
    *,
    failed: Sequence[int],
    signaled: Sequence[int],
    is_memory: bool,
    is_end_known: bool,
) -> VerdictText:
    """Describe an exit status that indicates an error.

    Args:
        ranks: ranks that exited with this status.
        one: the first of them.
        failed: ranks that failed because of that.
        signaled: ranks that the launcher ended because of that.
        is_end_known: False if what they recorded of their ends is lost.
    """
    site = one.exit_call.call_site if one.exit_call is not None else None
    sentence = (
        f"{capitalize(rank_list(ranks))} exited with status {one.exit_status}{_in_step(one, site)}{at_line(site)}"
        f"{_exit_cause(one.exit_call)}"
    )
    evidence = [f"{capitalize(rank_list(failed))} failed as a result."] if failed else []
    if signaled:
        evidence.append(
            f"{capitalize(rank_list(signaled))} {plural(signaled, 'was', 'were')} ended by the launcher after that."
        )
    advice = "Look at what the script prints before it exits; the other ranks' errors are consequences."
    return {
        "sentence": sentence if sentence.endswith("…") else f"{sentence}.",
        "alternative": "" if is_end_known else "what it recorded of its end is lost, and another may have ended first",
        "evidence": tuple(evidence),
        "advice": (_LESS_MEMORY if is_memory else advice,),
    }


def _exit_cause(call: ExitCall | None) -> str:
    if call is None:
        return ""
    if (caught := call.caught) is not None:
        what = truncate_words(exception_text(caught), _MAX_CAUSE_LENGTH).removesuffix(".")
        return f", after catching {what}{at_line(caught.call_site)}"
    text = _first_line(call.text)
    return f": {truncate_words(text, _MAX_CAUSE_LENGTH).removesuffix('.')}" if text else ""


def stopped(ranks: tuple[int, ...], one: RankEvidence, waiting: tuple[int, ...]) -> VerdictText:
    """Describe ranks stopped by a signal or a debugger; their positions are that of the first."""
    return {
        "sentence": _state_sentence(ranks, one, "stopped (SIGSTOP, Ctrl-Z or a debugger)"),
        "evidence": _waiting_ranks(waiting),
        "advice": ("Resume it with kill -CONT, or end it.",),
    }


def holds_gil(ranks: tuple[int, ...], one: RankEvidence, waiting: tuple[int, ...], *, is_live: bool) -> VerdictText:
    """Describe ranks whose process runs while none of its Python threads does."""
    state = _state_sentence(ranks, one, "in native code that holds Python's global interpreter lock")
    return {
        "sentence": f"{state} None of its Python code {'can' if is_live else 'could'} run.",
        "alternative": "native code that only computes for long looks the same from here" if is_live else "",
        "evidence": _waiting_ranks(waiting),
        "advice": ("Look at the native frames with py-spy dump --native or gdb.",),
    }


def _state_sentence(ranks: tuple[int, ...], one: RankEvidence, what: str) -> str:
    silent_ns = one.silent_for_ns or 0
    since = f" for {format_seconds(silent_ns)}" if silent_ns > _MIN_SILENCE_NS else ""
    be = plural(ranks, "was", "were")
    if one.liveness in LIVE_STATES:
        be = plural(ranks, "has been", "have been") if since else plural(ranks, "is", "are")
    where = f": {format_position(one.position)}" if one.position else ""
    return f"{capitalize(rank_list(ranks))} {be} {what}{since}{where}."


def _waiting_ranks(waiting: tuple[int, ...]) -> tuple[str, ...]:
    return (f"{capitalize(rank_list(waiting))} {plural(waiting, 'waits', 'wait')}.",) if waiting else ()


def killed(
    first: Sequence[RankEvidence],
    *,
    out_of_memory: Sequence[int],
    consequences: Sequence[RankEvidence],
    later: Sequence[int],
    has_survivors: bool,
    may_not_match: bool = False,
) -> VerdictText:
    """Describe ranks that died without logging an error.

    Args:
        first: ranks that died first.
        out_of_memory: those of them that had used nearly all memory.
        consequences: ranks that failed because of that.
        later: ranks that died later.
        has_survivors: True if some rank did not die.
        may_not_match: True if the backend may have ended them because what ranks launched does not match.
    """
    ranks = [one.rank for one in first]
    positions = {one.rank: one.position for one in first if one.position}
    sentence = (
        f"{capitalize(rank_list(ranks))} {plural(ranks, 'was', 'were')} {_how_it_died(first[0])} without logging an "
        f"error{format_positions(positions)}."
    )
    if out_of_memory:
        sentence += (
            f" {capitalize(rank_list(out_of_memory))} had used nearly all memory: the kernel's OOM killer is likely."
        )
    evidence = [*_memory_in_use(first), *_failed_as_result(consequences)]
    if later:
        evidence.append(f"{capitalize(rank_list(later))} died later.")
    if len(ranks) > 1:
        evidence.append("Their logs don't say which of them died first.")
    if not has_survivors:
        evidence.append("No rank survived to see the others die.")
    return {
        "sentence": sentence,
        "alternative": "a thread of gloo aborted it, as it does on a rank that receives more than it expects: look for "
        "'mismatch' in the launcher's output"
        if may_not_match
        else "",
        "evidence": tuple(evidence),
        "advice": ("Look for the signal in the launcher's output, and for the OOM killer in the host's dmesg.",),
    }


def killed_at_shutdown(ranks: Sequence[int], one: RankEvidence, ended_later: Sequence[int]) -> VerdictText:
    """Describe ranks that died of a signal after the end of their script; the signal is that of the first."""
    later = f"{capitalize(rank_list(ended_later))} {plural(ended_later, 'was', 'were')} ended because of that."
    return {
        "sentence": f"{capitalize(rank_list(ranks))} reached the end of {plural(ranks, 'its', 'their')} script and "
        f"{plural(ranks, 'was', 'were')} then {_how_it_died(one)}, while Python shut down.",
        "evidence": (later,) if ended_later else (),
        "advice": (
            "Call torch.distributed.destroy_process_group() at the end of the script: threads of a backend that still "
            "run abort the process.",
        ),
    }


def all_killed(ranks: Sequence[int]) -> VerdictText:
    """Describe a job of which all ranks died."""
    return {
        "sentence": "All ranks were killed without logging an error; their logs don't say why, or which died first."
        if len(ranks) > 1
        else f"Rank {ranks[0]} was killed without logging an error.",
        "evidence": ("The order of their collectives is the same as far as they got.",),
        "advice": ("Look at the launcher's output, and for the OOM killer in dmesg.",),
    }


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


def _failed_as_result(ranks: Sequence[RankEvidence]) -> list[str]:
    if not ranks:
        return []
    failure = ranks[0].failure
    message = _TORCH_SOURCE_PREFIX.sub("", main_line(failure.message if failure else ""))
    who = capitalize(rank_list(one.rank for one in ranks))
    return [f"{who} failed as a result: {truncate_words(message, _MAX_CONSEQUENCE_LENGTH)}"]


def _memory_in_use(ranks: Sequence[RankEvidence]) -> list[str]:
    return [
        f"Rank {one.rank} had {one.rss_bytes / 1024**3:.1f} GiB of {one.memory_limit_bytes / 1024**3:.1f} GiB in use."
        for one in ranks
        if one.rss_bytes and one.memory_limit_bytes
    ]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _end_sentence(text: str) -> str:
    return text if text.endswith((".", "…")) else f"{text}."


def _in_step(one: RankEvidence, site: CallSite | None) -> str:
    """Format where a rank was; no phase if the line is known, which is more precise: the phase may be over."""
    if one.position is None:
        return ""
    return in_step(one.position) if site is not None else f" {format_position(one.position).partition(',')[0]}"


def wrong_world_size(ranks_by_size: Mapping[int, Sequence[int]], beyond: Sequence[int], call: int) -> VerdictText:
    """Describe ranks that were started with different world sizes, or with ranks beyond the only one.

    Args:
        call: number of their call of ``init_process_group``, from 1.
    """
    parts = [f"{size} on {rank_list(ranks)}" for size, ranks in ranks_by_size.items()]
    again = "" if call == 1 else f" in call {call} of init_process_group"
    sentence = f"The ranks disagree on the world size{again}: {'; '.join(parts)}."
    if len(ranks_by_size) == 1:
        who, size = capitalize(rank_list(beyond)), next(iter(ranks_by_size))
        sentence = f"{who} {plural(beyond, 'is', 'are')} out of range for a world size of {size}."
    return {
        "sentence": sentence,
        "evidence": ("World sizes passed to init_process_group on each rank (run.json, joining.json).",)
        if call == 1
        else ("World sizes passed to init_process_group on each rank (rejoining.json).",),
        "advice": ("Start all ranks with the same WORLD_SIZE (--nnodes and --nproc-per-node of torchrun).",)
        if call == 1
        else ("Compute world_size and rank of the new group from what all ranks agree on.",),
    }


def never_started(
    ranks: Sequence[int],
    world_size: int,
    *,
    ended: Sequence[int],
    is_joining: bool,
    waited_ns: int | None,
    is_known: bool,
) -> VerdictText:
    """Describe ranks that left nothing.

    Args:
        ended: those of them that are known to have ended without an error.
        is_joining: True if the others wait in init_process_group.
        waited_ns: how long the others have waited in a live job; None if the job is over.
        is_known: False if all that is known is that they have no folder.
    """
    what = "never started"
    otherwise = "" if waited_ns is None else f"{plural(ranks, 'it', 'they')} may still join"
    if not is_known:
        otherwise = f"{plural(ranks, 'its folder is', 'their folders are')} not here, and may be on another host"
    if waited_ns is not None:
        after = f" after {format_seconds(waited_ns)}" if waited_ns else " yet"
        what = f"{plural(ranks, 'has', 'have')} not joined{after}"
    if len(ended) == len(ranks):
        return {
            "sentence": f"{capitalize(rank_list(ranks))} of {world_size} ended with status 0 and never called "
            f"init_process_group, where the others wait for {plural(ranks, 'it', 'them')}.",
            "advice": ("Look for a way through the script that returns before init_process_group.",),
        }
    return {
        "sentence": f"{capitalize(rank_list(ranks))} of {world_size} {what}: the others wait for "
        f"{plural(ranks, 'it', 'them')} in {'init_process_group' if is_joining else 'their first collective'}.",
        "alternative": otherwise,
        "evidence": (
            f"No folder in the recording for {rank_list(ranks)}.",
            f"No collective with {rank_list(ranks)} has completed on any other rank.",
        ),
        "advice": ("Look at the launcher's output on that host: was the process started, and did it fail on import?",),
    }


def unreachable(
    ranks: Sequence[int],
    address: UnreachableAddress,
    failure: Failure,
    *,
    consequences: Sequence[RankEvidence],
    missing: Sequence[int],
    gone: Sequence[int],
    is_on_several_hosts: bool,
) -> VerdictText:
    """Describe ranks that could not connect to an address.

    Args:
        failure: what ended the first of them.
        consequences: other ranks, which failed because of that.
        missing: ranks that left nothing.
        gone: ranks that have ended, nobody knows when.
        is_on_several_hosts: True if it is known that the job is.
    """
    host = f"[{address.host}]" if ":" in address.host else address.host  # of IPv6
    where = f" at {host}:{address.port}".removesuffix(":") if host else ""
    start = f"{capitalize(rank_list(ranks))} failed{at_line(failure.call_site)}: no connection to"
    alternative = ""
    if address.is_store:
        sentence = f"{start} the store{where}, through which ranks find each other."
        advice = [_SAME_STORE, _REACH_STORE]
    elif address.is_loopback and (is_on_several_hosts or missing):
        sentence = (
            f"{start} another rank, which has given the address {address.host}: each host takes that for its own."
        )
        advice = [_NAME_INTERFACE, _LOOK_UP_HOST]
        alternative = "" if is_on_several_hosts else "that rank was on the same host, and had ended"
    else:
        sentence = f"{start} another rank{where}."
        advice = [_LOOK_AT_THE_OTHER, _NAME_INTERFACE, *([] if where else [_LOOK_UP_HOST])]
        alternative = f"{rank_list(gone)} had ended before" if gone else ""
    return {
        "sentence": sentence,
        "alternative": alternative,
        "evidence": (exception_text(failure), *_failed_as_result(consequences)),
        "advice": tuple(advice),
    }


def slow_start(rank: int, position: RankPosition, idle_ns: int, waiting: Sequence[int], missed: Entry) -> VerdictText:
    """Describe a rank that has not completed its first step, while others wait for it in a collective."""
    where = at_line(position.call_site) or " in its script"
    if position.phase is not None:
        where = f" {format_position(position)}"
    return {
        "sentence": f"Rank {rank} has been{where} for {format_seconds(idle_ns)}, and {rank_list(waiting)} "
        f"{plural(waiting, 'waits', 'wait')} for it in {collective_text(missed, with_names=False)}"
        f"{at_line(missed.call_site)}. First steps may take long."
    }


def signal_text(number: int) -> str:
    """Format a signal: ``SIGTERM``; for Ctrl-C both names."""
    name = f"signal {number}"
    with suppress(ValueError):
        name = Signals(number).name
    return f"Ctrl-C, {name}" if number == SIGINT else name


def command_signaled(number: int) -> str:
    """Say that the command was signaled."""
    return f"The command was sent {signal_text(number)} while it ran."


def interrupted(what: str, step: int | None, *, compared: str) -> VerdictText:
    """Describe a job without a fault that was ended from outside.

    Args:
        what: who ended what.
        compared: what is the same on all ranks, from ``format_compared``.
    """
    return {"sentence": f"{what}{_in_step_number(step)}; nothing was found wrong until then: {compared}."}


def interrupted_with_gaps(what: str, step: int | None, gaps: Sequence[RecordingGap]) -> VerdictText:
    """Describe a job that was ended from outside and of which parts are missing."""
    return {
        "sentence": f"{what}{_in_step_number(step)}. Can't tell whether anything was wrong before: {gaps_text(gaps)}",
        "advice": gap_advice(gaps),
    }


def interrupted_unrecorded(what: str, step: int | None, unrecorded: Collection[int]) -> VerdictText:
    """Describe a job that was ended from outside, with ranks whose recording ended before."""
    return {
        "sentence": f"{what}{_in_step_number(step)}. Can't tell whether anything was wrong before: "
        f"{rank_list(unrecorded)} {plural(unrecorded, 'was', 'were')} not recorded to the end."
    }


def interrupted_in_silence(what: str, step: int | None, quiet_ns: int) -> VerdictText:
    """Describe a job that was ended from outside after nothing had happened for a while."""
    return {
        "sentence": f"{what}{_in_step_number(step)}, when nothing had been recorded for {format_seconds(quiet_ns)}: "
        "it may have hung."
    }


def _in_step_number(step: int | None) -> str:
    return "" if step is None else f" in step {step}"


def keyboard_interrupt() -> str:
    """Format who ended the job, if ranks were interrupted by Ctrl-C or something that looks the same."""
    return "The job was interrupted (KeyboardInterrupt, as by Ctrl-C)"


def ended_by_signal(numbers: Collection[int]) -> str:
    """Format who ended the job, if it was signaled."""
    how = "interrupted" if set(numbers) == {SIGINT} else "ended from outside"
    return f"The job was {how} ({', '.join(map(signal_text, numbers))})"


def ended_by_launcher(ranks: Collection[int], signals: Collection[int]) -> str:
    """Format who ended the job, if the process that had started the ranks did."""
    by = f" ({' and '.join(map(signal_text, sorted(signals)))})" if signals else ""
    was, them = plural(ranks, "was", "were"), plural(ranks, "it", "them")
    return f"{capitalize(rank_list(ranks))} {was} ended by the process that had started {them}{by}"
