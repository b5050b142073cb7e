"""Texts of verdicts on ranks that others wait for, on gradients that never were ready, and on jobs without a fault."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from overlapscope.diagnosis.evidence import (
    CallSite,
    Entry,
    ExitCall,
    GroupOrder,
    InterruptedBackward,
    RankEvidence,
    RankPosition,
    RecordingGap,
    UnreadyParameter,
)
from overlapscope.diagnosis.process_state import WaitReason
from overlapscope.diagnosis.text import (
    at_line,
    collective_text,
    first_few,
    format_position,
    format_round,
    format_seconds,
    group_text,
    in_step,
    join_and,
    plural,
)
from overlapscope.diagnosis.verdict import VerdictText
from overlapscope.diagnosis.wait_graph import SegmentMessage, Wait
from overlapscope.text import capitalize, count_of, rank_list

_MAX_GAPS: Final = 3
_MAX_MESSAGES: Final = 4
_WAITING: Final[dict[WaitReason, str]] = {
    "thread": "waiting for a lock or another thread",
    "process": "waiting for another process",
    "socket": "waiting for a socket",
    "file": "reading or writing a file",
    "torch.distributed": "in a call of torch.distributed",
}
_LOOK_AT_KERNELS: Final = (
    "Look for a kernel that is slow there or never ends, such as one that waits for another stream or process: "
    "cuda-gdb, or a run with CUDA_LAUNCH_BLOCKING=1."
)
_LOOK_AT_LOADER: Final = "Look at the data loader of that rank: its workers, its storage, a lock."
_LOOK_AT_NETWORK: Final = "Look at the network between the hosts, and at the backend's own log (NCCL_DEBUG=INFO)."
_LET_CALLBACKS_RETURN: Final = (
    "Let no callback of a future wait for a collective: while it does, its thread completes none. With a hook of "
    "torch's, have one bucket (a larger bucket_cap_mb)."
)
MAY_RECOVER: Final = "a single slow operation looks the same from here"
MIGHT_HAVE_RECOVERED: Final = "a single slow operation looks the same, and the job may have been ended too early"


def _where(position: RankPosition | None) -> str:
    text = format_position(position) if position else ""
    return f", {text}" if text else ""


def _duration(ns: int | None) -> str:
    return f" for {format_seconds(ns)}" if ns else ""


def _entry_text(entry: Entry) -> str:
    return f"{collective_text(entry)}{at_line(entry.call_site)}"


def waits_for_message(rank: int, round_name: str, parts: Sequence[str]) -> str:
    """Say in which round a rank waits, and for whom; ``parts`` are from ``unposted``."""
    return f"Rank {rank} waits in {round_name} for {join_and(parts)}."


def unposted(peers: Sequence[int], awaited_by_peer: Sequence[int], op: str) -> str:
    """Say which peers have not posted their side of a message, and for whom a single one of them waits itself."""
    waits = f", which waits for {rank_list(awaited_by_peer)}," if awaited_by_peer else ""
    return f"{rank_list(peers)}{waits} to {'send' if op == 'recv' else 'receive'} its part"


def undelivered(rank: int, message: SegmentMessage) -> str:
    """Say that a message has not arrived although both sides have posted it."""
    return f"Rank {rank} waits in {round_text(message)} for what rank {message.peer} sends, and it has not arrived."


def round_text(message: SegmentMessage) -> str:
    """Format the round: ``round 2 of 3 (reduce-scatter) of the sum of bucket 1 by ring in step 12``."""
    signature = message.entry.signature
    model = f" of model {signature.model}" if signature.model else ""
    what = f"the sum of bucket {signature.bucket}{model} by {signature.strategy}{in_step(message.entry)}"
    where = format_round(signature)
    return f"{where} of {what}" if signature.rounds > 1 else f"{what} ({where})"


def in_no_sync(ranks: Sequence[RankEvidence], since: int, waiting: Collection[int], missed: Entry) -> VerdictText:
    """Describe ranks that went through the step in which others wait for their bucket, under no_sync()."""
    numbers = [one.rank for one in ranks]
    return {
        "sentence": f"{capitalize(rank_list(numbers))} {plural(numbers, 'has', 'have')} run every backward from step "
        f"{since} on under no_sync(), and {rank_list(waiting)} {plural(waiting, 'waits', 'wait')} for "
        f"{plural(numbers, 'it', 'them')}{in_step(missed)}: {_entry_text(missed)}.",
        "evidence": tuple(f"Rank {one.rank} has done {one.steps_done} steps." for one in ranks[:4]),
        "advice": ("Enter no_sync() on all ranks or on none, for the same batches.",),
    }


def left_loop(
    ranks: Sequence[RankEvidence],
    call: ExitCall | None,
    waiting: Collection[int],
    missed: Entry,
    *,
    ended: Collection[int],
    alternative: str,
) -> VerdictText:
    """Describe ranks that left their training loop while others wait for them.

    Args:
        call: how the first of them exited, if it was explicit.
        ended: those whose process has ended.
        alternative: what else may be the case if none has.
    """
    numbers = [one.rank for one in ranks]
    steps = ", ".join(f"rank {one.rank} after {one.steps_done} steps" for one in ranks[:4] if one.steps_done)
    how = "left the training loop" if call is None else f"exited with status {call.status}{at_line(call.call_site)}"
    evidence = f"{capitalize(rank_list(numbers))} {plural(numbers, 'is', 'are')} past the training loop."
    if ended:
        evidence = f"{capitalize(rank_list(ended))} ended without an error."
    return {
        "sentence": f"{capitalize(rank_list(numbers))} {how}{f' ({steps})' if steps else ''}, and {rank_list(waiting)} "
        f"{plural(waiting, 'waits', 'wait')} for {plural(numbers, 'it', 'them')}{in_step(missed)}: "
        f"{_entry_text(missed)}.",
        "alternative": "" if ended else alternative,
        "evidence": (evidence,),
        "advice": (
            "Give all ranks the same number of batches (drop_last, DistributedSampler), or train inside join().",
            "If it was a break or an early stop: let the ranks agree on it, with an all_reduce of the decision.",
        ),
    }


def stalled(
    ranks: Sequence[int],
    one: RankEvidence,
    waiting: Collection[int],
    wait: Wait,
    *,
    is_live: bool,
    is_silent: bool,
    is_busy: bool,
    gave_up: Collection[int],
    gave_up_ns: int | None,
    reason: WaitReason | None,
    alternative: str,
) -> VerdictText:
    """Describe ranks that make no progress and that others wait for; the state shown is that of the first.

    Args:
        is_live: True if its process is there to be looked at.
        is_silent: True if nothing is heard of any of them.
        gave_up: ranks that waited for others until their collective timed out.
        gave_up_ns: how long any of them waited for these ranks; None if none did.
        reason: what the first waits for, if known.
    """
    what = f"{_stalled_how(reason, is_silent=is_silent, is_busy=is_busy)}{_duration(one.idle_ns)}"
    if gave_up_ns is not None and one.idle_ns is not None and 2 * one.idle_ns < gave_up_ns:
        what = "gone on without getting there"
    missed = wait.first_missed_by(ranks)
    where = f"in collective {missed.number} of {group_text(wait.group)}"
    if wait.is_point_to_point:  # each rank numbers its own
        where = f"for its message in {group_text(wait.group)}"
    evidence = []
    if one.liveness == "unknown":
        evidence.append("Whether the processes still run is unknown from here.")
    if one.cpu_share is not None:
        uses = "uses" if is_live else "used"
        evidence.append(f"Rank {one.rank} {uses} {100 * one.cpu_share:.0f} % of a core.")
    they_wait = f"while {rank_list(waiting)} {plural(waiting, 'waits', 'wait')}"
    if gave_up_ns is not None:
        after = format_seconds(gave_up_ns)
        they_wait = f"and {rank_list(gave_up)} gave up waiting for {plural(ranks, 'it', 'them')} after {after}"
    return {
        "sentence": f"{capitalize(rank_list(ranks))} {plural(ranks, 'has', 'have')} {what}"
        f"{_where(one.position)}, {they_wait} {where}: {_entry_text(missed)}.",
        "alternative": alternative,
        "evidence": tuple(evidence),
        "advice": tuple(_stall_advice(one, reason, is_live=is_live, is_busy=is_busy and gave_up_ns is not None)),
    }


def _stalled_how(reason: WaitReason | None, *, is_silent: bool, is_busy: bool) -> str:
    if reason == "data loader":
        return "been stuck in its data loader"
    if is_silent:
        return "been unreachable (process, host or network gone)"
    if is_busy:
        return "been busy elsewhere"
    return "made no progress" if reason is None else f"been {_WAITING[reason]}"


def _stall_advice(one: RankEvidence, reason: WaitReason | None, *, is_live: bool, is_busy: bool) -> Iterator[str]:
    if reason == "data loader":
        yield _LOOK_AT_LOADER
    if is_busy:
        yield (
            "If that work rightly takes so long: do it before the others have to wait for it, or give the process "
            "group a longer timeout."
        )
    if one.stacks:
        then = "" if is_live else " then"
        yield f"Look at its stacks{then}: stall.json and stacks_*.txt in rank_{one.rank} of the recording."
    elif is_live:
        yield "Look at that rank's stacks, or run py-spy dump on its process."
    else:
        yield "If it happens again, look at that rank's stacks while it lasts: py-spy dump on its process."


def all_in_messages(entries: Mapping[int, Entry], *, alternative: str) -> VerdictText:
    """Describe ranks that are all in sends and receives that don't complete; ``entries`` by rank."""
    shown = [f"rank {rank}: {_entry_text(entry)}" for rank, entry in list(entries.items())[:_MAX_MESSAGES]]
    return {
        "sentence": f"All ranks that left a log wait in sends and receives{in_step(next(iter(entries.values())))} that "
        f"never completed: {'; '.join(shown)}.",
        "alternative": alternative,
        "evidence": ("No message is known to lack its other side.",),
        "advice": (_LOOK_AT_NETWORK,),
    }


def device_behind(
    ranks: Sequence[int], idle_ns: int | None, waiting: Collection[int], wait: Wait, *, alternative: str
) -> VerdictText:
    """Describe devices that have not reached a collective which their hosts have launched."""
    entry = wait.entry
    return {
        "sentence": f"The {plural(ranks, 'device', 'devices')} of {rank_list(ranks)} "
        f"{plural(ranks, 'has', 'have')} not "
        f"reached collective {entry.number} of {group_text(wait.group)}{in_step(entry)}{_duration(idle_ns)}, in which "
        f"{plural(waiting, 'that', 'those')} of {rank_list(waiting)} {plural(waiting, 'waits', 'wait')}: "
        f"{_entry_text(entry)}.",
        "alternative": alternative,
        "evidence": (f"{plural(ranks, 'Its host has', 'Their hosts have')} launched it; earlier work has not ended.",),
        "advice": (_LOOK_AT_KERNELS, "Look at that device with nvidia-smi: its clocks, its temperature, its errors."),
    }


def all_inside(
    group: GroupOrder,
    entry: Entry,
    reached: Collection[bool | None],
    callbacks: Mapping[int, Sequence[CallSite]],
    *,
    on_device: bool,
    alternative: str,
) -> VerdictText:
    """Describe a collective that all ranks have launched and that does not complete.

    Args:
        reached: whether devices have reached it.
        callbacks: lines at which threads of the backend are, by rank.
        on_device: True if devices execute it, while hosts run ahead.
    """
    evidence = ["The ranks agree on all collectives up to there, so no rank's order is at fault."]
    is_reached_by_none = set(reached) == {False}
    if on_device:
        progress = "A device that is still busy with earlier work looks the same: hosts run ahead."
        if set(reached) == {True}:
            progress = "All devices have reached it."
        elif is_reached_by_none:
            progress = "No device has reached it: each is still busy with earlier work."
        evidence.append(progress)
    advice = _LOOK_AT_KERNELS if is_reached_by_none else _LOOK_AT_NETWORK
    if any(callbacks.values()) and not on_device:
        lines = dict.fromkeys(
            str(site).rpartition("site-packages/")[2] for sites in callbacks.values() for site in sites
        )
        on = rank_list([rank for rank, sites in callbacks.items() if sites])
        evidence.append(
            f"On {on} threads of the backend, which complete collectives, are in callbacks: {join_and([*lines])}."
        )
        advice = _LET_CALLBACKS_RETURN
    return {
        "sentence": f"All ranks that left a log have launched collective {entry.number} of {group_text(group)}"
        f"{in_step(entry)}, and it never completed: {_entry_text(entry)}.",
        "alternative": alternative,
        "evidence": tuple(evidence),
        "advice": (advice,),
    }


def not_launched(
    ranks: Sequence[int],
    waiting: Collection[int],
    wait: Wait,
    latest: Sequence[tuple[int, int | None, Entry | None]],
    *,
    is_begun: bool,
) -> VerdictText:
    """Describe ranks that have not launched what others wait in, as far as dumps tell.

    Args:
        latest: the latest launch of ranks in the group: rank, number and entry, as far as known.
        is_begun: False if the others have launched it, and their devices have not begun it.
    """
    missed = wait.first_missed_by(ranks)
    evidence = [f"Last launches in this group: {join_and([_latest_launch(*one) for one in latest])}."]
    evidence.append(
        f"The dumps don't say whether {rank_list(ranks)} left it out, {plural(ranks, 'is', 'are')} late or "
        f"{plural(ranks, 'has', 'have')} ended, or whether the others launched one too many."
    )
    does = f"in which {rank_list(waiting)} {plural(waiting, 'waits', 'wait')}"
    if not is_begun:
        does = f"which {rank_list(waiting)} {plural(waiting, 'has', 'have')} launched and not begun"
    sentence = f"not launched collective {missed.number} of {group_text(wait.group)}, {does}"
    if wait.is_point_to_point:
        sentence, evidence = (
            f"not launched the counterpart of what {rank_list(waiting)} {plural(waiting, 'waits', 'wait')} in",
            evidence[1:],
        )
    return {
        "sentence": f"{capitalize(rank_list(ranks))} {plural(ranks, 'has', 'have')} {sentence}: {_entry_text(missed)}.",
        "alternative": ""
        if is_begun
        else "the devices may be at earlier work, and the job may go on after these dumps",
        "evidence": tuple(evidence),
        "advice": (
            "Look for a collective, or a part of the model, inside an `if` that depends on the rank or on the data.",
            f"Look at what {rank_list(ranks)} {plural(ranks, 'does', 'do')}: py-spy dump, its log, its data loader.",
        ),
    }


def _latest_launch(rank: int, number: int | None, entry: Entry | None) -> str:
    if entry is None:
        return f"number {number} on rank {rank}" if number else f"unknown on rank {rank}"
    return f"number {entry.number} on rank {rank}, {_entry_text(entry)}"


def no_dump(absent: Sequence[int], waiting: Collection[int], wait: Wait) -> VerdictText:
    """Describe ranks that wait in a collective with ranks that left no dump."""
    entry = wait.entry
    return {
        "sentence": f"{capitalize(rank_list(absent))}, which left no dump, {plural(absent, 'takes', 'take')} part in "
        f"collective {entry.number} of {group_text(wait.group)}, in which {rank_list(waiting)} "
        f"{plural(waiting, 'waits', 'wait')}: {_entry_text(entry)}.",
        "evidence": ("The existing dumps agree as far as they go.",),
        "advice": (
            f"Look at {rank_list(absent)} first: a rank that is dead or hangs in native code can't dump.",
            _LOOK_AT_NETWORK,
        ),
    }


def dumps_agree(ranks: Collection[int], missing: Collection[int], *, is_gloo: bool) -> VerdictText:
    """Describe dumps in which nothing is wrong, while some ranks left none."""
    return {
        "sentence": f"The dumps of {rank_list(ranks)} agree, and no rank waits in them; "
        f"there is no dump of {rank_list(missing)}.",
        "evidence": ("gloo reports timed-out collectives as completed.",) if is_gloo else (),
        "advice": (f"Dump on {rank_list(missing)} as well, or copy all dumps into one folder.",),
    }


def never_ready(
    ranks: Sequence[int],
    bucket: int,
    step: int | None,
    *,
    is_everywhere: bool,
    is_over: bool,
    waiting: Collection[int],
    unready: Sequence[UnreadyParameter],
    frozen: Sequence[str],
    interrupted: InterruptedBackward | None,
    backward: CallSite | None,
) -> VerdictText:
    """Describe gradients missing in a backward, so that their bucket was never launched.

    Args:
        ranks: ranks that lack the same gradients.
        is_everywhere: True if these are all ranks.
        is_over: True if their backward has certainly ended.
        unready: the parameters without a gradient.
        frozen: parameters of the bucket that were frozen after they had been passed to DDP.
        interrupted: the backward of the first rank, if an exception came out of it.
        backward: line of the backward, if known.
    """
    who, names = capitalize(rank_list(ranks)), [one.name for one in unready]
    of_bucket = [one for one in unready if one.bucket == bucket]
    in_bucket = [one.name for one in of_bucket]
    subject = f"{who} never launched" if is_over else f"{who} {plural(ranks, 'has', 'have')} not launched"
    if is_everywhere:
        subject = f"No rank {'launched' if is_over else 'has launched'}"
    when = f" of step {step}" if step is not None else ""
    result = ""
    if waiting:
        waits = plural(waiting, "waits", "wait")
        result = f", so {rank_list(waiting)} {waits} for {plural(ranks, 'it', 'them')}"
    cause = ""
    if interrupted is not None:
        cause = f"the backward raised an exception{at_line(interrupted.call_site)} that was caught, so "
    # A backward that leaves out a branch leaves parameters of several buckets without a gradient: one number of all.
    is_all = len(in_bucket) == len(names)
    have = "got" if is_over else plural(names, "has", "have")
    lacking = (
        f"{len(names)} of its parameters {have} no gradient"
        if is_all
        else f"{len(names)} parameters {have} no gradient, {len(in_bucket)} of them in this bucket"
    )
    return {
        "sentence": f"{subject} bucket {bucket}{when}{result}: {cause}{lacking} "
        f"({first_few(in_bucket)}), in {first_few(_modules_of(of_bucket))}{_frozen_text(frozen, ranks)}.",
        "alternative": "" if is_over else f"the backward of {rank_list(ranks)} may still have been running",
        "evidence": (
            f"The backward of {rank_list(ranks)}{at_line(backward)} "
            f"{'left' if is_over else plural(ranks, 'has', 'have')} "
            f"{len(names)} parameters without a gradient: {first_few(names)}.",
        ),
        "advice": _advice_on_unready(ranks, unready, is_everywhere, interrupted is not None, bool(frozen)),
    }


def _advice_on_unready(
    ranks: Sequence[int],
    unready: Sequence[UnreadyParameter],
    is_everywhere: bool,
    is_interrupted: bool,
    is_frozen: bool,
) -> tuple[str, ...]:
    if is_interrupted:
        return (
            "Log the exception where it is caught: it is the cause.",
            "Let it end the process, or have all ranks agree by all_reduce after each backward to skip the batch.",
        )
    if is_frozen:
        return ("Freeze parameters before DistributedDataParallel is given them, or wrap the model in it again.",)
    if is_everywhere:
        return ("Pass find_unused_parameters=True, or leave what forward does not use out of the model.",)
    return (
        "Use the same branches of the model on all ranks, or pass find_unused_parameters=True.",
        f"Look at what forward does with {first_few(_modules_of(unready))} on {rank_list(ranks)}.",
    )


def _modules_of(parameters: Sequence[UnreadyParameter]) -> list[str]:
    return sorted({parameter.module for parameter in parameters})


def _frozen_text(names: Sequence[str], ranks: Sequence[int]) -> str:
    if not names:
        return ""
    return f": {first_few(names)} {plural(names, 'is', 'are')} frozen on {rank_list(ranks)} (requires_grad is False)"


def backward_interrupted(rank: int, left: InterruptedBackward) -> str:
    """Say that an exception came out of a backward and was caught."""
    return (
        f"The backward of rank {rank} in step {left.step} raised an exception{at_line(left.call_site)} that was "
        "caught, and training continued."
    )


def reported_by(rank: int) -> str:
    """Say whose watchdog reported the fault."""
    return f"The watchdog of rank {rank} reported this while the job ran."


def uneven_finish(group: GroupOrder, behind: Sequence[int], last: int, ahead: int, first: Entry) -> VerdictText:
    """Describe ranks that finished without a collective that another one launched.

    Args:
        behind: ranks that lack it.
        last: number of their last collective.
        ahead: the rank that launched it.
        first: the first collective that they lack.
    """
    return {
        "sentence": f"{capitalize(rank_list(behind))} finished after collective {last} of {group_text(group)} "
        f"and never "
        f"entered the next one, which rank {ahead} launched{in_step(first)}: {_entry_text(first)}.",
        "evidence": ("Their logs don't say why: an exception that the script caught, or a loop that was left.",),
        "advice": ("Log exceptions where they are caught, and end the process with an exit status that says so.",),
    }


def slow(one: RankEvidence, idle_ns: int, waiting: Collection[int], *, is_busy: bool) -> VerdictText:
    """Describe a rank that others wait for, but not for long."""
    return {
        "sentence": f"Rank {one.rank} is slow{', and busy' if is_busy else ''}: it has made no progress for "
        f"{format_seconds(idle_ns)}{_where(one.position)}, and {rank_list(waiting)} {plural(waiting, 'waits', 'wait')} "
        "for it.",
        "alternative": "an endless loop looks the same until it has lasted for long" if is_busy else "",
    }


def slow_device(rank: int, idle_ns: int, wait: Wait) -> VerdictText:
    """Describe a rank whose device has not reached a collective for a while, but not for long."""
    entry = wait.entry
    return {
        "sentence": f"The device of rank {rank} is slow: for {format_seconds(idle_ns)} it has not reached collective "
        f"{entry.number} of {group_text(wait.group)}{in_step(entry)}, in which that of rank {wait.rank} waits: "
        f"{_entry_text(entry)}.",
        "alternative": "a kernel that never ends looks the same until it has lasted for long",
    }


def late(
    ranks: Sequence[int], position: RankPosition | None, wait: Wait, waited_ns: int, *, is_moving: bool
) -> VerdictText:
    """Describe ranks that make progress while another one has waited for them for long."""
    goes_on = f", and {plural(ranks, 'goes', 'go')} on" if is_moving else ""
    return {
        "sentence": f"{capitalize(rank_list(ranks))} {plural(ranks, 'is', 'are')} "
        f"late{goes_on}{_where(position)}: rank "
        f"{wait.rank} has waited for {format_seconds(waited_ns)} in {_entry_text(wait.entry)}.",
    }


def compared_text(collectives: int, groups: int, on: str = "all ranks") -> str:
    """Say how many collectives are the same on all ranks, or on some: part of a sentence."""
    return f"{collectives:,} collectives in {count_of(groups, 'group')} are the same on {on}"


def nothing_compared(*, has_messages: bool) -> str:
    """Say that there are no collectives to compare: part of a sentence."""
    return f"no collectives were launched{', only sends and receives' if has_messages else ''}"


def healthy(compared: str, notes: Sequence[str], *, is_over: bool) -> VerdictText:
    """Describe a job without a fault.

    Args:
        compared: what is the same on all ranks.
        notes: results of the comparison of replicas.
    """
    what = "All ranks finished" if is_over else "Healthy so far"
    return {"sentence": f"{what}: {compared}.", "evidence": tuple(notes)}


def not_recorded_to_end(ranks: Collection[int], compared: str) -> VerdictText:
    """Describe a job without a known fault, with ranks whose recording ended before."""
    return {
        "sentence": f"Nothing is wrong in what was recorded ({compared}), but {rank_list(ranks)} "
        f"{plural(ranks, 'was', 'were')} not recorded to the end."
    }


def command_failed(status: int, compared: str) -> VerdictText:
    """Describe a job without a known fault whose command failed."""
    how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
    return {
        "sentence": f"All ranks finished without a recorded error ({compared}), but the command {how}.",
        "advice": ("Look at the command's output: its ranks recorded no failure.",),
    }


def incomplete(gaps: Sequence[RecordingGap], compared: str) -> VerdictText:
    """Describe a recording without a known fault of which parts are missing."""
    agreed = f" What is there agrees: {compared}." if compared else ""
    return {
        "sentence": f"Can't tell whether anything is wrong: {gaps_text(gaps)}{agreed}",
        "advice": gap_advice(gaps),
    }


def gaps_text(gaps: Sequence[RecordingGap]) -> str:
    """Say what is missing or damaged: the end of a sentence."""
    parts = "; ".join(gap.what for gap in gaps[:_MAX_GAPS])
    rest = f"; and {len(gaps) - _MAX_GAPS} more" if len(gaps) > _MAX_GAPS else ""
    return f"the recording is incomplete: {parts}{rest}."


def gap_advice(gaps: Sequence[RecordingGap]) -> tuple[str, ...]:
    """Return advice on what is missing or damaged."""
    return tuple(dict.fromkeys(gap.advice for gap in gaps))


def nothing_left() -> VerdictText:
    """Describe a job of which nothing is known."""
    return {"sentence": "There is nothing to diagnose: no rank left a log."}


def undecided(
    waits: Sequence[Wait],
    *,
    possibly_waiting: Sequence[int],
    unrecorded: Sequence[int],
    failed: Sequence[int],
    gone: Sequence[int],
    unknown: Sequence[int],
    gaps: Sequence[RecordingGap],
) -> VerdictText:
    """Describe processes that did not finish, if nothing that they left says why.

    Args:
        possibly_waiting: ranks in a collective that an unrecorded rank may not have reached.
        failed: ranks that failed as if another one had died.
        unknown: ranks of which it is unknown whether they run.
    """
    parts = [f"rank {wait.rank} waits for {rank_list(wait.late)} in {group_text(wait.group)}" for wait in waits[:4]]
    if possibly_waiting:
        parts.append(
            f"{rank_list(possibly_waiting)} {plural(possibly_waiting, 'is', 'are')} in a collective, and whether "
            f"{rank_list(unrecorded)} {plural(unrecorded, 'has', 'have')} reached it is unknown"
        )
    if failed:
        parts.append(f"{rank_list(failed)} failed as if another rank had died")
    if gone:
        parts.append(f"{rank_list(gone)} {plural(gone, 'is', 'are')} gone")
    if unknown:
        what = plural(unknown, "it died or is running", "they died or are running")
        parts.append(f"{rank_list(unknown)} left logs that were never closed, so {what} elsewhere")
    parts.append("the order of their collectives is the same as far as it is known.")
    lacking = f" {capitalize(gaps_text(gaps))}" if gaps else ""
    return {"sentence": capitalize("; ".join(parts)) + lacking, "advice": gap_advice(gaps)}


def no_log(ranks: Collection[int]) -> str:
    """Say which ranks left nothing."""
    return f"{capitalize(rank_list(ranks))} left no log: what {plural(ranks, 'it', 'they')} did is unknown."


def recording_ended(one: RankEvidence) -> str:
    """Say when and why the recording of a rank ended before it did."""
    where = f" in step {one.position.step}" if one.position is not None else ""
    return (
        f"The recording of rank {one.rank} ended early{where} ({one.unrecorded_because}): what it did next is unknown."
    )
