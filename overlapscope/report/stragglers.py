"""Build the report of ``overlapscope stragglers``: which ranks make the others wait, why, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.breakdown.means import MeanStep
from overlapscope.report.communication import build_communication_sections
from overlapscope.report.report import Column, Number, Report, Row, Section, Table, list_rows
from overlapscope.stragglers.finding import Finding
from overlapscope.stragglers.stragglers import Stragglers
from overlapscope.stragglers.text import (
    CAUSE_LABELS,
    PART_LABELS,
    describe,
    describe_equal_ranks,
    describe_equalized_rank,
    describe_machine,
    describe_missing_ranks,
    describe_saving,
    describe_verdict,
    describe_when,
    explain_missing_stragglers,
    name_culprit,
)
from overlapscope.stragglers.transfers import measure_link_rates
from overlapscope.text import capitalize, count_of, format_ns, format_share
from overlapscope.trace.description import describe_chosen_steps

_SHOWN_RANKS: Final = 12
"""Number of ranks that a terminal shows; of more, the most expensive."""
_BEST: Final = {
    False: "Best: a low quantile of the transfers that found the link idle; others may have begun behind another one.",
    True: "Best: a low quantile of the transfers, from the last arrival or the end of the one before.",
}
"""How the best transfer is found, by whether all-reduces run one by one."""
_BEST_TRANSFERS: Final = {False: "all-reduces at their best", True: "communication at its best"}
"""Labels by whether ranks wait for each other several times in a step."""


def build_stragglers_report(analysis: Analysis) -> Report:
    """Build the report from the analysis of a recording; if ranks can't be compared, it says why."""
    trace, stragglers = analysis.trace, analysis.stragglers
    content: dict[str, Any] = {
        "schema": 1,
        "path": str(trace.path),
        "ranks": trace.aligned_ranks,
        "clock_error_ns": trace.clock_error_ns,
        "reason": explain_missing_stragglers(trace).message if stragglers is None else None,
        "problems": trace.problems,
    }
    if stragglers is None:
        reason = explain_missing_stragglers(trace)
        facts = (f"{trace.path}: {reason.headline}.",)
        section = Section(
            name="stragglers",
            title="Stragglers",
            headline=reason.message,
            actions=(reason.advice,) * bool(reason.advice),
        )
    else:
        facts = (f"{trace.path}: {describe_basis(analysis, stragglers)}",)
        section = build_stragglers_section(stragglers)
        content |= _collect_content(analysis, stragglers)
    found = analysis.summary.imported or analysis.summary.own
    tells_last = found is not None and any(one.last_ranks for one in found.groups)
    arrivals = build_communication_sections(analysis.summary) if tells_last else ()
    return Report(facts=facts, sections=(section, *arrivals), content=content)


def build_stragglers_section(stragglers: Stragglers) -> Section:
    """Build the section on stragglers: findings with their evidence, and what each rank, phase and bucket costs."""
    return Section(
        name="stragglers",
        title="Stragglers",
        headline=describe_verdict(stragglers),
        basis=describe_missing_ranks(stragglers.cycles),
        notes=tuple(_describe_findings(stragglers)),
        tables=(
            _tabulate_what_ifs(stragglers),
            _tabulate_ranks(stragglers),
            *([_tabulate_hosts(stragglers)] if len(stragglers.by_host) > 1 else []),
            _tabulate_phases(stragglers),
            *([_tabulate_buckets(stragglers)] if len(stragglers.by_bucket) else []),
        ),
        numbers=tuple(_list_numbers(stragglers)),
    )


def tabulate_findings(stragglers: Stragglers) -> Table:
    """Tabulate the findings, for where there is room for more than their sentences."""
    return Table(
        name="findings",
        title="Who the others wait for",
        columns=(
            Column("who", "", "text"),
            Column("why", "why, and the evidence", "text"),
            Column("delay", "later by", "ns"),
            Column("saves", "saves if fixed", "text"),
            Column("worst_step", "worst step", "count"),
        ),
        rows=tuple(
            {
                "who": _label_culprit(finding),
                "why": f"{CAUSE_LABELS[finding.cause]} {describe_when(finding)}",
                "evidence": " ".join((f"{finding.pattern.statistic}.", *describe_machine(finding)))
                if finding.machine
                else finding.pattern.statistic,
                "delay": finding.delay_ns if finding.lateness_ns is None else finding.lateness_ns,
                "saves": describe_saving(finding),
                "saving_share": max(0.0, finding.saving_share),
                "worst_step": finding.worst_step,
                "rank": finding.ranks[0] if finding.ranks else None,
            }
            for finding in stragglers.findings
        ),
    )


def _label_culprit(finding: Finding) -> str:
    """Return the late ranks or the slow link of a finding, short enough for a table."""
    if finding.link is not None:
        return f"Link {finding.link.rank} → {finding.link.peer_rank}"
    return capitalize(name_culprit(finding))


def _list_numbers(stragglers: Stragglers) -> Iterator[Number]:
    """Generate the step time as recorded, and as it would be with what is late fixed."""
    step_ns = stragglers.step_time_ns
    yield Number(key="step", label="Step time", value=step_ns, unit="ns", note="as recorded")
    for key, label, saved_ns in (
        *_find_fix(stragglers),
        ("equal_ranks", describe_equal_ranks(stragglers.cycles), stragglers.saved_if_ranks_equal.step.value),
        (
            "best_transfers",
            _BEST_TRANSFERS[stragglers.cycles.has_inner_waits],
            stragglers.saved_by_best_transfers.step.value,
        ),
    ):
        saving = f"saves {format_ns(saved_ns)}, {format_share(saved_ns / step_ns)}"
        yield Number(
            key=key,
            label=capitalize(label),
            value=step_ns - saved_ns,
            unit="ns",
            note=saving if saved_ns >= 1 else "saves nothing",
        )


def _find_fix(stragglers: Stragglers) -> Iterator[tuple[str, str, float]]:
    """Generate key, label and saving of the link or rank to fix first; nothing unless the headline stands for it."""
    findings, suspect = stragglers.findings, stragglers.suspect
    if findings and findings[0].link:
        yield "fixed", f"{_label_culprit(findings[0])} like the others", findings[0].saving.step.value
        return
    late_ranks = {rank for finding in findings for rank in finding.ranks} | ({suspect.rank} if suspect else set())
    best = stragglers.by_rank.iloc[int(stragglers.by_rank["saving_ns"].to_numpy().argmax())]
    if int(best["rank"]) in late_ranks:
        yield "fixed", describe_equalized_rank(int(best["rank"]), stragglers.cycles), float(best["saving_ns"])


def describe_basis(analysis: Analysis, stragglers: Stragglers) -> str:
    """Name the steps and ranks that findings compare, and how well clocks agree."""
    cycles = stragglers.cycles
    clocks = "on one clock" if not cycles.clock_error_ns else f"on clocks within {format_ns(cycles.clock_error_ns)}"
    why = "warm-up and the step after it, all-reduces that differ"
    left_out = f", {count_of(cycles.left_out, 'step')} left out ({why})" if cycles.left_out else ""
    chosen = describe_chosen_steps(analysis.trace)
    return f"{count_of(len(cycles.steps), 'step')}{chosen} of {len(cycles.ranks):,} ranks {clocks}{left_out}"


def _describe_findings(stragglers: Stragglers) -> Iterator[str]:
    for finding in stragglers.findings:
        if finding is not stragglers.findings[0]:
            yield describe(finding)
        yield f"  Evidence: {finding.pattern.statistic}."
        yield from (f"  Machine: {sentence}" for sentence in describe_machine(finding))
        yield f"  Look at step {finding.worst_step}."


def _tabulate_what_ifs(stragglers: Stragglers) -> Table:
    recorded_ns = stragglers.step_time_ns
    cases = (
        (describe_equal_ranks(stragglers.cycles), stragglers.saved_if_ranks_equal.step),
        (_BEST_TRANSFERS[stragglers.cycles.has_inner_waits], stragglers.saved_by_best_transfers.step),
    )
    rows: list[Row] = [{"case": "as recorded", "step": recorded_ns}]
    for case, saves in cases:
        share = saves.value / recorded_ns
        rows.append({"case": case, "step": recorded_ns - saves.value, "saving": saves, "share": share})
    return Table(
        name="what_if",
        title="What if: the mean step",
        columns=(
            Column("case", "", "text"),
            Column("step", "step time", "ns"),
            Column("saving", "saves", "ns"),
            Column("saving", "90 % interval", "ns range"),
            Column("share", "share", "share"),
        ),
        rows=tuple(rows),
    )


def _tabulate_ranks(stragglers: Stragglers) -> Table:
    has_hosts = len(stragglers.by_host) > 1
    return Table(
        name="by_rank",
        title="Lateness and saving of each rank, in milliseconds a step",
        columns=(
            Column("rank", "", "rank"),
            *([Column("host", "host", "text")] if has_hosts else []),
            Column("lateness_ns", "lateness", "ms change"),
            Column("saving_ns", "saving", "ms"),
            Column("critical_share", "critical path", "share"),
        ),
        rows=_list_by_saving(stragglers.by_rank),
        shown=_SHOWN_RANKS,
        notes=(
            f"Lateness: of its last arrival, against {_name_reference(stragglers)}. "
            f"Saving: this rank alone as fast as {_name_reference(stragglers)}.",
        ),
    )


def _tabulate_hosts(stragglers: Stragglers) -> Table:
    return Table(
        name="by_host",
        title="Saving of each host, in milliseconds a step",
        columns=(
            Column("host", "", "text"),
            Column("ranks", "ranks", "text"),
            Column("saving_ns", "saving", "ms"),
        ),
        rows=_list_by_saving(stragglers.by_host),
        shown=_SHOWN_RANKS,
        notes=("Saving: all ranks of this host, and no others, as fast as the median rank.",),
    )


def _tabulate_phases(stragglers: Stragglers) -> Table:
    return Table(
        name="by_phase",
        title="Saving of each phase, in milliseconds a step",
        columns=(
            Column("label", "", "text"),
            Column("saving_ns", "saving", "ms"),
        ),
        rows=tuple(row | {"label": PART_LABELS[row["cause"]]} for row in _list_by_saving(stragglers.by_cause)),
        notes=("Saving: all ranks alike in this phase, and otherwise as recorded.",),
    )


def _tabulate_buckets(stragglers: Stragglers) -> Table:
    return Table(
        name="by_bucket",
        title="Saving of each bucket's transfer, in milliseconds a step",
        columns=(
            Column("label", "", "text"),
            Column("bytes", "size", "bytes"),
            Column("transfer_ns", "transfer", "ms"),
            Column("best_ns", "best", "ms"),
            Column("busbw_bytes_per_s", "busbw", "bytes/s"),
            Column("saving_ns", "saving", "ms"),
        ),
        rows=tuple(
            row | {"label": f"bucket {row['bucket']}" if row["bucket"] >= 0 else "no bucket"}
            for row in _list_by_saving(stragglers.by_bucket)
        ),
        notes=(
            _BEST[stragglers.cycles.is_serial],
            "Saving: the transfers of this bucket at their best, and otherwise as recorded.",
        ),
    )


def _list_by_saving(frame: pd.DataFrame) -> tuple[dict[str, Any], ...]:
    """Return the rows of a table, the largest saving first; of ranks that save as much, the latest."""
    order = [name for name in ("saving_ns", "lateness_ns") if name in frame]
    return tuple(list_rows(frame.sort_values(order, ascending=False, kind="stable")))


def _name_reference(stragglers: Stragglers) -> str:
    """Name the rank that ranks are compared with; of two it is the faster one."""
    return "the faster one" if len(stragglers.cycles.ranks) == 2 else "the median rank"


def _collect_content(analysis: Analysis, stragglers: Stragglers) -> dict[str, Any]:
    return {
        "steps": len(stragglers.cycles.steps),
        "steps_left_out": stragglers.cycles.left_out,
        "sentence": describe_verdict(stragglers),
        "step_ns": analysis.summary.mean.step,
        "waiting_ns": stragglers.waiting,
        "what_if": {
            "all_ranks_like_the_median": _collect_saving(stragglers.saved_if_ranks_equal),
            "all_reduces_at_their_best": _collect_saving(stragglers.saved_by_best_transfers),
        },
        "suspect": stragglers.suspect,
        "findings": [_collect_finding(finding) for finding in stragglers.findings],
        "by_rank": stragglers.by_rank.to_dict("records"),
        "by_host": stragglers.by_host.to_dict("records"),
        "by_cause": stragglers.by_cause.to_dict("records"),
        "by_bucket": stragglers.by_bucket.to_dict("records"),
        "links": measure_link_rates(analysis.trace).to_dict("records"),
    }


def _collect_finding(finding: Finding) -> dict[str, Any]:
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
        "lateness_ns": finding.lateness_ns,
        "saving": _collect_saving(finding.saving),
        "step_ns": finding.step_ns,
        "saving_share": finding.saving_share,
        "machine": finding.machine,
    }


def _collect_saving(saving: MeanStep) -> dict[str, Any]:
    return {"step_ns": saving.step, "blocks_ns": saving.present}
