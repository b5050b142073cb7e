"""Advice on the settings of ``fully_shard`` as sentences, and the settings as code."""

from __future__ import annotations

from collections.abc import Iterator

from overlapscope.interval import Interval
from overlapscope.sharded_model.changes import MIN_GAIN, ShardedAdvice, ShardingChange
from overlapscope.text import capitalize, count_of, format_bytes, format_ns, format_share, format_share_range

_PREFETCH = """\
for i, unit in enumerate(units):
    unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + {depth}])
    unit.set_modules_to_backward_prefetch(units[max(0, i - {depth}) : i][::-1])"""


def format_headline(advice: ShardedAdvice) -> str:
    """Say what to do, in one or two sentences."""
    best = advice.best
    if best is None:
        likely = max(advice.changes, key=lambda change: change.gain.value, default=None)
        if likely is None or likely.gain.value < MIN_GAIN:
            return f"Keep the settings: no other is predicted to gain {format_share(MIN_GAIN)} of the step."
        return (
            f"Can't tell yet: {describe_change(likely)} would change the {format_ns(advice.step_ns.value)} step by "
            f"{format_share_range(_as_change(likely))}."
        )
    return (
        f"{capitalize(describe_change(best))}: {format_ns(advice.step_ns.value)} → {format_ns(best.step_ns.value)} a "
        f"step (saves {format_share(best.gain.value)}, {format_memory(best)})."
    )


def _as_change(change: ShardingChange) -> Interval:
    gain = change.gain
    return Interval(value=-gain.value, low=-gain.high, high=-gain.low)


def describe_change(change: ShardingChange) -> str:
    """Say what is changed, without a full stop."""
    ahead = f"prefetch {change.depth} ahead" if change.depth else "prefetch by default"
    if change.kind == "async":
        return f"asynchronous, {ahead}" + ("" if any(change.settings.reshards) else ", not resharded")
    if change.kind == "prefetch":
        return ahead
    if change.kind == "reshard":
        return f"reshard_after_forward={any(change.settings.reshards)}"
    if change.kind == "mesh":
        return f"shards over {count_of(change.shards, 'rank')}"
    return "one unit in all" if change.kind == "whole" else f"{change.merged} units in one"


def format_memory(change: ShardingChange) -> str:
    """Say how much more memory gathered parameters take."""
    if not change.extra_bytes:
        return "same memory"
    return f"{format_bytes(abs(change.extra_bytes))} {'more' if change.extra_bytes > 0 else 'less'} memory"


def format_code(change: ShardingChange, advice: ShardedAdvice) -> str:
    """Return the change as code, for where the model is sharded."""
    names = [advice.model.parts[unit[0]].name for unit in advice.settings.units]
    units = f"units = [model.get_submodule(name) for name in {names}]"
    if change.kind == "reshard":
        return f"model.set_reshard_after_forward({any(change.settings.reshards)})"
    if change.kind == "whole":
        return "fully_shard(model)  # and no fully_shard of its modules"
    if change.kind == "wrap":
        grouped = f"for first in range(0, len(units), {change.merged}):\n    fully_shard(units[first : first + "
        return f"{units}\n{grouped}{change.merged}])\nfully_shard(model)"
    if change.kind == "mesh":
        shape = (advice.ranks // change.shards, change.shards)
        mesh = f"mesh = init_device_mesh(device_type, {shape}, mesh_dim_names=('replicate', 'shard'))"
        return f"{mesh}\nfully_shard(module, mesh=mesh)  # of each module"
    lines = [units, _PREFETCH.format(depth=change.depth)] if change.depth else []
    if change.kind == "async":
        lines.insert(0, "model._set_unshard_async_op(True)")
        if not any(change.settings.reshards):
            lines.insert(0, "model.set_reshard_after_forward(False)")
    return "\n".join(lines)


def list_assumptions(advice: ShardedAdvice) -> Iterator[str]:
    """Generate what the predictions take for granted, a sentence each."""
    if advice.blocks_host and not advice.peak_bytes:
        yield (
            "Over gloo torch waits for each all-reduce where it launches it, so none is hidden. "
            "DistributedDataParallel hides them under backward."
        )
    elif advice.blocks_host:
        yield (
            "Over gloo torch waits where it launches: prefetching hides nothing unless all-gathers are asynchronous, "
            "and reduce-scatters are never hidden. Asynchronous ones gain only where cores are left for gloo's threads."
        )
    else:
        yield (
            "The host is taken to be ahead of the device; then torch's default already gathers one unit ahead. "
            "Predictions for devices have not been held against measurements."
        )
    if any(change.kind == "mesh" for change in advice.changes):
        yield (
            "Another mesh is predicted with links that are all alike; gradients and optimizer states take more memory "
            "too, by the same factor as parameters."
        )
    yield f"The steps replayed with the recorded settings take {format_ns(advice.replayed_ns)}."
