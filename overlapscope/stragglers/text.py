"""Sentences that describe straggler findings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from overlapscope.breakdown.text import BLOCK_LABELS
from overlapscope.machine.evidence import select_telling
from overlapscope.machine.text import tell
from overlapscope.stragglers.cycles import BLAMABLE_GROUPS, CAUSE_GROUPS, CAUSES, Cycles
from overlapscope.stragglers.delays import MIN_COST_SHARE, get_overall_level
from overlapscope.stragglers.finding import Finding, SlowLink
from overlapscope.stragglers.location_test import format_p_value
from overlapscope.stragglers.patterns import count_runs
from overlapscope.stragglers.stragglers import Stragglers, Suspect
from overlapscope.text import (
    capitalize,
    count_of,
    format_bytes,
    format_interval_ns,
    format_ns,
    format_share,
    format_step_ns,
    rank_list,
)
from overlapscope.trace.folders import read_import_source
from overlapscope.trace.recording import Trace

CAUSE_LABELS: Final = {
    "compute": "Compute",
    "data_wait": "Data wait",
    "host_loop": "Training loop",
    "evaluation": "Evaluation",
    "gc": "Garbage collection",
    "release_skew": "Late release",
    "transfer": "Transfer",
    "link": "Link",
}
"""Labels of causes of findings, for tables."""

PART_LABELS: Final = {
    cause: "late release by the previous step" if cause == "release_skew" else BLOCK_LABELS[cause] for cause in CAUSES
}
"""Labels of causes of local time, for sentences."""

_DOES_LONGER: Final = {
    "compute": "computes {} longer than {}",
    "data_wait": "waits {} longer for data than {}",
    "host_loop": "spends {} longer in the training loop than {}",
    "evaluation": "evaluates {} longer than {}",
    "gc": "collects garbage for {}",
    "release_skew": "is released {} late by the previous step's communication",
    "transfer": "take {} longer after all ranks have arrived",
}
_ARRIVES_LATE_AS_IT: Final = {
    "compute": "computes longer",
    "data_wait": "waits longer for data",
    "host_loop": "spends longer in the training loop",
    "evaluation": "evaluates longer",
    "gc": "collects garbage",
    "release_skew": "is released late by the previous step's communication",
}
_MUCH_SHARE: Final = 0.05
"""Share of the step from which a saving is worth a word though chance explains it."""
_LIKELY_CHANCE: Final = 0.3
"""Probability of such a delay by chance from which nothing speaks for another cause."""
_MIN_PART_SHARE: Final = 0.1
"""Minimum share of a delay for a phase to be mentioned."""


def describe(finding: Finding) -> str:
    """Describe a finding: who, what, when, where in the step, and what fixing it would save."""
    return f"{describe_delay(finding)}. {_describe_fix(finding)}"


def describe_delay(finding: Finding) -> str:
    """Describe a finding without its saving, in a sentence without its full stop."""
    who, when = capitalize(name_culprit(finding)), describe_when(finding)
    if finding.link is not None:
        what = f"{_describe_rate(finding.link)}, so all-reduces take {format_ns(finding.delay_ns)} longer {when}"
    elif finding.lateness_ns is not None:
        later = f"{format_ns(finding.lateness_ns)} later than {finding.compared_with}"
        what = f"arrives {later} {when}, as it {_describe_reasons(finding)}"
    else:
        does = _DOES_LONGER[finding.cause].format(format_ns(finding.delay_ns), finding.compared_with)
        what = f"{does} {when}{_describe_parts(finding.parts_ns, finding.delay_ns)}"
    return f"{who} {what}"


def name_culprit(finding: Finding) -> str:
    """Name what a finding blames.

    That is ``rank 3``, ``host node1 (ranks 8-15)``, ``the link from rank 2 to rank 3``, or else ``all-reduces``.
    """
    if finding.link is not None:
        return f"the link from rank {finding.link.rank} to rank {finding.link.peer_rank}"
    if not finding.ranks:
        return "all-reduces"
    if finding.host is not None:
        return f"host {finding.host} ({rank_list(finding.ranks)})"
    return rank_list(finding.ranks)


def describe_when(finding: Finding) -> str:
    """Describe the steps in which a finding occurs."""
    pattern, steps = finding.pattern, finding.steps
    if pattern.kind == "persistent":
        return "in every step"
    if pattern.kind == "periodic":
        return f"every {pattern.period} steps"
    if pattern.kind == "shift":
        return f"from step {steps[0]} on" if not pattern.where[0] else f"until step {steps[-1]}"
    if pattern.kind == "episode":
        episodes = count_runs(pattern.where)
        between = f"{steps[0]} to {steps[-1]}"
        return f"in steps {between}" if episodes == 1 else f"in {len(steps)} of steps {between}, in {episodes} episodes"
    return f"in step {steps[0]}" if len(steps) == 1 else f"in {len(steps)} steps, peak in step {finding.worst_step}"


def describe_saving(finding: Finding, *, has_interval: bool = True) -> str:
    """Describe what is saved in each of the delayed steps, and which share of all time compared that is."""
    saving = finding.saving_in_delayed_steps
    interval = "" if math.isnan(saving.low) or not has_interval else f" (90 %: {format_interval_ns(saving)})"
    share, delayed = format_share(finding.saving_share), len(finding.steps)
    if finding.pattern.kind == "persistent":
        return f"{format_ns(saving.value)}{interval}, {share} of each step"
    where = "once" if delayed == 1 else f"in each of {delayed:,} steps"
    return (
        f"{format_ns(saving.value)} {where}{interval}, {share} of the time of all {len(finding.pattern.where):,} steps"
    )


def _describe_fix(finding: Finding, *, has_interval: bool = True) -> str:
    saving = describe_saving(finding, has_interval=has_interval)
    are_others_late = bool(finding.ranks) and finding.link is None and finding.saving.step.value < finding.added_ns / 2
    if not are_others_late:
        return f"Fixing this would save {saving}."
    little = "nothing" if finding.saving.step.value < 1 else f"only {saving}"
    return f"Fixing this alone would save {little}, as some other rank is late as well."


def describe_machine(finding: Finding) -> list[str]:
    """Describe what the machine said of the late ranks: what sets them apart; else one thing that all had alike."""
    when = "of the steps" if finding.pattern.kind == "persistent" else "of these steps"
    telling = select_telling(finding.machine) or finding.machine[:1]
    return [tell(one, when) for one in telling]


def describe_verdict(stragglers: Stragglers) -> str:
    """Return the headline of the whole analysis."""
    waiting_ns, step_ns = stragglers.waiting.value, stragglers.step_time_ns
    found = [describe(finding) for finding in stragglers.findings[:1]]
    if stragglers.suspect is not None:
        found.append(_describe_suspect(stragglers.suspect, step_ns))
    if found:
        return " ".join(found)
    if math.isnan(waiting_ns):
        return "No straggler found."
    step = f"{format_step_ns(step_ns)} ({format_share(waiting_ns / step_ns)})"
    waiting = f"{format_ns(waiting_ns)} of {step} is spent waiting for the rank that arrives last."
    saves_ns = stragglers.saved_if_ranks_equal.step.value
    if waiting_ns < 1 and saves_ns >= MIN_COST_SHARE * step_ns:
        saves = f"{format_ns(saves_ns)} of {format_step_ns(step_ns)} ({format_share(saves_ns / step_ns)})"
        equal = capitalize(describe_equal_ranks(stragglers.cycles))
        waiting = f"{equal} would save {saves}, as all-reduces would begin earlier."
    elif waiting_ns < 1:
        waiting = "No rank waits for another one."
    # A delay in that many consecutive steps is as unlikely by chance as the significance level asks for, in two tests.
    least = math.ceil(-math.log2(get_overall_level(len(stragglers.cycles.ranks)) / 2))
    few = len(stragglers.cycles.steps) < least
    more = f" It takes {least} steps to name a rank that is late in each." if few else _describe_chance(stragglers)
    return f"No straggler found. {waiting}{more}"


def _describe_chance(stragglers: Stragglers) -> str:
    """Describe the rank that the table below shows to cost much, though chance explains it; empty if none does."""
    rank = stragglers.costliest
    if rank is None or rank.saving_ns < _MUCH_SHARE * stragglers.step_time_ns:
        return ""
    often = f"in {rank.late_steps} of {rank.steps} steps, by {format_ns(rank.lateness_ns)} on average"
    chance = "which may be chance" if rank.p_value < _LIKELY_CHANCE else "as chance alone would have it"
    return f" Rank {rank.rank} is later {often}, {chance} ({format_p_value(rank.p_value)})."


def describe_headline(stragglers: Stragglers) -> str:
    """Describe the straggler as briefly as a headline has room for, with its saving; empty if there is none."""
    finding = next((one for one in stragglers.findings if one.is_actionable), None)
    if finding is not None:
        return describe_briefly(finding)
    suspect = stragglers.suspect
    if suspect is None:
        return ""
    how = "probably a straggler" if suspect.needed_steps is not None else "a straggler, for no single cause"
    return f"Rank {suspect.rank} is {how}. {_describe_suspected_saving(suspect, stragglers.step_time_ns)}"


def describe_briefly(finding: Finding) -> str:
    """Describe a finding without how late anything is: who, why, when, and what fixing it would save."""
    does = "is slow" if finding.link is not None else "take longer"
    if finding.ranks and finding.link is None:
        does = f"is a straggler: it {_describe_reasons(finding)}"
    fix = _describe_fix(finding, has_interval=False)
    return f"{capitalize(name_culprit(finding))} {does} {describe_when(finding)}. {fix}"


def _describe_suspect(suspect: Suspect, step_ns: float) -> str:
    often = f"later in {suspect.late_steps} of {suspect.steps} steps, by {format_ns(suspect.lateness_ns)} on average"
    saves = _describe_suspected_saving(suspect, step_ns)
    if suspect.needed_steps is None:
        return f"Rank {suspect.rank} is {often}, and no single cause accounts for it. {saves}"
    return (
        f"Rank {suspect.rank} is probably a straggler: it is {often}. {saves} {suspect.steps} steps are too few to "
        f"exclude chance ({format_p_value(suspect.p_value)}): record {suspect.needed_steps} or more."
    )


def _describe_suspected_saving(suspect: Suspect, step_ns: float) -> str:
    saving = f"{format_ns(suspect.saving_ns)} a step ({format_share(suspect.saving_ns / step_ns)})"
    return f"If it were like the others, that would save {saving}."


def describe_equal_ranks(cycles: Cycles) -> str:
    """Name the case that all ranks are equal; two ranks have no median."""
    return "both ranks as fast as the faster" if len(cycles.ranks) == 2 else "all ranks at the median"


def describe_equalized_rank(rank: int, cycles: Cycles) -> str:
    """Name the case that one rank is like the others in everything; it may be faster than they in some of it."""
    (*others,) = (other for other in cycles.ranks.tolist() if other != rank)
    return f"rank {rank} {f'as fast as rank {others[0]}' if len(others) == 1 else 'at the median'}"


@dataclass(frozen=True, kw_only=True)
class MissingStragglersReason:
    """Reason why a recording can't show which rank is late."""

    headline: str
    message: str
    advice: str


def explain_missing_stragglers(trace: Trace) -> MissingStragglersReason:
    """Explain why ``Analysis.stragglers`` has nothing to compare, and what to do about it."""
    ranks, steps = len(trace.ranks), trace.steps["step"].nunique()
    is_import = read_import_source(trace.run) is not None
    if is_import and (ranks < 2 or not steps):
        return _explain_import(ranks)
    if ranks < 2:
        return MissingStragglersReason(
            headline="Only one rank was recorded",
            message="A straggler is a rank that the others wait for, and this recording has only one rank.",
            advice="If the run had more, copy the rank folders of its other hosts next to this one.",
        )
    if len(trace.aligned_ranks) < 2:
        return MissingStragglersReason(
            headline="The clocks of these ranks can't be compared",
            message=f"No two of the {ranks:,} ranks have a common clock, so it is unknown which arrived last.",
            advice="Ranks on one host share a clock, and ranks on several hosts compare theirs while they train: "
            "record the run again with all of its ranks, rank 0 among them.",
        )
    if trace.has_only_collectives:
        return MissingStragglersReason(
            headline="No steps were recorded",
            message="A straggler is found by the reductions of gradients. No training with DistributedDataParallel or "
            "fully_shard was seen, and no update with gradients that the job's own collectives had reduced.",
            advice="'overlapscope diagnose' compares the order of its collectives.",
        )
    if (trace.collectives["op"] == "reduce").any():
        return MissingStragglersReason(
            headline="Gradients are reduced to one rank each",
            message="Of a reduce only the rank that receives the sum waits for all others, so it is unknown how long "
            "each rank is waited for.",
            advice="'overlapscope summary' says how long each rank waits.",
        )
    are_all = trace.extent == "all"
    return MissingStragglersReason(
        headline="There are too few steps to compare",
        message="This needs two steps in a row with the same collectives on all ranks, after the warm-up. "
        f"{'This recording has' if are_all else 'What was read has'} {count_of(steps, 'finished step')}.",
        advice=_advise_more_steps(is_import=is_import) if are_all else "Choose more steps.",
    )


def _advise_more_steps(*, is_import: bool) -> str:
    return "Profile more steps." if is_import else "Record more steps, or wait until the run has got further."


def _explain_import(ranks: int) -> MissingStragglersReason:
    if ranks < 2:
        return MissingStragglersReason(
            headline="Only one rank was imported",
            message="A straggler is a rank that the others wait for, and this recording has only one rank.",
            advice="If the job had more, import the traces of all its ranks together.",
        )
    return MissingStragglersReason(
        headline="The profiles have no steps in which ranks can be compared",
        message="A straggler is found by the all-reduces of DistributedDataParallel's steps, which the profiles don't "
        "have.",
        advice="Which rank was the last to start a collective is known where the profiles have all ranks of its group.",
    )


def describe_missing_ranks(cycles: Cycles) -> str:
    """Return a note on ranks that could not be compared; empty if there are none."""
    count = cycles.missing_ranks
    if not count:
        return ""
    them = "it" if count == 1 else "them"
    return f"{count_of(count, 'rank')} could not be compared; waiting for {them} looks like transfer."


def _describe_rate(link: SlowLink) -> str:
    return (
        f"delivers {format_bytes(link.bytes_per_s)}/s where the others deliver {format_bytes(link.usual_bytes_per_s)}/s"
    )


def _describe_reasons(finding: Finding) -> str:
    """Name what late ranks take longer for, the most important first."""
    groups = {
        group: {name: finding.parts_ns.get(name, 0.0) for name in CAUSE_GROUPS[group]} for group in BLAMABLE_GROUPS
    }
    reasons = [
        f"{_ARRIVES_LATE_AS_IT[group]}{_describe_parts(parts_ns, finding.delay_ns)}"
        for group, parts_ns in sorted(groups.items(), key=lambda item: -sum(item[1].values()))
        if sum(parts_ns.values()) >= _MIN_PART_SHARE * finding.delay_ns
    ]
    return " and ".join(reasons)


def _describe_parts(parts_ns: dict[str, float], delay_ns: float) -> str:
    """Name the phases of a group of causes that matter; a group of one phase is named already."""
    parts = [PART_LABELS[name] for name, ns in parts_ns.items() if ns >= _MIN_PART_SHARE * delay_ns]
    return f" ({', '.join(parts)})" if len(parts_ns) > 1 and parts else ""
