"""What people read of a breakdown: names of blocks, phases and wait reasons, and the sentence of a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from overlapscope.breakdown.drift import Drift
from overlapscope.breakdown.steady_steps import ExcludedSteps
from overlapscope.breakdown.summary import LITTLE_EXPOSED_SHARE, Limit, Summary
from overlapscope.text import count_of, format_ns, format_ranks, format_share, format_step_ns, rank_list
from overlapscope.trace.tables import PHASE_NAMES

BLOCK_LABELS: Final = {
    "data_wait": "data wait",
    "host_loop": "training loop",
    "buffers": "broadcast of buffers",
    "forward": "forward",
    "inter_phase": "between phases",
    "backward": "backward",
    "exposed": "exposed communication",
    "bucket_copies": "copies of gradients",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "collectives": "user's own collectives",
    "gc": "garbage collection",
    "unattributed": "unattributed",
}
PHASE_LABELS: Final = {name: BLOCK_LABELS.get(name, name) for name in PHASE_NAMES} | {
    "loop": BLOCK_LABELS["host_loop"],
    "finalize": "wait for gradients",
}
REASON_LABELS: Final = {
    "launch_delay": "not launched yet",
    "straggler": "waiting for a later rank",
    "queued": "queued behind another bucket",
    "transfer": "transfer",
    "unattributed": "unattributed",
}
_MOST_NUMBERS: Final = 4

_SUMMARIES: Final[dict[Limit, str]] = {
    "no step": "No step has finished yet, so there is nothing to measure.",
    "no step ended": "No step was finished, so there is nothing to measure.",
    "not recorded": "No steps were recorded: no training with DistributedDataParallel (torch's own: without sparse "
    "gradients) or fully_shard was seen, and no update with gradients that the job's own collectives had reduced.",
    "no common step": "No step has been finished by all ranks, so there are no means.",
    "no communication": "No gradient communication was recorded in {step}, so there is no overlap to measure.",
    "data wait": "{data_wait} of {step} ({data_wait_share}) is spent waiting for data, and {exposed} "
    "({exposed_share}) waiting for communication{late}; {ratio} of communication{of_gradients} is hidden.",
    "host loop": "{host_loop} of {step} ({host_loop_share}) is spent in the training loop between an update and "
    "the next forward, and {exposed} ({exposed_share}) waiting for communication{late}; {ratio} of "
    "communication{of_gradients} is hidden.",
    "nothing": "{ratio} of communication{of_gradients} is hidden; the rest takes only {exposed} of {step} "
    "({exposed_share}){little}.",
    "communication": "{ratio} of communication{of_gradients} is hidden{one_bucket}; the rest takes {exposed} of {step} "
    "({exposed_share}). Communication{of_gradients} takes {communication} and compute {compute}, so not all of it can "
    "be hidden.",
    "exposed": "{ratio} of communication{of_gradients} is hidden{one_bucket}; the rest takes {exposed} of {step} "
    "({exposed_share}){late}.",
}
_NO_IMPORTED_STEPS: Final = (
    "The profiles are not of DistributedDataParallel: their steps have no phases, only what ran is known."
)
_LARGE: Final = {
    "buffers": "The broadcast of buffers takes",
    "inter_phase": "What runs between phases, such as the loss and clipping, takes",
    "bucket_copies": "Copies of gradients take",
    "optimizer": "The optimizer takes",
    "evaluation": "Evaluation takes",
    "collectives": "The script's own collectives take",
    "gc": "Garbage collection takes",
}
_OTHERS: Final = "Other collectives ran alone for {} of the step, which is not counted as waiting."
_LATE: Final = ", {straggler} of it until the last rank arrives"
_ONE_BUCKET: Final = ", as all gradients are in one bucket"


def describe_summary(summary: Summary) -> str:
    """Say in one sentence what the step time is lost to."""
    if summary.limit == "no step" and summary.imported is not None:
        return _NO_IMPORTED_STEPS
    times = {name: each.value for name, each in summary.mean.blocks.items()}
    times |= {"step": summary.mean.step.value, "straggler": summary.exposed_for["straggler"].value}
    times |= {"communication": summary.communication_ns, "compute": summary.compute_ns}
    facts = {name: format_ns(time_ns) for name, time_ns in times.items()}
    facts |= {f"{name}_share": format_share(summary.share_of(each)) for name, each in summary.mean.blocks.items()}
    facts["step"] = format_step_ns(summary.mean.step.value)
    facts["ratio"] = format_share(summary.overlap_ratio)
    facts["late"] = _LATE.format_map(facts) if summary.waits_for_stragglers else ""
    facts["of_gradients"] = " of gradients" if summary.has_others else ""
    others_ns = summary.others_exposed_ns
    has_long_others = others_ns >= LITTLE_EXPOSED_SHARE * summary.mean.step.value
    facts["one_bucket"] = _ONE_BUCKET if summary.is_held_back_by_one_bucket else ""
    facts["little"] = (
        "" if has_long_others or summary.largest_other is not None else ", so there is little left to gain"
    )
    said = [_SUMMARIES[summary.limit].format_map(facts)]
    if (large := summary.largest_other) is not None:
        said.append(f"{_LARGE[large]} {facts[large]} ({facts[f'{large}_share']}).")
    if has_long_others:
        said.append(_OTHERS.format(format_ns(others_ns)))
    return " ".join(said)


def describe_drift(drift: Drift) -> str:
    """Describe a step time that rises or falls, and how to look at the steps that do not."""
    verb = "falls" if drift.last_ns < drift.first_ns else "rises"
    says = f"The step time {verb} from {format_ns(drift.first_ns)} to {format_ns(drift.last_ns)} over these steps"
    if drift.steady is None:
        return f"{says}, and does not settle: means are of all of them."
    first, last = drift.steady
    return f"{says}; steps {first} to {last} are steady (range {first}:{last + 1})."


def describe_excluded(excluded: Sequence[ExcludedSteps]) -> str:
    """Describe the excluded steps; empty if there are none.

    Example: ``3 warm-up steps (0-2), 1 slow outlier in data wait (20)``.
    """
    return ", ".join(f"{_describe_reason(one)} ({_format_few(one.steps)})" for one in excluded)


def describe_uncounted_ranks(ranks: Sequence[int]) -> str:
    """Describe the ranks that are not counted in a sentence; empty if there are none."""
    return f"Left out because of far fewer finished steps: {rank_list(ranks)}." if ranks else ""


def _describe_reason(one: ExcludedSteps) -> str:
    count, block = len(one.steps), f" in {BLOCK_LABELS[one.block]}" if one.block is not None else ""
    return {
        "warm-up": count_of(count, "warm-up step"),
        "unfinished": f"{count_of(count, 'step')} not recorded to the end by all ranks",
        "other buckets": f"{count_of(count, 'step')} with other buckets",
        "evaluation": f"{count_of(count, 'step')} with an evaluation",
        "light": count_of(count, "light step"),
        "slow outlier": f"{count_of(count, 'slow outlier')}{block}",
        "fast outlier": f"{count_of(count, 'fast outlier')}{block}",
    }[one.why]


def _format_few(steps: Sequence[int]) -> str:
    """Format numbers of steps; of many that are not in a row, the first few."""
    is_range = len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1
    shown = steps if is_range else steps[:_MOST_NUMBERS]
    return format_ranks(shown) + (" ..." if len(shown) < len(steps) else "")
