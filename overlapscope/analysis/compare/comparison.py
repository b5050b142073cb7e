"""Comparison of two sides: what differs, what is a regression, and what could have been detected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from overlapscope.analysis.compare.buckets import BucketChange, bucket_changes
from overlapscope.analysis.compare.changes import RUNS_DIFFER, Change, changes_between
from overlapscope.analysis.compare.settings import SettingChange, setting_changes, unlike
from overlapscope.analysis.compare.side import STEP, Side
from overlapscope.analysis.compare.steps import StepPair, steps_that_differ_most
from overlapscope.errors import OverlapScopeError

Outcome = Literal["slower", "slower, but not surely enough", "faster", "no difference seen"]

_MOST_STEPS: Final = 5


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """Differences between two sides."""

    base: Side
    new: Side
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


def compare(base: Side, new: Side) -> Comparison:
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
    runs_differ = 0.0 if is_one_run else RUNS_DIFFER
    job = [side.job_ns() for side in (base, new)]
    return Comparison(
        base=base,
        new=new,
        changes=changes_between(base.parts_ns(), new.parts_ns(), runs_differ=runs_differ),
        job=None if job[0] is None or job[1] is None else changes_between(job[0], job[1], runs_differ=runs_differ),
        buckets=bucket_changes(base, new, runs_differ=runs_differ),
        steps=steps_that_differ_most(base, new, _MOST_STEPS),
        settings=setting_changes(base.trace, new.trace),
        unlike=unlike(base.trace, new.trace),
    )
