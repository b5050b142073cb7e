"""Comparison of two sides: what differs, what is a regression, and what could have been detected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from overlapscope.analysis.compare.buckets import BucketChange, compare_buckets
from overlapscope.analysis.compare.changes import BETWEEN_RUN_SHARE, Change, compare_series
from overlapscope.analysis.compare.settings import SettingChange, compare_settings, explain_different_jobs
from overlapscope.analysis.compare.side import STEP, ComparisonSide
from overlapscope.analysis.compare.steps import StepPair, find_most_different_steps
from overlapscope.errors import OverlapScopeError

Outcome = Literal["slower", "slower, but not surely enough", "faster", "no difference seen"]

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
        return "faster" if any(each.is_shorter for each in both) else "no difference seen"


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
