"""Texts of verdicts on collectives that differ, or that some ranks never launched, and on what made them differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from overlapscope.diagnosis.evidence import CallSite, Entry, GroupOrder, RankEvidence
from overlapscope.diagnosis.rank_settings import SettingDifference
from overlapscope.diagnosis.text import at_line, collective_text, group_text, in_step, join_and, plural
from overlapscope.diagnosis.verdict import FaultKind, Verdict, VerdictText
from overlapscope.diagnosis.wait_graph import Wait
from overlapscope.text import capitalize, count_of, format_ranks, rank_list

NO_MAJORITY: Final = "No side has a majority, so no rank is blamed."
_FIND_CONDITION: Final = "Look for a collective inside an `if` that depends on the rank or on the data."
_DIVERGENCE_ADVICE: Final[dict[FaultKind, str]] = {
    "different collectives": "Make all ranks take the same branch, with tensors of the same size and dtype.",
    "missing collective": _FIND_CONDITION,
    "swapped collectives": "Launch collectives in the same order on all ranks, not in that of a set or of completion.",
    "step behind": "Enter no_sync() and skip steps (NaN checks) on all ranks or on none; let the ranks agree first.",
    "batch skipped": "Skip or repeat a batch on all ranks or none; DistributedSampler and join() keep them together.",
}
_MAX_SETTING_LINES: Final = 4
_MAX_LISTS: Final = 4
_MAX_LISTED: Final = 8


@dataclass(frozen=True)
class Side:
    """Ranks that launched the same, and their entry at the first difference."""

    ranks: Sequence[int]
    entry: Entry

    @property
    def name(self) -> str:
        """Return the ranks as text."""
        return rank_list(self.ranks)


@dataclass(frozen=True)
class Divergence:
    """Two sides that differ: the entries with the same number in a group."""

    group: GroupOrder
    number: int
    side: Side
    other: Side

    @property
    def where(self) -> str:
        """Return the position of the entries as text."""
        return f"as collective {self.number} of {group_text(self.group)}"

    @property
    def by_step(self) -> tuple[Side, Side]:
        """Return the side that is in a later step, and the one behind."""
        is_other_ahead = self.other.entry.step > self.side.entry.step
        return (self.other, self.side) if is_other_ahead else (self.side, self.other)

    @property
    def launches(self) -> str:
        """Return what both sides launched as text, without a full stop."""
        a, b = self.side.entry, self.other.entry
        step = in_step(a) if a.loop_step != b.loop_step else ""
        return (
            f"{in_step(b)} {self.other.name} launched {collective_text(b)}{at_line(b.call_site)} {self.where}, where "
            f"{self.side.name} launched {collective_text(a)}{at_line(a.call_site)}{step}"
        ).lstrip()


def _diverged(kind: FaultKind, sentence: str) -> VerdictText:
    return {"sentence": sentence, "advice": (_DIVERGENCE_ADVICE[kind],)}


def skipped(found: Divergence) -> VerdictText:
    """Describe a collective that a side skipped, so that its later calls are matched with earlier ones."""
    ahead, behind = found.by_step
    skipped_entry, line = found.side.entry, found.other.entry.call_site
    return _diverged(
        "missing collective",
        f"{capitalize(in_step(behind.entry).lstrip())} {ahead.name} skipped {collective_text(skipped_entry)}"
        f"{at_line(line)}: {found.where}, {plural(ahead.ranks, 'its', 'their')} call of step "
        f"{ahead.entry.loop_step} is "
        f"matched with that of step {behind.entry.loop_step} of {behind.name}, and so on.",
    )


def reduced_again(found: Divergence) -> VerdictText:
    """Describe a side that reduced twice in a step, so that it is a step behind."""
    ahead, behind = found.by_step
    step = behind.entry.step
    return _diverged(
        "step behind",
        f"{_from_step(found, step)}, gradients of different steps are averaged: {behind.name} "
        f"{plural(behind.ranks, 'has', 'have')} reduced again in step {step}, without an update of the optimizer in "
        f"between, and {ahead.name} {plural(ahead.ranks, 'is', 'are')} in step {ahead.entry.step} by then "
        f"({found.where}, {collective_text(found.side.entry, with_names=False)}).",
    )


def in_different_steps(found: Divergence) -> VerdictText:
    """Describe sides in different steps, if what the one ahead launched in the earlier step is unknown."""
    ahead, behind = found.by_step
    return _diverged(
        "step behind",
        f"{_from_step(found, behind.entry.step)}, gradients of different steps are averaged: {ahead.name} "
        f"{plural(ahead.ranks, 'is', 'are')} in step {ahead.entry.step} where {behind.name} "
        f"{plural(behind.ranks, 'is', 'are')} in step {behind.entry.step} "
        f"({found.where}, {collective_text(found.side.entry, with_names=False)}).",
    )


def skipped_step(found: Divergence) -> VerdictText:
    """Describe a side that reduced nothing in a step, so that it is a step ahead."""
    ahead, behind = found.by_step
    step = behind.entry.step
    return _diverged(
        "step behind",
        f"{_from_step(found, step)}, gradients of different steps are averaged: {ahead.name} launched no bucket in "
        f"step {step}, so "
        f"{plural(ahead.ranks, 'its', 'their')} step {ahead.entry.step} is averaged with step {step} of "
        f"{behind.name} ({found.where}, {collective_text(found.side.entry, with_names=False)}).",
    )


def at_different_batches(found: Divergence) -> VerdictText:
    """Describe sides that are at different batches of their data."""
    a, b = found.side.entry, found.other.entry
    return _diverged(
        "batch skipped",
        f"{_from_step(found, min(a.step, b.step))}, the ranks average gradients of different batches: "
        f"{found.other.name} "
        f"{plural(found.other.ranks, 'is', 'are')} at batch {b.batch} where {found.side.name} "
        f"{plural(found.side.ranks, 'is', 'are')} at batch {a.batch}, and until then they advanced together "
        f"({found.where}, {collective_text(a, with_names=False)}).",
    )


def launched_no_bucket(found: Divergence, ranks: Sequence[int], step: int) -> VerdictText:
    """Describe ranks that reduced nothing in a step, so that something else meets a bucket of the others."""
    sentence = f"{capitalize(rank_list(ranks))} launched no bucket in step {step}: {found.launches}."
    return _diverged("step behind", sentence)


def swapped(found: Divergence) -> VerdictText:
    """Describe two collectives in different orders."""
    sentence = f"{capitalize(found.launches)}, and the reverse nearby: the results are mixed up."
    return _diverged("swapped collectives", sentence)


def missing(found: Divergence, extra: Side, lacking: Side, count: int) -> VerdictText:
    """Describe collectives that one side lacks, or that the other has in addition."""
    number = "one collective" if count == 1 else f"{count} collectives"
    return _diverged(
        "missing collective",
        f"{capitalize(found.launches)}: from there on {lacking.name} {plural(lacking.ranks, 'is', 'are')} {number} "
        f"short, or {extra.name} {plural(extra.ranks, 'has', 'have')} {number} too many.",
    )


def different(found: Divergence) -> VerdictText:
    """Describe collectives of different operations, sizes or dtypes."""
    return _diverged("different collectives", f"{capitalize(found.launches)}.")


def _from_step(found: Divergence, step: int) -> str:
    """Return since when ranks differ: at the latest since ``step``, if what came before is not known."""
    return f"From step {step} or an earlier one on" if found.group.predates_log else f"From step {step} on"


FIRST_IS_LOST: Final = "what differed first is not known, and may be a collective that a rank left out or added before"


ALL_WERE_TO_LEAVE_IT_OUT: Final = "all ranks were to leave it out, and the others did not"


def most_are_out_of_turn(side: Side, usual: int) -> str:
    """Say why the majority proves nothing."""
    return (
        f"{capitalize(side.name)} launched it every {usual} steps before, and a step too soon now, while the others go "
        "on as before: most ranks may have left out an update since, so no rank is blamed."
    )


def most_have_more_batches(side: Side, since: int, usual: int) -> str:
    """Say why the majority proves nothing."""
    return (
        f"{capitalize(side.name)} had {since} batches since the latest update, where {usual} are usual, while the "
        "others go on as before: most ranks may have left out an update, so no rank is blamed."
    )


def exception_is_unrelated(ranks: Sequence[int]) -> str:
    """Say why what a rank has caught may not be the cause."""
    return f"what {rank_list(ranks)} caught just there may be unrelated"


def was_usual(lacking: Side) -> str:
    """Say why most ranks are wrong."""
    return (
        f"In the steps before {lacking.name} did what {plural(lacking.ranks, 'it', 'they')} left out: the others go on "
        "as before."
    )


def oldest_left() -> str:
    """Say that the log before the first known difference is lost."""
    return "The first difference is older than what is left of the logs; this is the oldest entry left."


def apart_before() -> str:
    """Say why the first known difference may be a consequence of an older one."""
    return "The ranks are in different steps already in the oldest entries that were compared: the fault may be older."


def not_compared(number: int, ranks: Sequence[int]) -> str:
    """Say which ranks have no entry at the first difference."""
    return f"There is no collective {number} of {rank_list(ranks)} to compare with."


def under_no_sync(ranks: Sequence[int]) -> str:
    """Say which ranks have not reduced since the first difference."""
    has = plural(ranks, "has", "have")
    return f"{capitalize(rank_list(ranks))} {has} run every backward since then under no_sync()."


def lines_differ(number: int, sites: Mapping[int, CallSite | None]) -> str:
    """Say which earlier collective two ranks already launched at different lines."""
    lines = ",".join(f"{at_line(site)} on rank {rank}" for rank, site in sites.items())
    return f"Already collective {number} was launched at different lines:{lines}."


def began_forward(ranks: Sequence[int]) -> str:
    """Say which ranks began another forward while others reduce."""
    return (
        f"A broadcast of DDP's buffers begins a forward: {rank_list(ranks)} {plural(ranks, 'has', 'have')} "
        f"begun another "
        "one instead of reducing, as after a batch that was skipped, after a backward under no_sync(), or to evaluate."
    )


def batches_reached(sides: Iterable[Side]) -> str:
    """Say how far sides are in their data."""
    where = [f"{side.name} to batch {side.entry.batch}" for side in sides]
    return f"By then they had reached different batches: {join_and(where)}."


def at_another_batch(ranks: Sequence[int]) -> str:
    """Say which ranks are at another batch since they updated without reducing."""
    return f"{capitalize(rank_list(ranks))} {plural(ranks, 'is', 'are')} at another batch since then."


def others_launch_bucket(ranks: Sequence[int], entry: Entry) -> str:
    """Say which ranks launched a bucket that others, which no longer reduce, did not."""
    return (
        f"{capitalize(rank_list(ranks))} launched {collective_text(entry, with_names=False)} in step {entry.loop_step}."
    )


def settings_differ(
    model: int,
    settings: Sequence[SettingDifference],
    sites: Mapping[int, CallSite],
    divergence: Verdict,
    *,
    is_harmless: bool,
) -> VerdictText:
    """Describe settings of DDP that make ranks launch different collectives.

    Args:
        sites: where each rank gave the settings.
        divergence: the verdict on the collectives.
        is_harmless: True if only hooks differ, and the collectives match.
    """
    result = "" if is_harmless else f" So they launched different collectives in step {divergence.step or 0}."
    return {
        "sentence": f"The ranks gave different settings to DistributedDataParallel (model {model}): "
        f"{'; '.join(map(str, settings))}{_setting_lines(sites)}.{result}",
        "alternative": "the hooks may compute the same" if is_harmless else "",
        "evidence": (divergence.sentence, *divergence.evidence),
        "advice": (f"Give {join_and([one.name for one in settings])} the same value on all ranks.",),
    }


def unrelated_setting(one: SettingDifference) -> str:
    """Say which setting differs without being known to matter."""
    model = f" (DDP instance {one.model})" if one.model is not None else ""
    return f"Not known to be the cause: {one}{model}."


def _setting_lines(sites: Mapping[int, CallSite]) -> str:
    """Format lines: `` at train.py:20 (main)``, or that of each rank if there are several."""
    ranks_at: dict[CallSite, list[int]] = {}
    for rank, site in sites.items():
        ranks_at.setdefault(site, []).append(rank)
    if len(ranks_at) < 2:
        return "".join(at_line(site) for site in ranks_at)
    lines = [f"by {rank_list(ranks)}{at_line(site)}" for site, ranks in list(ranks_at.items())[:_MAX_SETTING_LINES]]
    return f", given {', '.join(lines)}"


def models_differ(
    model: int, difference: str, contents: Sequence[tuple[Sequence[int], str, int, int]], *, is_order: bool
) -> VerdictText:
    """Describe models whose parameters differ between ranks.

    Args:
        difference: the first difference.
        contents: ranks, class of the model, number of parameters and of frozen parameters of each side.
        is_order: True if the parameters are the same in a different order.
    """
    evidence = [
        f"{capitalize(rank_list(ranks))}: {class_name}, {count_of(count, 'parameter')}"
        + (f", {frozen} frozen" if frozen else "")
        for ranks, class_name, count, frozen in contents
    ]
    if is_order:
        evidence.append("The ranks hold the same parameters in a different order.")
        advice = "Register parameters and modules in an order that does not depend on the process: no set(), no hash()."
    else:
        advice = "Build the model from the same configuration on all ranks, and freeze the same parameters on all."
    return {
        "sentence": f"The ranks gave different models to DistributedDataParallel (model {model}): {difference}.",
        "evidence": tuple(evidence),
        "advice": (advice,),
    }


def extra_parameter(index: int, parameter: str, having: Sequence[int], lacking: Sequence[int]) -> str:
    """Say which ranks have a parameter more."""
    return (
        f"{rank_list(having)} {plural(having, 'has', 'have')} parameter {index}, {parameter}, and {rank_list(lacking)} "
        f"{plural(lacking, 'has', 'have')} only {count_of(index, 'parameter')}"
    )


def parameters_differ(index: int, parameter: str, ranks: Sequence[int], other: str, others: Sequence[int]) -> str:
    """Say which parameter two sides have at one index."""
    return f"parameter {index} is {parameter} on {rank_list(ranks)} and {other} on {rank_list(others)}"


def frozen_differ(state: str, ranks: Sequence[int], other: str, others: Sequence[int]) -> str:
    """Say what is frozen on two sides."""
    return f"{state} on {rank_list(ranks)} and {other} on {rank_list(others)}"


def parameter_text(name: str, shape: Sequence[int], dtype: str) -> str:
    """Format a parameter: ``'head.weight' (10×512 float32)``."""
    return f"'{name}' ({'×'.join(map(str, shape)) or 'scalar'} {dtype})"


def threads_launch(
    group: GroupOrder,
    threads: Mapping[int, tuple[Entry, Entry]],
    *,
    at_difference: Mapping[int, Entry] | None = None,
    aborted: Sequence[int] = (),
) -> VerdictText:
    """Describe two threads that launch in one group.

    Args:
        threads: latest entry of the main thread and of another one, by rank.
        at_difference: the first entries that differ, by rank, as far as known.
        aborted: otherwise, ranks that their backend has ended.
    """
    ranks = list(threads)
    of_main, of_other = threads[ranks[0]]
    what = (
        f"Two threads of {rank_list(ranks)} launch collectives in {group_text(group)}: the main thread "
        f"{collective_text(of_main, with_names=False)}{at_line(of_main.call_site)}, and another one "
        f"{collective_text(of_other, with_names=False)}{at_line(of_other.call_site)}. "
    )
    if at_difference is not None:
        result = f"Their order differs between ranks, from collective {next(iter(at_difference.values())).number} on."
    else:
        result = f"{capitalize(rank_list(aborted))} {plural(aborted, 'was', 'were')} aborted by the backend there."
    return {
        "sentence": what + result,
        "alternative": "" if at_difference else f"{rank_list(aborted)} may have been aborted for another reason",
        "evidence": (
            "Ranks match the collectives of a group by their order alone, and that of two threads is left to chance.",
        ),
        "advice": ("Give each thread a process group of its own: dist.new_group() on all ranks, before it starts.",),
    }


def unlike_lists(
    name: str, lists: Mapping[tuple[int, ...], Sequence[int]], sites: Mapping[int, CallSite], lacking: Sequence[int]
) -> VerdictText:
    """Describe a process group that ranks made with different lists of ranks.

    Args:
        name: what torch calls it.
        lists: ranks that gave each list.
        sites: line of each rank's call.
        lacking: ranks that continue as the others do one call later; empty if it is not that.
    """
    parts = [
        f"{rank_list(ranks)} with {_list_text(members)}{at_line(sites.get(ranks[0]))}"
        for members, ranks in list(lists.items())[:_MAX_LISTS]
    ]
    if len(lists) > _MAX_LISTS:
        parts.append(f"{count_of(len(lists) - _MAX_LISTS, 'more list')} elsewhere")
    ending = ""
    if lacking:
        ending = f": from there on {rank_list(lacking)} {plural(lacking, 'is', 'are')} one call short"
    return {
        "sentence": f"The ranks made process group '{name}' with different lists of ranks: {join_and(parts)}{ending}.",
        "evidence": (
            "torch names groups by counting the calls of new_group on each rank, and ranks meet by that name: they "
            "connect to each other as if their lists were one.",
        ),
        "advice": (
            "Call new_group with the same lists in the same order on all ranks, also on those that are not in the "
            "group; to call it on its members alone, give use_local_synchronization=True.",
        ),
    }


def _list_text(members: Sequence[int]) -> str:
    return f"[{', '.join(map(str, members))}]" if len(members) <= _MAX_LISTED else f"[{format_ranks(members)}]"


def new_group_not_called(
    one: RankEvidence, wait: Wait, late: Sequence[int], calls: Mapping[int, int], *, is_inside: bool
) -> VerdictText:
    """Describe ``new_group`` called by only some ranks.

    Args:
        one: a rank that waits in it.
        wait: what the first of the late ranks waits in.
        late: members that have not called it, and wait for the rank.
        calls: how often each rank has called it.
        is_inside: True if all late ranks are in a call of torch.distributed.
    """
    rank = one.rank
    called = [other for other in calls if calls[other] >= calls[rank]]
    without = [other for other in calls if calls[other] < calls[rank]]
    line = at_line(one.position.call_site) if one.position else ""
    counts = join_and([f"{calls[each]} on rank {each}" for each in (rank, late[0])])
    return {
        "sentence": f"Rank {rank} waits in new_group({list(one.creating_group)}){line} for {rank_list(late)}, which "
        f"{plural(late, 'has', 'have')} not called it and {plural(late, 'waits', 'wait')} for rank {rank} in "
        f"{collective_text(wait.entry)}{at_line(wait.entry.call_site)}{in_step(wait.entry)}.",
        "alternative": "" if is_inside else f"{rank_list(late)} may still call it",
        "evidence": (
            f"{capitalize(rank_list(called))} {plural(called, 'has', 'have')} called it, and {rank_list(without)} "
            f"{plural(without, 'has', 'have')} not: groups are counted on each rank ({counts}).",
        ),
        "advice": ("Call new_group on all ranks of the job, also on those that are not in the group, in one order.",),
    }


def groups_interleaved(waits: Sequence[Wait], first: Wait) -> VerdictText:
    """Describe ranks that wait for each other in different groups; ``first`` is the earliest of the waits."""
    parts = [
        f"rank {wait.rank} waits for {rank_list(wait.late)} in {group_text(wait.group)}, in "
        f"{collective_text(wait.entry)}{at_line(wait.entry.call_site)}"
        for wait in waits
    ]
    return {
        "sentence": f"The ranks entered process groups in different orders and wait for each other: {join_and(parts)}.",
        "alternative": f"{rank_list(first.late)} may have left out the collective that rank {first.rank} waits in",
        "evidence": ("Within each group the order is the same on all ranks, as far as they got.",),
        "advice": ("Launch the collectives of different groups in the same order on all ranks.",),
    }


def message_cycle(waits: Sequence[Wait], elsewhere: Sequence[int], *, tags: tuple[int, int] | None) -> VerdictText:
    """Describe ranks that each wait for a send or a recv of the next one.

    Args:
        elsewhere: ranks that may not wait there.
        tags: tags of a send and a recv that don't match because of them.
    """
    parts = [
        f"rank {wait.rank} waits{in_step(wait.entry)} in {collective_text(wait.entry)}{at_line(wait.entry.call_site)}"
        for wait in waits
    ]
    ops = {wait.entry.signature.op for wait in waits}
    lacking = f"none of them {'receives' if ops == {'send'} else 'sends'}"
    if len(ops) > 1:
        lacking = "none of them has launched the other side of these"
    advice = "Let one rank of each pair send first and the other receive first, or use batch_isend_irecv()."
    if tags is not None:
        lacking = f"these don't match, as their tags are {tags[0]} and {tags[1]}"
        advice = "Give a send and the recv of its peer the same tag."
    return {
        "sentence": f"{capitalize(rank_list([wait.rank for wait in waits]))} wait for each other's messages: "
        f"{join_and(parts)}; {lacking}.",
        "alternative": f"{rank_list(elsewhere)} may have gone on after launching it, and be elsewhere"
        if elsewhere
        else "",
        "advice": (advice,),
    }


def oversized_message(rank: int, received: Entry, peer: int, sent: Entry) -> VerdictText:
    """Describe a recv whose peer sends more than fits."""
    return {
        "sentence": f"{capitalize(in_step(received).lstrip())} rank {rank} launched {collective_text(received)}"
        f"{at_line(received.call_site)}, for which rank {peer} launched {collective_text(sent)}"
        f"{at_line(sent.call_site)}: it sends more than the recv takes.",
        "advice": ("Give both sides of a message tensors of the same size and dtype.",),
    }


def unanswered(wait: Wait, peer_wait: Wait | None) -> VerdictText:
    """Describe a send or a recv whose peer waits in something else; a recv from any rank has several."""
    does = "sent" if wait.entry.signature.op == "recv" else "received"
    elsewhere = ""
    if peer_wait is not None:
        entry, who = peer_wait.entry, "it" if len(wait.late) == 1 else f"rank {peer_wait.rank}"
        elsewhere = (
            f": {who} waits for {rank_list(peer_wait.late)} in {collective_text(entry)}{at_line(entry.call_site)}"
        )
    return {
        "sentence": f"Rank {wait.rank} waits in {collective_text(wait.entry)}{at_line(wait.entry.call_site)}"
        f"{in_step(wait.entry)}, and {rank_list(wait.late)} {plural(wait.late, 'has', 'have')} not {does}{elsewhere}.",
        "advice": ("Give every recv a send on the other side, before either of the two enters a collective.",),
    }


def group_recreated(wait: Wait, made: Sequence[int], others: Sequence[int], still: Sequence[int]) -> VerdictText:
    """Describe ranks that recreated the default group while others did not.

    Args:
        wait: what one of the ranks waits in.
        made: ranks that recreated the group.
        still: ranks of the others that may still do so.
    """
    return {
        "sentence": f"{capitalize(rank_list(made))} {plural(made, 'has', 'have')} called destroy_process_group() and "
        f"init_process_group() again, which {rank_list(others)} {plural(others, 'has', 'have')} not, and "
        f"{plural(made, 'waits', 'wait')}{in_step(wait.entry)} for {plural(others, 'it', 'them')} in "
        f"{collective_text(wait.entry)}{at_line(wait.entry.call_site)}.",
        "alternative": f"{rank_list(still)} may still do the same" if still else "",
        "advice": (
            "Recover from an exception on all ranks or on none: end the process, and let torchrun restart all.",
        ),
    }


def left_out(wait: Wait, missed: Entry, ranks: Sequence[int], *, has_failed: bool) -> VerdictText:
    """Describe ranks that are in a later step although others still wait for them in an earlier one.

    Args:
        missed: the collective that they never entered.
        has_failed: True if it failed because of that.
    """
    fate = (
        f" and waits there for {rank_list(ranks)}, which {plural(ranks, 'has', 'have')} continued to the next step "
        "without it"
    )
    if has_failed:
        fate = f", which failed because {rank_list(ranks)} never joined it and went on to the next step"
    return {
        "sentence": f"{capitalize(in_step(missed).lstrip())} rank {wait.rank} launched {collective_text(missed)}"
        f"{at_line(missed.call_site)} in {group_text(wait.group)}{fate}.",
        "alternative": f"the {missed.signature.op} of rank {wait.rank} may be one too many"
        if wait.is_point_to_point
        else "",
        "advice": (_FIND_CONDITION,),
    }
