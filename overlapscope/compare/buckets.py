"""Differences between the buckets of two sides, aligned by the parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from overlapscope.breakdown.spans import Float64Array
from overlapscope.compare.changes import Change, compare_series
from overlapscope.compare.side import ComparisonSide

Bucket = tuple[int, int]
"""Number of the model, and number of the bucket."""


@dataclass(frozen=True, kw_only=True)
class BucketChange:
    """The buckets of both sides that hold the same parameters: one each, unless plans differ."""

    model: int
    base: tuple[int, ...]
    """Numbers of the buckets of the base; empty if it has none with these parameters."""
    new: tuple[int, ...]
    """The same for the new side."""
    base_bytes: int
    new_bytes: int
    exposed: Change
    """Time for which ranks wait for them."""
    transfer: Change | None
    """Time of their all-reduces after all ranks have arrived; None if times of ranks can't be compared."""


def compare_buckets(base: ComparisonSide, new: ComparisonSide, *, between_run_share: float) -> tuple[BucketChange, ...]:
    """Compare buckets in the order of the new side; where plans differ, groups that cover the same parameters.

    Args:
        between_run_share: As in ``compare_series``.
    """
    contents = [_contents(side) for side in (base, new)]
    groups = _groups(contents)
    if not groups:
        return ()
    sides = list(enumerate((base, new)))
    sums = (_sums(side, _exposed_ns(side), groups, index) for index, side in sides)
    exposed = compare_series(*sums, between_run_share=between_run_share)
    transfers_ns = [_transfer_ns(side) for _, side in sides]
    transfer: dict[str, Change] = {}
    if all(transfers_ns):
        sums = (_sums(side, transfers_ns[index], groups, index) for index, side in sides)
        transfer = compare_series(*sums, between_run_share=between_run_share)
    found = []
    for index, group in enumerate(groups):
        own, other = group.of_side
        found.append(
            BucketChange(
                model=min(own | other)[0],
                base=tuple(sorted(number for _, number in own)),
                new=tuple(sorted(number for _, number in other)),
                base_bytes=sum(contents[0][each].bytes for each in own),
                new_bytes=sum(contents[1][each].bytes for each in other),
                exposed=exposed[str(index)],
                transfer=transfer.get(str(index)),
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Content:
    """Size and parameters of a bucket."""

    bytes: int
    parameters: frozenset[str]
    """Names; if unknown, one placeholder for all."""


@dataclass(kw_only=True)
class _Group:
    """Buckets of both sides that hold the same parameters, directly or through other buckets."""

    parameters: set[tuple[int, str]]
    """Numbers of models, and names."""
    of_side: tuple[set[Bucket], set[Bucket]]
    """Buckets of the base, and buckets of the new side."""

    def merge(self, other: _Group) -> None:
        """Merge another group into this one."""
        self.parameters |= other.parameters
        for own, its in zip(self.of_side, other.of_side, strict=True):
            own |= its


def _contents(side: ComparisonSide) -> dict[Bucket, _Content]:
    """Return the buckets that are reduced in the steps of a side."""
    table = side.trace.collectives
    reduced = table[(table["bucket"] >= 0) & table["step"].isin(side.steps)]
    plans = side.trace.plans.groupby(["model", "plan_epoch", "bucket"])["name"].agg(frozenset).to_dict()
    latest = reduced.drop_duplicates(["model", "bucket"], keep="last")
    columns = ("model", "bucket", "plan_epoch", "bytes")
    return {
        (model, bucket): _Content(
            bytes=size, parameters=plans.get((model, epoch, bucket)) or frozenset({f"bucket {bucket}"})
        )
        for model, bucket, epoch, size in zip(*(latest[name].astype(int).tolist() for name in columns), strict=True)
    }


def _groups(contents: Sequence[dict[Bucket, _Content]]) -> list[_Group]:
    """Group buckets that share parameters, in the order of the new side.

    Example: if the base has bucket 0 with a, b and bucket 1 with c, and the new side has bucket 0 with a and bucket 1
    with b, c, all four buckets are one group.

    Args:
        contents: Buckets of the base, and of the new side.
    """
    groups: list[_Group] = []
    for index, side in enumerate(contents):
        for bucket, content in side.items():
            merged = _Group(parameters={(bucket[0], name) for name in content.parameters}, of_side=(set(), set()))
            merged.of_side[index].add(bucket)
            for group in [each for each in groups if each.parameters & merged.parameters]:
                groups.remove(group)
                merged.merge(group)
            groups.append(merged)
    return sorted(groups, key=lambda group: min(group.of_side[1] or group.of_side[0]))


def _exposed_ns(side: ComparisonSide) -> dict[Bucket, Float64Array]:
    """Return the exposed time of each bucket (S,), as the mean of all ranks."""
    breakdown, steady = side.breakdown, side.summary.steady
    table = side.trace.collectives.iloc[breakdown.waits.collective]
    return _by_bucket(
        side,
        step=breakdown.step[breakdown.wait_row],
        model=table["model"],
        bucket=table["bucket"],
        ns=np.where(np.isin(breakdown.rank[breakdown.wait_row], steady.ranks), breakdown.wait_ns, 0)
        / len(steady.ranks),
    )


def _transfer_ns(side: ComparisonSide) -> dict[Bucket, Float64Array]:
    """Return the transfer time of each bucket (S,); empty if times of some ranks can't be compared."""
    matched = side.breakdown.matched
    if not len(matched.rows) or set(matched.ranks.tolist()) != set(side.summary.steady.ranks.tolist()):
        return {}
    return _by_bucket(
        side,
        step=matched.step,
        model=side.trace.collectives["model"].iloc[matched.rows[:, 0]],
        bucket=matched.bucket,
        ns=(matched.end_ns - matched.find_last()[0]).mean(axis=1),
    )


def _by_bucket(
    side: ComparisonSide, *, step: Iterable[int], model: Iterable[int], bucket: Iterable[int], ns: Float64Array
) -> dict[Bucket, Float64Array]:
    """Sum times by bucket and step; times of other steps or of no bucket are dropped."""
    rows = pd.DataFrame({"step": np.asarray(step), "model": np.asarray(model), "bucket": np.asarray(bucket), "ns": ns})
    sums = rows[rows["bucket"] >= 0].groupby(["model", "bucket", "step"])["ns"].sum()
    found = {}
    for key, of_bucket in sums.groupby(level=["model", "bucket"]):
        model_number, number = (int(each) for each in key)  # type: ignore[union-attr]
        by_step = of_bucket.droplevel(["model", "bucket"]).reindex(side.steps, fill_value=0.0)
        found[model_number, number] = by_step.to_numpy(np.float64)
    return found


def _sums(
    side: ComparisonSide, ns: dict[Bucket, Float64Array], groups: list[_Group], index: int
) -> dict[str, Float64Array]:
    """Return the sum over the buckets of each group on one side (S,), by group number; 0 if it has none there."""
    nothing = np.zeros(len(side.steps))
    return {
        str(number): np.sum([nothing, *(ns[each] for each in group.of_side[index] if each in ns)], axis=0)
        for number, group in enumerate(groups)
    }
