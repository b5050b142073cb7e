"""Recommendations: the changes that would save most of the step time, each with its evidence.

Each saving is a difference of two breakdowns: the recorded steps, and the same steps with one thing changed. What may
be chance is not recommended: even the lower end of the interval of a saving has to be worth the effort.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.advice.advice import Advice
from overlapscope.advice.sharded import advise_on_sharding, is_sharded
from overlapscope.analysis import Analysis
from overlapscope.breakdown.text import BLOCK_LABELS
from overlapscope.bucket_model.search import MIN_GAIN
from overlapscope.bucket_model.text import format_advised_setting
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.sharded_model.text import describe_change, format_memory
from overlapscope.stragglers.cycles import CAUSE_GROUPS, CAUSES
from overlapscope.stragglers.finding import compute_saving
from overlapscope.stragglers.replay import Replay, Times
from overlapscope.stragglers.text import describe_delay
from overlapscope.text import capitalize

MAX_IMPROVEMENTS: Final = 3
"""Maximum number of recommendations."""

_BLOCK_ADVICE: Final = {
    "data_wait": "Have data ready when it is needed: more workers of the DataLoader, or more prefetched batches",
    "host_loop": "Do less in the loop between an update and the next forward: fetch data ahead, log and save seldom",
    "gc": "Collect garbage between steps alone: gc.freeze() after the warm-up, or gc.disable()",
    "buffers": "Don't broadcast buffers before every forward: broadcast_buffers=False, if ranks may differ in them",
    "bucket_copies": "Don't copy averages out of buckets: gradient_as_bucket_view=True",
}
"""Recommendation for each block that ranks could do without."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """One recommended change."""

    what: str
    """A sentence without its full stop."""
    saves: Interval
    """Saving in nanoseconds per step."""
    step_ns: float
    """Mean time of the steps that the saving is a mean over: the mean step; of a delay in some steps, that of all that
    were compared, outliers too."""
    link: str
    """Page of the app that has the evidence, with its query."""
    evidence: str
    """What that page shows."""


def find_improvements(analysis: Analysis, advice: Advice | None) -> tuple[Improvement, ...]:
    """Return the changes that save most, the best first; empty if none is worth the effort.

    Args:
        advice: Advice on bucket sizes, if there is any.
    """
    step_ns = analysis.summary.mean.step.value
    found = [*_findings(analysis), *_blocks(analysis), *_buckets(advice), *_sharding(analysis)]
    worth_it = [each for each in found if each.saves.low >= MIN_GAIN * step_ns]
    return tuple(sorted(worth_it, key=lambda each: -each.saves.value)[:MAX_IMPROVEMENTS])


def _findings(analysis: Analysis) -> Iterator[Improvement]:
    for finding in analysis.stragglers.findings if analysis.stragglers is not None else ():
        if not finding.is_actionable:
            continue
        yield Improvement(
            what=describe_delay(finding),
            saves=finding.saving.step,
            step_ns=finding.step_ns,
            link=f"timeline?step={finding.worst_step}" + (f"&rank={finding.ranks[0]}" if finding.ranks else ""),
            evidence=f"step {finding.worst_step}, its worst",
        )


def _blocks(analysis: Analysis) -> Iterator[Improvement]:
    if analysis.stragglers is None or not analysis.summary.steps:
        return
    replay = analysis.stragglers.usual
    found = analysis.stragglers.findings
    named = {group for group, (cause, *_) in CAUSE_GROUPS.items() if any(cause in each.parts_ns for each in found)}
    for block, way in _BLOCK_ADVICE.items():
        if block in named or not analysis.summary.mean.blocks[block].value:
            continue
        if block == "bucket_copies" and not len(analysis.trace.copies):
            continue  # it is the rest of what ends a step, which bucket views have as well
        times = _times_without(replay, block)
        step, rank, _ = analysis.summary.longest[block]
        saves = compute_saving(replay, times, replay.length_ns(times)).capped_at(analysis.summary.mean).step
        yield Improvement(
            what=way,
            saves=saves,
            step_ns=analysis.summary.mean.step.value,
            link=f"timeline?step={step}&rank={rank}",
            evidence=f"step {step}, the longest {BLOCK_LABELS[block]}",
        )


def _times_without(replay: Replay, block: str) -> Times:
    """Return the times of ranks without any time in a block."""
    if block == "buffers":
        return replace(replay.recorded, broadcast_ns=np.zeros_like(replay.recorded.broadcast_ns))
    local_ns = replay.recorded.local_ns.copy()
    local_ns[CAUSES.index(block)] = 0
    return replace(replay.recorded, local_ns=local_ns)


def _sharding(analysis: Analysis) -> Iterator[Improvement]:
    if not is_sharded(analysis.trace):
        return
    try:
        advice = advise_on_sharding(analysis)
    except OverlapScopeError:
        return  # 'overlapscope recommend' says why
    if (best := advice.best) is not None:
        yield Improvement(
            what=f"{capitalize(describe_change(best))} ({format_memory(best)})",
            saves=best.gain.times(advice.step_ns.value),
            step_ns=advice.step_ns.value,
            link="timeline",
            evidence="when parameters are gathered",
        )


def _buckets(advice: Advice | None) -> Iterator[Improvement]:
    if advice is None:
        return
    found = advice.recommendation
    measured = found.curve.measured
    if measured is not None and measured.plan != found.now.buckets:
        return  # the mean step is one with other buckets than those of now
    if found.verdict == "change":
        yield Improvement(
            what=format_advised_setting(found),
            saves=found.gain.times(found.now.step_ns.value),
            step_ns=found.now.step_ns.value,
            link="buckets",
            evidence="the step time of every bucket size",
        )
    gain = found.curve.compute_gain_between(found.free.buckets, found.now.buckets)
    if found.is_free_faster and found.free_gain.low > 0:
        yield Improvement(
            what=f"Buckets of different sizes, {len(found.free.buckets)} of them: the best plan of all",
            saves=gain.times(found.now.step_ns.value),
            step_ns=found.now.step_ns.value,
            link="buckets?plan=best",
            evidence="the best plan",
        )
