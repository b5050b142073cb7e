"""Build the report of ``overlapscope compare``: is the new recording slower, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlapscope.breakdown.text import BLOCK_LABELS, REASON_LABELS
from overlapscope.compare.buckets import BucketChange
from overlapscope.compare.changes import Change, TimeDifference
from overlapscope.compare.comparison import Comparison
from overlapscope.compare.text import MIDDLE, describe_outcomes, describe_sides
from overlapscope.report.report import INDENT, Column, Figure, Report, Row, Section, Table
from overlapscope.text import Value


def build_comparison_report(found: Comparison, parts: Sequence[str], fail_above: float) -> Report:
    """Build the report of a comparison.

    Args:
        parts: Parts of the step that count.
        fail_above: As in ``Comparison.outcome``.
    """
    return Report(
        facts=tuple(describe_sides(found)),
        sections=(build_comparison_section(found, parts, fail_above),),
        content=_collect_content(found, parts, fail_above),
    )


def build_comparison_section(found: Comparison, parts: Sequence[str], fail_above: float) -> Section:
    """Build the one section: the outcome of each part, and the tables that show where the difference is."""
    outcomes = describe_outcomes(found, parts, fail_above)
    return Section(
        name="comparison",
        title="Comparison",
        headline=" ".join(outcomes),
        tables=_tabulate(found),
        figures=(Figure(kind="waterfall", table=_tabulate_waterfall(found)),),
    )


def _tabulate(found: Comparison) -> tuple[Table, ...]:
    """Return the non-empty tables: breakdown, buckets, the steps that differ most, and settings that differ."""
    return (
        _tabulate_blocks(found),
        *([_tabulate_buckets(found)] if found.buckets else []),
        *([_tabulate_steps(found)] if found.steps else []),
        *([_tabulate_settings(found)] if found.settings else []),
    )


def _tabulate_blocks(found: Comparison) -> Table:
    rows: list[Row] = []

    def add(label: str, change: Change, on_path: Change | None) -> None:
        mean, path = change.mean, on_path.mean if on_path else None
        if mean.base or mean.new or (path and (path.base or path.new)):
            rows.append({"label": label, **_difference_cells(found, mean), "critical_path": path.ns if path else None})

    for name, label in BLOCK_LABELS.items():
        add(label, found.changes[name], found.job[name] if found.job else None)
        if name == "exposed":
            for reason, text in REASON_LABELS.items():
                add(INDENT + text, found.changes[f"exposed_{reason}"], None)
    add("step", found.step, found.step)
    rows.append({"label": f"middle {MIDDLE} of steps", **_difference_cells(found, found.step.middle)})
    return Table(
        name="breakdown",
        title="Step-time breakdown, in milliseconds",
        columns=(
            Column("label", "", "text"),
            Column("base", "base", "ms"),
            Column("new", "new", "ms"),
            Column("difference", "difference", "ms change"),
            Column("difference", "99 % interval", "ms change range"),
            Column("share", "of the step", "share change"),
            *([Column("critical_path", "critical path", "ms change")] if found.job else []),
        ),
        rows=tuple(rows),
    )


def _difference_cells(found: Comparison, change: TimeDifference) -> dict[str, Value]:
    return {"base": change.base, "new": change.new, "difference": change.ns, "share": found.share(change.ns.value)}


def _tabulate_waterfall(found: Comparison) -> Table:
    """Tabulate the differences of the blocks that occur on any side, each from the end of the one before.

    Blocks that changed by +2 ms and -3 ms give rows from 0 to +2 ms and from +2 ms to -1 ms, and a row from 0 to
    -1 ms for the step.
    """
    rows: list[Row] = []
    now_ns = 0.0
    for name, label in BLOCK_LABELS.items():
        mean = found.changes[name].mean
        if mean.base or mean.new:
            rows.append({"block": name, "label": label, "from": now_ns, "difference": mean.ns})
            now_ns += mean.ns.value
    rows.append({"label": "step", "from": 0.0, "difference": found.step.mean.ns})
    return Table(
        name="waterfall",
        title="From the base to the new one, in milliseconds",
        columns=(
            Column("label", "", "text"),
            Column("from", "from", "ms change"),
            Column("difference", "difference", "ms change"),
            Column("difference", "99 % interval", "ms change range"),
        ),
        rows=tuple(rows),
    )


def _tabulate_buckets(found: Comparison) -> Table:
    return Table(
        name="buckets",
        title=f"Buckets in the middle {MIDDLE} of steps, in milliseconds",
        columns=(
            Column("bucket", "bucket", "text"),
            Column("bytes", "size", "bytes"),
            Column("base_transfer", "transfer: base", "ms"),
            Column("new_transfer", "new", "ms"),
            Column("transfer", "99 % interval", "ms change range"),
            Column("base_exposed", "exposed: base", "ms"),
            Column("new_exposed", "new", "ms"),
            Column("exposed", "99 % interval", "ms change range"),
        ),
        rows=tuple(
            {
                "bucket": _label_bucket(found, bucket),
                "bytes": bucket.new_bytes or bucket.base_bytes,
                **_middle_cells("transfer", bucket.transfer),
                **_middle_cells("exposed", bucket.exposed),
            }
            for bucket in found.buckets
        ),
    )


def _middle_cells(name: str, change: Change | None) -> dict[str, Value]:
    if change is None:
        return {}
    return {f"base_{name}": change.middle.base, f"new_{name}": change.middle.new, name: change.middle.ns}


def _label_bucket(found: Comparison, bucket: BucketChange) -> str:
    base, new = (", ".join(map(str, numbers)) or "none" for numbers in (bucket.base, bucket.new))
    model = f"model {bucket.model}: " if len({each.model for each in found.buckets}) > 1 else ""
    return model + (base if base == new else f"{base} → {new}")


def _tabulate_steps(found: Comparison) -> Table:
    return Table(
        name="steps",
        title="Steps that differ most, in milliseconds",
        columns=(
            Column("step", "step", "text"),
            Column("block", "mostly in", "text"),
            Column("base_block", "base", "ms"),
            Column("new_block", "new", "ms"),
            Column("base", "step: base", "ms"),
            Column("new", "new", "ms"),
            Column("difference", "difference", "ms change"),
        ),
        rows=tuple(
            {
                "step": str(pair.base_step)
                if pair.base_step == pair.new_step
                else f"{pair.base_step} → {pair.new_step}",
                "block": BLOCK_LABELS[pair.block],
                "base_block": pair.base_block_ns,
                "new_block": pair.new_block_ns,
                "base": pair.base_ns,
                "new": pair.new_ns,
                "difference": pair.new_ns - pair.base_ns,
            }
            for pair in found.steps
        ),
    )


def _tabulate_settings(found: Comparison) -> Table:
    return Table(
        name="settings",
        title="Settings and environment that differ",
        columns=(Column("name", "setting", "text"), Column("base", "base", "text"), Column("new", "new", "text")),
        rows=tuple({"name": each.name, "base": each.base, "new": each.new} for each in found.settings),
    )


def _collect_content(found: Comparison, parts: Sequence[str], fail_above: float) -> dict[str, Any]:
    return {
        "schema": 1,
        "sentences": describe_outcomes(found, parts, fail_above),
        "fail_above": fail_above,
        "outcomes": {part: found.outcome(part, fail_above) for part in parts},
        "unlike": found.unlike,
        **{
            name: {
                "path": str(side.trace.path),
                "choice": side.choice,
                "steps": len(side.steps),
                "ranks": side.summary.ranks,
                "excluded": side.summary.steady.excluded,
                "problems": side.trace.problems,
            }
            for name, side in (("base", found.base), ("new", found.new))
        },
        "parts": {name: _collect_change(found, change) for name, change in found.changes.items()},
        "critical_path": None
        if found.job is None
        else {name: _collect_change(found, change) for name, change in found.job.items()},
        "buckets": [
            {
                "model": bucket.model,
                "base": bucket.base,
                "new": bucket.new,
                "base_bytes": bucket.base_bytes,
                "new_bytes": bucket.new_bytes,
                "exposed": _collect_change(found, bucket.exposed),
                "transfer": None if bucket.transfer is None else _collect_change(found, bucket.transfer),
            }
            for bucket in found.buckets
        ],
        "steps": found.steps,
        "settings": found.settings,
    }


def _collect_change(found: Comparison, change: Change) -> dict[str, object]:
    mean, middle = (_collect_difference(found, each) for each in (change.mean, change.middle))
    return {"mean": mean, "middle": middle, "seen_ns": change.seen_ns}


def _collect_difference(found: Comparison, change: TimeDifference) -> dict[str, object]:
    return {
        "base_ns": change.base,
        "new_ns": change.new,
        "difference_ns": change.ns,
        "share": change.ns.times(1 / found.step.mean.base),
    }
