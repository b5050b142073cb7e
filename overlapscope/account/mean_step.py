"""A mean step as blocks that sum to it; what is left of one when another is taken from it is one as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from overlapscope.account.blocks import BLOCKS
from overlapscope.account.intervals import Float64Array
from overlapscope.account.means import mean_of
from overlapscope.interval import Interval


@dataclass(frozen=True, kw_only=True)
class MeanStep:
    """The mean of some steps, or a difference of two means. Times are nanoseconds."""

    step: Interval
    blocks: Mapping[str, Interval]
    """By name, in the order of ``BLOCKS``; their values sum to that of ``step``."""

    @property
    def present(self) -> dict[str, Interval]:
        """The blocks that have any time."""
        return {name: mean for name, mean in self.blocks.items() if mean.value}

    def times(self, factor: float) -> MeanStep:
        """All of it, multiplied by a positive number."""
        return MeanStep(
            step=self.step.times(factor), blocks={name: mean.times(factor) for name, mean in self.blocks.items()}
        )

    def at_most(self, mean: MeanStep) -> MeanStep:
        """A saving that takes no block below nothing: of what it takes too much, the step is not shorter."""
        surplus = {name: max(0.0, each.value - mean.blocks[name].value) for name, each in self.blocks.items()}
        return MeanStep(
            step=self.step.less(sum(surplus.values())),
            blocks={name: each.less(surplus[name]) for name, each in self.blocks.items()},
        )

    def minus(self, other: MeanStep) -> MeanStep:
        """This mean without another one, of other steps: chance has made them independently of each other."""
        return MeanStep(
            step=self.step.minus(other.step),
            blocks={name: mean.minus(other.blocks[name]) for name, mean in self.blocks.items()},
        )


def mean_step_of(blocks_ns: Float64Array) -> MeanStep:
    """The mean of a series of steps, or of what differs in each of them.

    Args:
        blocks_ns: (S, len(BLOCKS)) by step, in their order. Times are never negative, differences may be.
    """
    step, *blocks = mean_of(np.concatenate([blocks_ns.sum(axis=1, keepdims=True), blocks_ns], axis=1))
    return MeanStep(step=step, blocks=dict(zip(BLOCKS, blocks, strict=True)))
