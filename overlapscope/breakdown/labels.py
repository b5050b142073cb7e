"""Display names of blocks, phases and wait reasons, shared by all pages and commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from overlapscope.breakdown.steady_steps import ExcludedSteps
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
PHASE_LABELS: Final = {name: BLOCK_LABELS.get(name, name) for name in PHASE_NAMES} | {"loop": BLOCK_LABELS["host_loop"]}
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

    Example: ``3 to warm up (0 to 2), 1 far longer in data wait (20)``.
    """
    return ", ".join(f"{len(one.steps):,} {_describe_reason(one)} ({_format_steps(one.steps)})" for one in excluded)


def describe_uncounted_ranks(ranks: Sequence[int]) -> str:
    """Describe the ranks that are not counted in a sentence; empty if there are none."""
    names = ", ".join(map(str, ranks[:_MOST_NUMBERS])) + (" ..." if len(ranks) > _MOST_NUMBERS else "")
    return f"Left out because they finished far fewer steps: rank{'s' * (len(ranks) > 1)} {names}." if ranks else ""


def _describe_reason(one: ExcludedSteps) -> str:
    block = f" in {BLOCK_LABELS[one.block]}" if one.block is not None else ""
    return {
        "warm-up": "to warm up",
        "unfinished": "not finished by all ranks",
        "other buckets": "that reduce other buckets",
        "evaluation": "with an evaluation",
        "far longer": f"far longer{block}",
        "far shorter": f"far shorter{block}",
    }[one.why]


def _format_steps(steps: Sequence[int]) -> str:
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]} to {steps[-1]}"
    shown = ", ".join(map(str, steps[:_MOST_NUMBERS]))
    return shown if len(steps) <= _MOST_NUMBERS else f"{shown} ..."
