"""Selection of the steady steps of a recording, over which means are taken, and the reasons why others are excluded.

Outliers and special steps (the first steps, a checkpoint, an evaluation, other buckets) are excluded, labeled and
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.breakdown import BLOCKS, Breakdown
from overlapscope.breakdown.spans import Float64Array, Int64Array
from overlapscope.trace.recording import Trace

ExclusionReason = Literal[
    "warm-up", "unfinished", "other buckets", "evaluation", "light", "slow outlier", "fast outlier"
]
EXCLUSION_REASONS: Final[tuple[ExclusionReason, ...]] = get_args(ExclusionReason)
_STEADY: Final = -1

WARM_UP_STEPS: Final = 3
"""Number of warm-up steps: the first allocates, the second runs with rebuilt buckets, the third is the first that finds
all caches warm."""

_MAX_EVALUATION_SHARE: Final = 0.5
"""Maximum share of steps with an evaluation for these to be excluded: if more evaluate, that is what a normal step does
here."""
_MIN_FINISHED_SHARE: Final = 0.5
"""Minimum share of the largest number of finished steps that a rank must have finished: with fewer, it would leave too
few common steps for the mean of the other ranks."""
_OUTLIER_SIGMAS: Final = 8.0
_OUTLIER_SHARE: Final = 0.5
"""Steps are outliers if they differ from the median step by both ``_OUTLIER_SIGMAS`` standard deviations and this
share of it."""
_MAX_OUTLIER_SHARE: Final = 0.1
"""Maximum share of outliers: if more steps are that far from the median, none is an outlier."""
_MAD_TO_SIGMA: Final = 1.4826


@dataclass(frozen=True, kw_only=True)
class ExcludedSteps:
    """Steps that are excluded from means for the same reason."""

    why: ExclusionReason
    steps: tuple[int, ...]
    block: str | None
    """Block of ``BLOCKS`` that breakdowns for most of the difference from the other steps; None unless the steps are
    outliers."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SteadySteps:
    """The steps that all counted ranks have finished, and which of them are steady.

    Counted are the ranks that have finished about as many steps as any other.
    """

    ranks: Int64Array
    """(R,) The counted ranks, ascending."""
    finished: Int64Array
    """(F,) Numbers of the steps that all counted ranks have finished, ascending."""
    finished_rows: Int64Array
    """(F, R) Their row indices in the breakdown."""
    is_steady: npt.NDArray[np.bool_]
    """(F,) True for steady steps."""
    excluded: tuple[ExcludedSteps, ...]
    """The excluded steps, grouped by reason."""
    excluded_ranks: tuple[int, ...]
    """Ranks that are not counted because they finished far fewer steps than others."""

    @property
    def steps(self) -> Int64Array:
        """Return the numbers of the steady steps (S,)."""
        return self.finished[self.is_steady]

    @property
    def rows(self) -> Int64Array:
        """Return the row indices of the steady steps in the breakdown (S, R)."""
        return self.finished_rows[self.is_steady]

    def mean_over_ranks(self, values: npt.NDArray[Any]) -> Float64Array:
        """Average values (G, K) of the breakdown over ranks: (S, K), one row per steady step."""
        means: Float64Array = values[self.rows].sum(axis=1) / max(1, len(self.ranks))
        return means


def select_steady_steps(trace: Trace, breakdown: Breakdown) -> SteadySteps:
    """Select the steady steps of a recording.

    Args:
        breakdown: Breakdown of the recording or of some of its steps, which are then compared with each other only.
    """
    plans = hash_active_plans(trace.collectives)
    return select_steady_rows(
        breakdown.rank,
        breakdown.step,
        breakdown.ns,
        plans,
        find_first_step_after_warm_up(trace.steps),
        find_light_steps(trace.steps),
    )


def select_steady_rows(
    rank: Int64Array,
    step: Int64Array,
    blocks_ns: Int64Array,
    plans: pd.Series[int],
    first_step: int,
    light_steps: Int64Array,
    ranks: Int64Array | None = None,
) -> SteadySteps:
    """Select the steady steps from the arrays of a breakdown.

    Args:
        rank: (G,) Rank of each row.
        step: (G,) Step of each row.
        blocks_ns: (G, len(BLOCKS)) Time in each block.
        plans: From ``hash_active_plans``.
        first_step: Earlier steps are warm-up.
        light_steps: Steps that were not recorded in full. They are counted only if no other step is steady.
        ranks: Ranks that have finished most steps. Needed if the rows are only a part of a recording.
    """
    every_rank = np.unique(rank)
    if ranks is None:
        ranks = find_ranks_with_most_steps(rank)
    numbers = np.unique(step)
    is_counted = np.isin(rank, ranks)
    rows = np.full((len(numbers), len(ranks)), -1, dtype=np.int64)
    positions = np.searchsorted(numbers, step), np.searchsorted(ranks, rank)
    rows[positions[0][is_counted], positions[1][is_counted]] = np.flatnonzero(is_counted)
    ns = blocks_ns[rows].sum(axis=1) / max(1, len(ranks))
    why = np.full(len(numbers), _STEADY)

    def exclude(reason: ExclusionReason, which: npt.NDArray[np.bool_]) -> None:
        why[(why == _STEADY) & which] = EXCLUSION_REASONS.index(reason)

    exclude("warm-up", numbers < first_step)
    exclude("unfinished", np.asarray((rows < 0).any(axis=1)))
    exclude("other buckets", _has_unusual_buckets(plans.reindex(numbers, fill_value=0), why == _STEADY))
    evaluates = ns[:, BLOCKS.index("evaluation")] > 0
    if evaluates[why == _STEADY].sum() <= _MAX_EVALUATION_SHARE * (why == _STEADY).sum():
        exclude("evaluation", evaluates)
    is_light = np.isin(numbers, light_steps)
    if ((why == _STEADY) & ~is_light).any():
        exclude("light", is_light)
    far = outlier_sign(ns.sum(axis=1), why == _STEADY)
    usual_ns = np.median(ns[why == _STEADY], axis=0) if (why == _STEADY).any() else np.zeros(len(BLOCKS))
    block = np.where(far != 0, ((ns - usual_ns) * far[:, None]).argmax(axis=1), -1)
    exclude("slow outlier", far > 0)
    exclude("fast outlier", far < 0)
    kinds = sorted(
        {(reason, number) for reason, number in zip(why.tolist(), block.tolist(), strict=True) if reason >= 0}
    )
    is_finished = (rows >= 0).all(axis=1)
    return SteadySteps(
        ranks=ranks,
        finished=numbers[is_finished],
        finished_rows=rows[is_finished],
        is_steady=why[is_finished] == _STEADY,
        excluded=tuple(
            ExcludedSteps(
                why=EXCLUSION_REASONS[reason],
                steps=tuple(numbers[(why == reason) & (block == number)].tolist()),
                block=BLOCKS[number] if number >= 0 else None,
            )
            for reason, number in kinds
        ),
        excluded_ranks=tuple(np.setdiff1d(every_rank, ranks).tolist()),
    )


def find_steps_without_end(trace: Trace) -> tuple[int, ...]:
    """Return the steps after the last finished one that some rank began, as when the job was killed in one.

    Empty if the recording goes on beyond the steps that were read. What ranks do after their last step, such as asking
    for another batch, begins none: a forward or a reduction does.
    """
    if trace.extent != "all" or trace.steps.empty:
        return ()
    begun = (
        trace.phases.loc[trace.phases["phase"] == "forward", "step"],
        trace.collectives.loc[trace.collectives["bucket"] >= 0, "step"],
    )
    steps = np.unique(np.concatenate([each.to_numpy(np.int64) for each in begun]))
    return tuple(steps[steps > trace.steps["step"].max()].tolist())


def exclude_steps_without_end(steady: SteadySteps, steps: Sequence[int]) -> SteadySteps:
    """Return the same with steps that no rank finished among the unfinished ones."""
    if not steps:
        return steady
    known = next((each.steps for each in steady.excluded if each.why == "unfinished"), ())
    others = [each for each in steady.excluded if each.why != "unfinished"]
    unfinished = ExcludedSteps(why="unfinished", steps=(*known, *steps), block=None)
    excluded = sorted((*others, unfinished), key=lambda each: EXCLUSION_REASONS.index(each.why))
    return replace(steady, excluded=tuple(excluded))


def find_ranks_with_most_steps(rank: Int64Array) -> Int64Array:
    """Return the ranks that finished about as many steps as any other, ascending.

    Args:
        rank: Rank of each finished step.
    """
    every_rank, finished = np.unique(rank, return_counts=True)
    return every_rank[finished >= _MIN_FINISHED_SHARE * finished.max(initial=0)]


def find_first_step_after_warm_up(steps: pd.DataFrame) -> int:
    """Return the number of the first step after the warm-up; 0 if there are no steps.

    Args:
        steps: A table like ``trace.steps``.
    """
    numbers = np.unique(steps["step"])
    return int(numbers[_count_warm_up_steps(numbers)]) if len(numbers) else 0


def find_light_steps(steps: pd.DataFrame) -> Int64Array:
    """Return the numbers of the steps that some rank did not record in full.

    Args:
        steps: A table like ``trace.steps``.
    """
    return np.unique(steps["step"].to_numpy(np.int64)[steps["is_light"].to_numpy(bool)])


def _count_warm_up_steps(numbers: Int64Array) -> int:
    """Return the number of warm-up steps among some step numbers.

    That is fewer than half of them, and none if only later steps of a training that has long been warm are given.
    """
    return min(WARM_UP_STEPS, max(0, len(numbers) - 1) // 2) if numbers[0] < WARM_UP_STEPS else 0


def outlier_sign(step_ns: npt.NDArray[np.float64], which: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the sign of each outlier (S,): 1 for a slow outlier, -1 for a fast one, 0 for other steps."""
    far = np.zeros(len(step_ns), dtype=np.int64)
    if not which.any():
        return far
    usual_ns = np.median(step_ns[which])
    away_ns = step_ns - usual_ns
    sigma_ns = _MAD_TO_SIGMA * np.median(np.abs(away_ns[which]))
    is_far = which & (np.abs(away_ns) > max(_OUTLIER_SIGMAS * sigma_ns, _OUTLIER_SHARE * usual_ns))
    if is_far.sum() <= _MAX_OUTLIER_SHARE * which.sum():
        far[is_far] = np.sign(away_ns[is_far]).astype(np.int64)
    return far


def hash_active_plans(collectives: pd.DataFrame) -> pd.Series[int]:
    """Return a hash of the active bucket plans of all models, by step that has a reduction."""
    is_reduced = collectives["bucket"].to_numpy() >= 0
    names = ("step", "model", "plan_epoch")
    step, model, epoch = (collectives[name].to_numpy(np.int64)[is_reduced] for name in names)
    # Neighboring rows are mostly equal, so that this leaves few rows to compare.
    begins = np.append(True, (step[1:] != step[:-1]) | (model[1:] != model[:-1]) | (epoch[1:] != epoch[:-1]))
    begins = begins[: len(step)]
    plans = pd.DataFrame({"step": step[begins], "model": model[begins], "plan_epoch": epoch[begins]}).drop_duplicates()
    # Sums of hashes, so that different sets of plans have different sums.
    hashes = pd.util.hash_pandas_object(plans[["model", "plan_epoch"]], index=False).to_numpy()
    numbers, positions = np.unique(plans["step"].to_numpy(np.int64), return_inverse=True)
    active = np.zeros(len(numbers), dtype=np.uint64)
    np.add.at(active, positions, hashes)
    return pd.Series(active, index=numbers)


def _has_unusual_buckets(plans: pd.Series[int], which: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which steps (S,) were reduced with other buckets than most.

    A plan of 0 means that a step has no reduction.
    """
    active = plans.to_numpy(np.uint64)
    counted = which & (active > 0)
    if not counted.any():
        return np.zeros(len(active), dtype=bool)
    plans_in_use, counts = np.unique(active[counted], return_counts=True)
    most = plans_in_use[counts == counts.max()]
    # Among equally frequent plans, the latest.
    usual = active[counted & np.isin(active, most)][-1]
    is_other: npt.NDArray[np.bool_] = counted & (active != usual)
    return is_other
