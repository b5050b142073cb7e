"""Output of ``overlapscope stragglers``: text and JSON."""

from __future__ import annotations

from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from overlapscope.analysis import Analysis
from overlapscope.breakdown.means import MeanStep
from overlapscope.report.json import json_text
from overlapscope.stragglers.finding import Finding
from overlapscope.stragglers.stragglers import Stragglers
from overlapscope.stragglers.text import (
    PART_LABELS,
    describe,
    describe_equal_ranks,
    describe_missing_ranks,
    describe_verdict,
    explain_missing_stragglers,
)
from overlapscope.stragglers.transfers import measure_link_rates
from overlapscope.text import format_bytes, format_interval_ns, format_ns, format_share
from overlapscope.trace.description import describe_chosen_steps

_MIN_WIDTH: Final = 80
_MAX_RANKS: Final = 12
"""Number of ranks in the text; of more, it shows the most expensive."""


def print_text(analysis: Analysis) -> None:
    """Print the findings and their evidence as text to stdout."""
    trace, stragglers = analysis.trace, analysis.stragglers
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _MIN_WIDTH)
    if stragglers is None:
        reason = explain_missing_stragglers(trace)
        console.print(f"{trace.path}: {reason.message} {reason.advice}", markup=False)
        return
    console.print(_facts(analysis, stragglers), markup=False)
    if missing_ranks := describe_missing_ranks(stragglers.cycles):
        console.print(missing_ranks, markup=False)
    console.print()
    console.print(describe_verdict(stragglers), style="bold", markup=False)
    for finding in stragglers.findings:
        if finding is not stragglers.findings[0]:
            console.print(describe(finding), markup=False)
        console.print(f"  Evidence: {finding.pattern.statistic}.", markup=False)
        console.print(f"  Look at step {finding.worst_step}. {_gain(finding)}", markup=False)
    console.print("\nWhat if: the mean step")
    console.print(_what_if_table(stragglers))
    console.print("Cost of each rank alone, in milliseconds a step")
    console.print(_rank_table(stragglers))
    console.print("Cost of each phase, on all ranks together, and of each bucket's transfer")
    console.print(_cause_table(stragglers))
    console.print(_bucket_table(stragglers))


def as_json(analysis: Analysis) -> str:
    """Format the complete findings as JSON; the keys are documented in ``docs/json.md``."""
    trace, stragglers = analysis.trace, analysis.stragglers
    content: dict[str, Any] = {
        "schema": 1,
        "path": str(trace.path),
        "ranks": trace.aligned_ranks,
        "clock_error_ns": trace.clock_error_ns,
        "reason": explain_missing_stragglers(trace).message if stragglers is None else None,
        "problems": trace.problems,
    }
    if stragglers is not None:
        content |= {
            "steps": len(stragglers.cycles.steps),
            "steps_left_out": stragglers.cycles.left_out,
            "sentence": describe_verdict(stragglers),
            "step_ns": analysis.summary.mean.step,
            "waiting_ns": stragglers.waiting,
            "what_if": {
                "all_ranks_like_the_median": _saving(stragglers.saved_if_ranks_equal),
                "all_reduces_at_their_best": _saving(stragglers.saved_by_best_transfers),
            },
            "findings": [_finding(finding) for finding in stragglers.findings],
            "by_rank": stragglers.by_rank.to_dict("records"),
            "by_host": stragglers.by_host.to_dict("records"),
            "by_cause": stragglers.by_cause.to_dict("records"),
            "by_bucket": stragglers.by_bucket.to_dict("records"),
            "links": measure_link_rates(trace).to_dict("records"),
        }
    return json_text(content)


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "sentence": describe(finding),
        "ranks": list(finding.ranks),
        "host": finding.host,
        "link": finding.link,
        "cause": finding.cause,
        "parts_ns": finding.parts_ns,
        "pattern": finding.pattern.kind,
        "period": finding.pattern.period,
        "statistic": finding.pattern.statistic,
        "p_value": finding.pattern.p_value,
        "first_step": int(finding.steps[0]),
        "last_step": int(finding.steps[-1]),
        "delayed_steps": len(finding.steps),
        "worst_step": finding.worst_step,
        "delay_ns": finding.delay_ns,
        "cost_ns": finding.cost,
        "cost_share": finding.cost_share,
        "saving": _saving(finding.saving),
    }


def _saving(saving: MeanStep) -> dict[str, Any]:
    return {"step_ns": saving.step, "blocks_ns": saving.present}


def _facts(analysis: Analysis, stragglers: Stragglers) -> str:
    cycles = stragglers.cycles
    clocks = "on one clock" if not cycles.clock_error_ns else f"on clocks within {format_ns(cycles.clock_error_ns)}"
    count, trace = cycles.left_out, analysis.trace
    left_out = f", {count} step{'s' * (count > 1)} left out" if count else ""
    what = f"{len(cycles.steps)} steps{describe_chosen_steps(trace)} of {len(cycles.ranks)} ranks {clocks}"
    return f"{trace.path}: {what}{left_out}"


def _gain(finding: Finding) -> str:
    return f"Fixing this alone would save {format_ns(finding.saving.step.value)} a step."


def _what_if_table(stragglers: Stragglers) -> Table:
    table = _table("", "step time", "saves", "90 %", "share")
    recorded_ns = stragglers.step_time_ns
    table.add_row("as recorded", format_ns(recorded_ns))
    for label, saving in (
        (describe_equal_ranks(stragglers.cycles), stragglers.saved_if_ranks_equal.step),
        ("all-reduces at their best", stragglers.saved_by_best_transfers.step),
    ):
        saves = format_ns(saving.value), format_interval_ns(saving), format_share(saving.value / recorded_ns)
        table.add_row(label, format_ns(recorded_ns - saving.value), *saves)
    return table


def _rank_table(stragglers: Stragglers) -> Table:
    table = _table("", "lateness", "critical path", "cost", "slowdown", "saving")
    rows = stragglers.by_rank.sort_values("cost_ns", ascending=False)
    for row in rows.head(_MAX_RANKS).to_dict("records"):
        cells = (f"{row['lateness_ns'] / 1e6:+.2f}", format_share(row["critical_share"]), f"{row['cost_ns'] / 1e6:.2f}")
        table.add_row(f"rank {row['rank']}", *cells, format_share(row["slowdown"]), f"{row['saving_ns'] / 1e6:.2f}")
    if len(rows) > _MAX_RANKS:
        table.caption = f"{len(rows) - _MAX_RANKS} more ranks cost less: --json"
    return table


def _cause_table(stragglers: Stragglers) -> Table:
    table = _table("", "cost", "slowdown")
    for row in stragglers.by_cause.to_dict("records"):
        table.add_row(PART_LABELS[row["cause"]], f"{row['cost_ns'] / 1e6:.2f}", format_share(row["slowdown"]))
    return table


def _bucket_table(stragglers: Stragglers) -> Table:
    table = _table("", "size", "transfer", "best", "busbw", "cost", "slowdown")
    for row in stragglers.by_bucket.to_dict("records"):
        table.add_row(
            f"bucket {row['bucket']}" if row["bucket"] >= 0 else "no bucket",
            format_bytes(row["bytes"]),
            f"{row['transfer_ns'] / 1e6:.2f}",
            f"{row['best_ns'] / 1e6:.2f}",
            f"{row['busbw_bytes_per_s'] / 1e9:.3g} GB/s",
            f"{row['cost_ns'] / 1e6:.2f}",
            format_share(row["slowdown"]),
        )
    return table


def _table(label: str, *headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    table.add_column(label, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
