"""Build the report of ``overlapscope recommend`` for models that ``fully_shard`` has sharded."""

from __future__ import annotations

from typing import Any

from overlapscope.report.report import Column, Report, Row, Section, Table
from overlapscope.sharded_model import text
from overlapscope.sharded_model.changes import ShardedAdvice, ShardingChange
from overlapscope.text import count_of, format_bytes
from overlapscope.trace.recording import Trace


def build_sharded_report(trace: Trace, advice: ShardedAdvice) -> Report:
    """Build the report from the advice on a recording."""
    basis = f"{count_of(len(advice.steps), 'step')} of {count_of(advice.ranks, 'rank')}"
    units = count_of(len(advice.model.parts), "unit")
    gathered = f", at most {format_bytes(advice.peak_bytes)} of them gathered" if advice.peak_bytes else ""
    return Report(
        facts=(f"{trace.path}: {basis}, {units}{gathered}",),
        sections=(build_sharded_section(advice),),
        content={
            "schema": 1,
            "path": str(trace.path),
            "steps": advice.steps,
            "world_size": advice.ranks,
            "step_ns": advice.step_ns,
            "replayed_ns": advice.replayed_ns,
            "peak_bytes": advice.peak_bytes,
            "verdict": "keep" if advice.best is None else "change",
            "changes": [_content(change, advice) for change in advice.changes],
            "units": advice.exposed,
            "sentences": [text.format_headline(advice), *text.list_assumptions(advice)],
            "problems": trace.problems,
        },
    )


def _content(change: ShardingChange, advice: ShardedAdvice) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "depth": change.depth,
        "merged": change.merged,
        "shards": change.shards,
        "step_ns": change.step_ns,
        "gain": change.gain,
        "extra_bytes": change.extra_bytes,
        "code": text.format_code(change, advice),
    }


def build_sharded_section(advice: ShardedAdvice) -> Section:
    """Build the section: what to set, what each change would gain, and what each unit's communication costs."""
    return Section(
        name="sharding",
        title="Sharding",
        headline=text.format_headline(advice),
        preformatted="" if advice.best is None else text.format_code(advice.best, advice),
        notes=tuple(text.list_assumptions(advice)),
        tables=(_tabulate_changes(advice), _tabulate_units(advice)),
    )


def _tabulate_changes(advice: ShardedAdvice) -> Table:
    rows: list[Row] = [{"change": "as recorded", "step": advice.step_ns}]
    rows += [
        {
            "change": text.describe_change(change),
            "step": change.step_ns,
            "gain": change.gain.value,
            "memory": text.format_memory(change).removesuffix(" memory"),
        }
        for change in advice.changes
    ]
    return Table(
        name="changes",
        title="What if: the predicted mean step",
        columns=(
            Column("change", "", "text"),
            Column("step", "step", "ns"),
            Column("step", "90 % interval", "ns range"),
            Column("gain", "saves", "share"),
            Column("memory", "memory", "text"),
        ),
        rows=tuple(rows),
    )


def _tabulate_units(advice: ShardedAdvice) -> Table:
    return Table(
        name="units",
        title="Cost of each unit's communication, in milliseconds a step",
        columns=(
            Column("unit", "", "text"),
            Column("bytes", "size", "bytes"),
            Column("forward", "gather, forward", "ms"),
            Column("backward", "gather, backward", "ms"),
            Column("reduce", "reduce", "ms"),
        ),
        rows=tuple(
            {
                "unit": unit.name or "the model's own",
                "bytes": unit.bytes,
                "forward": unit.forward_gather_ns,
                "backward": unit.backward_gather_ns,
                "reduce": unit.reduce_ns,
            }
            for unit in advice.exposed
        ),
        notes=("Cost: what the step would save if this took no time once all ranks are there.",),
    )
