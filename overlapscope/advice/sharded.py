"""Advice on the settings of ``fully_shard`` from a recording: the model and its settings, as recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from overlapscope.advice.sharded_times import extract_step_times
from overlapscope.analysis import Analysis
from overlapscope.errors import OverlapScopeError
from overlapscope.sharded_model.changes import ShardedAdvice, advise_on_settings
from overlapscope.sharded_model.model import Part, Settings, ShardedModel
from overlapscope.trace.description import FULLY_SHARD, describe_strategies
from overlapscope.trace.recording import Trace
from overlapscope.trace.sharding import ShardedUnit, Sharding, find_sharding


def is_sharded(trace: Trace) -> bool:
    """Return whether the models of a recording were sharded by ``fully_shard``."""
    return describe_strategies(trace.run) == FULLY_SHARD


def advise_on_sharding(analysis: Analysis) -> ShardedAdvice:
    """Predict the step with other settings of ``fully_shard``.

    Raises:
        OverlapScopeError: The recording doesn't hold enough.
    """
    trace = analysis.trace
    model, settings, buckets = describe_model(trace)
    times, steps = extract_step_times(analysis, model, settings, buckets)
    return advise_on_settings(model, settings, times, steps=steps, step_ns=analysis.summary.mean.step)


def describe_model(trace: Trace) -> tuple[ShardedModel, Settings, tuple[int, ...]]:
    """Return the parts of the sharded model, its settings, and the bucket of each part.

    Raises:
        OverlapScopeError: It was recorded by a version that did not write settings, or several models are trained.
    """
    sharding = find_sharding(trace.run)
    if sharding is None or len(trace.run.get("models", ())) > 1:
        raise OverlapScopeError(
            f"{trace.path}: settings of fully_shard are predicted for one model, recorded with its settings: record "
            "it again with this version, alone"
        )
    collectives = trace.collectives
    rank, step = int(collectives["rank"].min()), _middle_step(collectives)
    seen = collectives[(collectives["rank"] == rank) & (collectives["step"] == step)].sort_values("launch_ns")
    order = _find_forward_order(sharding, seen)
    of_op = {
        op: dict(zip(rows["bucket"], rows["bytes"], strict=True)) for op, rows in seen.groupby("op", observed=True)
    }
    reduced = of_op.get("reduce_scatter") or of_op.get("all_reduce", {})
    reduced_order = seen.loc[seen["op"] == ("reduce_scatter" if "reduce_scatter" in of_op else "all_reduce"), "bucket"]
    late = _find_late(sharding, reduced_order.tolist())
    parts = tuple(
        Part(
            name=sharding.units[bucket].module,
            gather_bytes=int(of_op.get("all_gather", {}).get(bucket, 0)),
            reduce_bytes=int(reduced.get(bucket, 0)),
            parent=_find_parent(sharding, order, bucket),
            is_late=bucket in late,
        )
        for bucket in order
    )
    has_root = bool(order) and sharding.units[order[0]].is_root
    return ShardedModel(parts=parts, has_root=has_root), _read_settings(sharding, order, has_root=has_root), order


def _middle_step(collectives: pd.DataFrame) -> int:
    steps = np.unique(collectives["step"])
    return int(steps[len(steps) // 2])


def _find_forward_order(sharding: Sharding, seen: pd.DataFrame) -> tuple[int, ...]:
    """Return the buckets in the order in which the forward needs them, the root's first.

    It is that of the first gathers or, without gathers, the reverse of their numbers.
    """
    gathered = seen.loc[seen["op"] == "all_gather", "bucket"].drop_duplicates().tolist()
    order = [int(bucket) for bucket in gathered]
    order += [bucket for bucket in range(len(sharding.units) - 1, -1, -1) if bucket not in order]
    return tuple(sorted(order, key=lambda bucket: not sharding.units[bucket].is_root))


def _find_parent(sharding: Sharding, order: Sequence[int], bucket: int) -> int | None:
    """Return the number of the part whose module holds a bucket's; None if that is the model."""
    name = sharding.units[bucket].module
    holders = [
        number
        for number, other in enumerate(order)
        if sharding.units[other].module and name.startswith(f"{sharding.units[other].module}.")
    ]
    return max(holders, key=lambda number: len(sharding.units[order[number]].module), default=None)


def _find_late(sharding: Sharding, reduced: Sequence[int]) -> set[int]:
    """Return the buckets that are reduced after the root's own."""
    roots = [index for index, bucket in enumerate(reduced) if sharding.units[bucket].is_root]
    return set(reduced[roots[0] + 1 :]) if roots else set()


def _read_settings(sharding: Sharding, order: Sequence[int], *, has_root: bool) -> Settings:
    inner = order[int(has_root) :]
    number_of = {bucket: number for number, bucket in enumerate(inner)}
    units = [sharding.units[bucket] for bucket in inner]

    def numbers(buckets: Sequence[int]) -> tuple[int, ...]:
        return tuple(number_of[bucket] for bucket in buckets if bucket in number_of)

    def numbers_in_backward(unit: ShardedUnit) -> tuple[int, ...] | None:
        return None if unit.backward_prefetch is None else numbers(unit.backward_prefetch)

    settings = Settings(
        units=tuple((number + int(has_root),) for number in range(len(inner))),
        reshards=tuple(unit.reshards for unit in units),
        is_async=any(unit.is_async for unit in sharding.units),
        forward_prefetch=tuple(numbers(unit.forward_prefetch) for unit in units),
        backward_prefetch=tuple(map(numbers_in_backward, units)),
    )
    if not has_root:
        return settings
    root = sharding.units[order[0]]
    return replace(
        settings,
        root_forward_prefetch=numbers(root.forward_prefetch),
        root_backward_prefetch=numbers_in_backward(root),
        root_reshards=root.reshards,
    )
