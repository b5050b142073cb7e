"""Comparison of the replicas of a model at the end of the recordings, after the last update and what follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlapscope.trace.sweep_file import FingerprintPasses


@dataclass(frozen=True, kw_only=True)
class EndComparison:
    """The parameters of ranks whose recordings ended after the same number of reductions."""

    differing: tuple[str, ...]
    """Names of the parameters that differ; empty if all are equal."""
    is_all_trained: bool = False
    """True if all trained parameters differ, as when one rank has loaded a checkpoint since."""
    equal_step: int | None = None
    """Step that began when all that differ were last equal; None if that was not observed for all."""
    sides: tuple[tuple[int, ...], ...]
    """Ranks with equal values of the first parameter that differs, largest side first; one side if all are equal."""


def at_end(
    tensors: Sequence[tuple[str, str]], last: Mapping[int, FingerprintPasses], equal_steps: npt.NDArray[np.int64]
) -> EndComparison | None:
    """Compare the values of ranks at their end; None if unknown for any, or if they ended after different steps.

    Args:
        tensors: name and kind of each.
        last: fingerprint pass of each rank at its end, one or none.
        equal_steps: from ``last_equal_steps``.
    """
    if any(not len(one) for one in last.values()) or len({int(one["first"][0]) for one in last.values()}) > 1:
        return None
    values = np.stack([one["values"][0] for one in last.values()])
    kinds = np.array([kind for _, kind in tensors])
    compared = (kinds != "buffer") & (values != 0).all(axis=0)
    if not compared.any():
        return None
    differing = np.flatnonzero(compared & (values != values[0]).any(axis=0))
    trained = np.flatnonzero(compared & (kinds == "trained"))
    equal_step = int(equal_steps[differing].min(initial=np.iinfo(np.int64).max))
    column = values[:, differing[0]] if len(differing) else np.zeros(len(values))
    sides = [tuple(rank for rank, one in zip(last, column, strict=True) if one == value) for value in set(column)]
    return EndComparison(
        differing=tuple(tensors[index][0] for index in differing.tolist()),
        sides=tuple(sorted(sides, key=lambda side: (-len(side), side))),
        is_all_trained=len(differing) > 0 and set(trained) <= set(differing),
        equal_step=equal_step if len(differing) and equal_step >= 0 else None,
    )


def last_equal_steps(
    reference: FingerprintPasses, compared: npt.NDArray[np.bool_], moments: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the step that began when each tensor was last compared; -1 if it never was."""
    if not len(moments):
        return np.full(moments.shape[1], -1)
    latest = np.where(compared, moments, -1).argmax(axis=0)
    steps = reference["steps"][latest, np.arange(moments.shape[1])].astype(np.int64)
    return np.where(compared.any(axis=0), steps, -1)
