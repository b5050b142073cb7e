"""The steps that differ most between two sides, next to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from overlapscope.account.blocks import BLOCKS
from overlapscope.analysis.compare.side import ComparisonSide, StepChoice


@dataclass(frozen=True, kw_only=True)
class StepPair:
    """The same step of both sides. Times are means of the ranks that have finished it, in nanoseconds."""

    base_step: int
    new_step: int
    base_ns: float
    new_ns: float
    block: str
    """The block of ``BLOCKS`` that accounts for most of the difference."""
    base_block_ns: float
    new_block_ns: float
    ranks: tuple[int, ...]
    """Ranks that have finished both, ordered by the difference of that block, largest first."""


def find_most_different_steps(base: ComparisonSide, new: ComparisonSide, count: int) -> tuple[StepPair, ...]:
    """Return steps of both sides, the largest difference first, outliers included, but without the warm-up.

    Steps of two recordings are aligned by their numbers, chosen ones by their distance from the first chosen one.
    """
    is_chosen = any(side.choice != StepChoice() for side in (base, new))
    before, after = (_tabulate_by_step(side, is_chosen) for side in (base, new))
    both = before.add_suffix("_base").join(after.add_suffix("_new"), how="inner")
    blocks_ns = np.stack([both[[f"{name}_{side}" for name in BLOCKS]].to_numpy() for side in ("base", "new")])
    step_ns = blocks_ns.sum(axis=2)
    longest = np.argsort(-np.abs(step_ns[1] - step_ns[0]), kind="stable")[:count]
    block = np.abs(blocks_ns[1] - blocks_ns[0]).argmax(axis=1)
    numbers = both[["step_base", "step_new"]].to_numpy(dtype=int)
    return tuple(
        StepPair(
            base_step=int(numbers[row, 0]),
            new_step=int(numbers[row, 1]),
            base_ns=float(step_ns[0, row]),
            new_ns=float(step_ns[1, row]),
            block=BLOCKS[block[row]],
            base_block_ns=float(blocks_ns[0, row, block[row]]),
            new_block_ns=float(blocks_ns[1, row, block[row]]),
            ranks=_ranks_by_difference(
                *(
                    _block_by_rank(side, step, BLOCKS[block[row]])
                    for side, step in zip((base, new), numbers[row], strict=True)
                )
            ),
        )
        for row in longest
    )


def _tabulate_by_step(side: ComparisonSide, is_chosen: bool) -> pd.DataFrame:
    """Return the blocks and the number ``step`` of each step, indexed by the key that steps are aligned by."""
    warm_up = [step for excluded in side.summary.alike.excluded if excluded.why == "warm-up" for step in excluded.steps]
    figures = side.summary.figures.set_axis([name.removesuffix("_ns") for name in side.summary.figures.columns], axis=1)
    means = figures[~figures["step"].isin(warm_up)].groupby("step")[list(BLOCKS)].mean()
    means["step"] = means.index
    return means.set_axis(means.index - (figures["step"].min() if is_chosen else 0), axis=0)


def _block_by_rank(side: ComparisonSide, step: int, block: str) -> pd.Series[float]:
    figures = side.summary.figures
    return figures[figures["step"] == step].set_index("rank")[f"{block}_ns"]


def _ranks_by_difference(base_ns: pd.Series[float], new_ns: pd.Series[float]) -> tuple[int, ...]:
    apart_ns = (new_ns - base_ns).abs().dropna()  # unknown for ranks that are on one side only
    return tuple(map(int, apart_ns.sort_values(ascending=False, kind="stable").index))
