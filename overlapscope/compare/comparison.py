"""Comparison of two sides: what differs, what is a regression, and what could have been detected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.compare.buckets import BucketChange, compare_buckets
from overlapscope.compare.changes import BETWEEN_RUN_SHARE, Change, compare_series
from overlapscope.compare.side import STEP, ComparisonSide, StepChoice
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import Trace

# Settings and environment that differ between two recordings.

NOT_SET: Final = "not set"
_MAX_SHOWN: Final = 160


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A setting that differs."""

    name: str
    base: str
    new: str


def compare_settings(base: Trace, new: Trace) -> tuple[SettingChange, ...]:
    """Return the settings that differ: of the job, of its DDP instances, versions and environment variables."""
    before, after = dict(_settings(base)), dict(_settings(new))
    return tuple(
        SettingChange(name=name, base=before.get(name, NOT_SET), new=after.get(name, NOT_SET))
        for name in dict.fromkeys([*before, *after])
        if before.get(name, NOT_SET) != after.get(name, NOT_SET)
    )


def explain_different_jobs(base: Trace, new: Trace) -> tuple[str, ...]:
    """Return why the two are not the same job, in sentences without a full stop; empty if they may be."""
    found = []
    sizes = [trace.run.get("world_size") for trace in (base, new)]
    if None not in sizes and sizes[0] != sizes[1]:
        found.append(f"{sizes[0]} ranks in the base, {sizes[1]} in the new one")
    models = [collect_parameters(trace) for trace in (base, new)]
    if all(models) and models[0] != models[1]:
        own, other = len(models[0] - models[1]), len(models[1] - models[0])
        found.append(f"models differ in parameters or their shapes ({own:,} in the base, {other:,} in the new one)")
    return tuple(found)


def _settings(trace: Trace) -> Iterator[tuple[str, str]]:
    run = trace.run
    for name in ("world_size", "backend", "timeout_s", "detail"):
        if run.get(name) is not None:
            yield name, str(run[name])
    yield "command line", _shorten(" ".join(map(str, run.get("argv") or ())))
    yield "hosts", ", ".join(sorted(set(trace.ranks["host"].astype(str))))
    yield "devices", ", ".join(sorted(set(trace.ranks["device"].astype(str))))
    for name in ("versions", "environment"):
        yield from ((str(key), str(value)) for key, value in _as_dict(run.get(name)).items())
    for model in run.get("models") or ():
        prefix = f"model {model.get('model')}: "
        yield f"{prefix}class", str(model.get("class"))
        if "comm_hook" in model:
            yield f"{prefix}comm_hook", str(model["comm_hook"])
        yield from ((prefix + str(key), str(value)) for key, value in _as_dict(model.get("ddp_arguments")).items())
    for number, of_model in trace.plans.groupby("model"):
        latest = of_model[of_model["plan_epoch"] == of_model["plan_epoch"].max()]
        sizes = latest.groupby("bucket")["bytes"].sum().tolist()
        listed = ", ".join(f"{size:,}" for size in sizes)
        yield f"model {number}: bucket plan", _shorten(f"bytes of {len(sizes)} buckets: {listed}")


def collect_parameters(trace: Trace) -> set[tuple[Any, ...]]:
    """Return the number of the model, the name and the shape of each parameter: equal of recordings of one model."""
    return set(trace.plans[["model", "name", "shape"]].itertuples(index=False, name=None))


def _as_dict(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 4]} ..."


# The steps that differ most between two sides, next to each other.


@dataclass(frozen=True, kw_only=True)
class StepPair:
    """The same step of both sides. Times are means of the ranks that have finished it, in nanoseconds."""

    base_step: int
    new_step: int
    base_ns: float
    new_ns: float
    block: str
    """The block of ``BLOCKS`` that breakdowns for most of the difference."""
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
    warm_up = [
        step for excluded in side.summary.steady.excluded if excluded.why == "warm-up" for step in excluded.steps
    ]
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


Outcome = Literal["slower", "slower, but not surely enough", "faster", "no difference seen", "too noisy to tell"]

MAX_SEEN_SHARE: Final = 0.1
"""Maximum share of the step that a difference must have to be seen, for "no difference" to mean anything."""

_MAX_STEPS: Final = 5


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """Differences between two sides."""

    base: ComparisonSide
    new: ComparisonSide
    changes: dict[str, Change]
    """Change of each of ``PARTS``; the differences between means of the blocks sum to that of the step."""
    job: dict[str, Change] | None
    """Changes of the blocks on the critical path, which sum to the same; None if times of ranks can't be compared."""
    buckets: tuple[BucketChange, ...]
    steps: tuple[StepPair, ...]
    """The steps that differ most."""
    settings: tuple[SettingChange, ...]
    unlike: tuple[str, ...]
    """Why the sides are not of the same job; empty if they may be."""

    @property
    def step(self) -> Change:
        """Return the change of the step time."""
        return self.changes[STEP]

    def share(self, ns: float) -> float:
        """Return a time as a share of the mean step of the base."""
        return ns / self.step.mean.base

    def outcome(self, part: str, fail_above: float) -> Outcome:
        """Classify the change of a part.

        Args:
            part: One of ``PARTS``.
            fail_above: Minimum increase, as a share of the base's step, to count as slower.
        """
        both = self.changes[part].mean, self.changes[part].middle
        if any(self.share(each.ns.low) > fail_above for each in both):
            return "slower"
        if any(each.is_longer for each in both):
            return "slower, but not surely enough"
        if any(each.is_shorter for each in both):
            return "faster"
        seen_share = self.share(self.changes[part].seen_ns)  # NaN of too few steps
        is_telling = seen_share <= MAX_SEEN_SHARE and abs(self.share(both[0].ns.value)) <= seen_share
        return "no difference seen" if is_telling else "too noisy to tell"


def compare(base: ComparisonSide, new: ComparisonSide) -> Comparison:
    """Compare two sides.

    Raises:
        OverlapScopeError: They are the same.
    """
    is_one_run = base.trace.path.resolve() == new.trace.path.resolve()
    if is_one_run and base.choice == new.choice:
        raise OverlapScopeError(
            f"{base.name}: both sides are the same steps; choose some with --base-steps and --new-steps, "
            "or plans with --base-plan and --new-plan"
        )
    between_run_share = 0.0 if is_one_run else BETWEEN_RUN_SHARE
    job = [side.job_ns() for side in (base, new)]
    return Comparison(
        base=base,
        new=new,
        changes=compare_series(base.parts_ns(), new.parts_ns(), between_run_share=between_run_share),
        job=None
        if job[0] is None or job[1] is None
        else compare_series(job[0], job[1], between_run_share=between_run_share),
        buckets=compare_buckets(base, new, between_run_share=between_run_share),
        steps=find_most_different_steps(base, new, _MAX_STEPS),
        settings=compare_settings(base.trace, new.trace),
        unlike=explain_different_jobs(base.trace, new.trace),
    )
