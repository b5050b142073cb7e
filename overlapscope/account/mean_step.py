"""Mean step as blocks that sum to it; the difference of two mean steps is a mean step as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from overlapscope.account.blocks import BLOCKS
from overlapscope.account.intervals import Float64Array
from overlapscope.account.means import mean_with_ci
from overlapscope.interval import Interval


@dataclass(frozen=True, kw_only=True)
class MeanStep:
    """The mean of some steps, or the difference of two such means. Times are nanoseconds."""

    step: Interval
    """Step time."""
    blocks: Mapping[str, Interval]
    """Time in each block by name, in the order of ``BLOCKS``; their values sum to that of ``step``."""

    @property
    def present(self) -> dict[str, Interval]:
        """Return the blocks that have any time."""
        return {name: mean for name, mean in self.blocks.items() if mean.value}

    def times(self, factor: float) -> MeanStep:
        """Multiply the step and all blocks by a positive number."""
        return MeanStep(
            step=self.step.times(factor), blocks={name: mean.times(factor) for name, mean in self.blocks.items()}
        )

    def capped_at(self, mean: MeanStep) -> MeanStep:
        """Limit this saving so that no block falls below zero; the step saving shrinks by what is cut off.

        Args:
            mean: The mean step that the saving is taken from.
        """
        surplus = {name: max(0.0, each.value - mean.blocks[name].value) for name, each in self.blocks.items()}
        return MeanStep(
            step=self.step.shift_down(sum(surplus.values())),
            blocks={name: each.shift_down(surplus[name]) for name, each in self.blocks.items()},
        )

    def minus(self, other: MeanStep) -> MeanStep:
        """Subtract the mean of other steps, whose noise is independent of this one's."""
        return MeanStep(
            step=self.step.minus(other.step),
            blocks={name: mean.minus(other.blocks[name]) for name, mean in self.blocks.items()},
        )


def compute_mean_step(blocks_ns: Float64Array) -> MeanStep:
    """Compute the mean of a series of steps, or of differences of steps.

    Args:
        blocks_ns: (S, len(BLOCKS)) By step, in order. Times are never negative, differences may be.
    """
    step, *blocks = mean_with_ci(np.concatenate([blocks_ns.sum(axis=1, keepdims=True), blocks_ns], axis=1))
    return MeanStep(step=step, blocks=dict(zip(BLOCKS, blocks, strict=True)))
