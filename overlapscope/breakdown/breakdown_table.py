"""The step-time breakdown as a table with one row per rank and finished step."""

from __future__ import annotations

import numpy as np
import pandas as pd

from overlapscope.breakdown.breakdown import BLOCKS, Breakdown
from overlapscope.breakdown.waits import REASONS

COMPUTE_BLOCKS: tuple[str, ...] = ("forward", "backward", "optimizer", "evaluation")
"""Blocks that count as compute."""


def tabulate_breakdown(breakdown: Breakdown) -> pd.DataFrame:
    """Return a table of all steps of all ranks, in the order of ``trace.steps``.

    Returns:
        rank, step, step_time_ns, a column for each of ``BLOCKS`` (these sum to the step time), one for each of
        ``REASONS`` (exposed_<reason>_ns; these sum to exposed_ns), compute_ns (sum of ``COMPUTE_BLOCKS``), hidden_ns
        (time for which gradients are communicated while other work runs), communication_ns (hidden plus exposed),
        overlap_ratio (hidden over communication; NaN without communication).
    """
    blocks_ns = {f"{name}_ns": breakdown.ns[:, index] for index, name in enumerate(BLOCKS)}
    for_reason_ns = np.zeros(len(REASONS) * len(breakdown.rank), dtype=np.int64)
    np.add.at(
        for_reason_ns, breakdown.waits.reason * np.int64(len(breakdown.rank)) + breakdown.wait_row, breakdown.wait_ns
    )
    hidden_ns = breakdown.hidden_ns.sum(axis=1)
    communication_ns = hidden_ns + blocks_ns["exposed_ns"]
    nothing = np.full(len(hidden_ns), np.nan)
    return pd.DataFrame(
        {
            "rank": breakdown.rank,
            "step": breakdown.step,
            "step_time_ns": breakdown.end_ns - breakdown.start_ns,
            **blocks_ns,
            **{
                f"exposed_{reason}_ns": ns
                for reason, ns in zip(REASONS, for_reason_ns.reshape(len(REASONS), -1), strict=True)
            },
            "compute_ns": np.sum([blocks_ns[f"{name}_ns"] for name in COMPUTE_BLOCKS], axis=0),
            "hidden_ns": hidden_ns,
            "communication_ns": communication_ns,
            "overlap_ratio": np.divide(hidden_ns, communication_ns, out=nothing, where=communication_ns > 0),
        },
        copy=False,
    )
