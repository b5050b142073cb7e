"""Display names of blocks, phases and wait reasons, shared by all pages and commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from overlapscope.breakdown.steady_steps import ExcludedSteps
from overlapscope.text import count_of, format_ranks, rank_list
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
        "unfinished": f"{count_of(count, 'step')} not finished by all ranks",
        "other buckets": f"{count_of(count, 'step')} with other buckets",
        "evaluation": f"{count_of(count, 'step')} with an evaluation",
        "far longer": f"{count_of(count, 'slow outlier')}{block}",
        "far shorter": f"{count_of(count, 'fast outlier')}{block}",
    }[one.why]


def _format_few(steps: Sequence[int]) -> str:
    """Format numbers of steps; of many that are not in a row, the first few."""
    is_range = len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1
    shown = steps if is_range else steps[:_MOST_NUMBERS]
    return format_ranks(shown) + (" ..." if len(shown) < len(steps) else "")
