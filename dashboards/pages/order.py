"""Order page: why a job hangs, or where ranks diverged, with the lanes of collectives that show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from bokeh.document import Document

from dashboards.pages.breakdown import build_breakdown_context
from dashboards.pages.shell import QueryArguments, get_argument, get_number, render, render_fragment
from dashboards.plots.browser_rpc import BrowserRpc, RequestColumns
from dashboards.plots.order import OrderPlot, SelectedCell
from dashboards.recording import Snapshot
from overlapscope.diagnosis.attempts import format_other_attempts
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.evidence import UNKNOWN_STEP, Entry, Evidence, Liveness, RankEvidence
from overlapscope.diagnosis.order_view import (
    BUCKET_SLOTS,
    OrderLane,
    OrderLanes,
    OrderSide,
    compare_sides,
    group_into_sides,
)
from overlapscope.diagnosis.report_text import describe_lasting_damage
from overlapscope.diagnosis.text import collective_text, format_kind, format_position, format_recorded_until
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.text import capitalize, format_bytes, format_ns, format_ranks, parse_ranks, rank_list
from overlapscope.trace.collective_log import ProcessGroup, Signature
from overlapscope.trace.folders import read_import_source
from overlapscope.trace.process_files import WatchdogReport
from overlapscope.trace.recording import Trace

# Watchdog reports as the Order page lists them: each report once, whichever rank made it.

MAX_RANKS: Final = 16
"""Maximum number of ranks that a window can show readably beside each other, all lanes of each."""

_MAX_REPORTS: Final = 12
_MAX_STACKS: Final = 8


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One report."""

    when: str
    sentence: str
    text: str
    """The printed report in full; empty if it was only the sentence."""
    retracted: str
    """Note that the report was withdrawn; empty if it was not."""
    stacks: tuple[tuple[str, str], ...]
    """Title of each rank, and its stacks."""


def build_report_rows(
    reports: Sequence[WatchdogReport], blamed: Sequence[int], *, verdict_sentence: str = ""
) -> list[ReportRow]:
    """Return the reports in order of time.

    Args:
        reports: reports of all ranks.
        blamed: ranks whose stacks come first.
        verdict_sentence: already shown above the reports, so not repeated.
    """
    same: dict[str, list[WatchdogReport]] = {}
    for report in reports:
        same.setdefault(report.sentence, []).append(report)
    return [_build_report_row(equal, blamed, verdict_sentence) for equal in list(same.values())[:_MAX_REPORTS]]


def _build_report_row(reports: Sequence[WatchdogReport], blamed: Sequence[int], verdict_sentence: str) -> ReportRow:
    first = reports[0]
    parts = [capitalize(rank_list(report.rank for report in reports))]
    if first.unix_ns is not None:
        parts.insert(0, f"{datetime.fromtimestamp(first.unix_ns / 1e9):%H:%M:%S}")
    if first.step is not None:
        parts.append(f"step {first.step}")
    retracted_ns = [report.retracted_ns for report in reports]
    retracted = ""
    if all(ns is not None for ns in retracted_ns):
        after_ns = max(ns for ns in retracted_ns if ns is not None) - first.time_ns
        retracted = f"Withdrawn {format_ns(after_ns)} later: the job went on."
    by_interest = sorted(reports, key=lambda report: (report.rank not in blamed, report.rank))
    stacks = [(f"Rank {report.rank}", text) for report in by_interest[:_MAX_STACKS] if (text := report.stacks.strip())]
    return ReportRow(
        when=" · ".join(parts),
        sentence="The same as above, while the job ran." if first.sentence == verdict_sentence else first.sentence,
        text="" if first.text.strip() == first.sentence.strip() else first.text,
        retracted=retracted,
        stacks=tuple(stacks),
    )


# Last known position of each rank, as the Order page lists it: ranks at the same position together.

_MAX_POSITIONS: Final = 12

FAULT_STATES: Final[dict[Liveness, str]] = {
    "stopped": "stopped",
    "gone": "gone",
    "failed": "failed",
    "never started": "never started",
    "silent": "silent",
}
"""States of a rank that are relevant to the fault."""


def list_rank_positions(evidence: Evidence) -> list[tuple[str, str]]:
    """Return the ranks at each position, the smallest groups first, because these are the outliers."""
    same: dict[str, list[int]] = {}
    for rank, one in sorted(evidence.ranks.items()):
        same.setdefault(_describe_position(one), []).append(rank)
    missing = [rank for rank in evidence.expected_ranks if rank not in evidence.ranks]
    if missing:
        same["left no log"] = missing
    if not any(same):
        return []
    oddest_first = sorted(same.items(), key=lambda item: len(item[1]))
    lines = [(capitalize(rank_list(ranks)), where or "unknown") for where, ranks in oddest_first]
    more = [("And", f"{len(lines) - _MAX_POSITIONS} more places")] if len(lines) > _MAX_POSITIONS else []
    return [*lines[:_MAX_POSITIONS], *more]


def _describe_position(one: RankEvidence) -> str:
    parts: list[str] = [] if one.liveness == "unknown" else [one.liveness]
    if one.unrecorded_because is not None:
        parts.append(format_recorded_until(one))
    elif one.liveness == "ended":
        parts += [f"{one.steps_done} steps done"] if one.steps_done else []
    elif one.failure is not None:
        site = f" at {one.failure.call_site}" if one.failure.call_site else ""
        parts.append(f"{one.failure.type}{site}")
    elif one.position is not None:
        parts.append(format_position(one.position))
    return ", ".join(parts)


_MAX_INCIDENT_STEPS: Final = 20_000
"""Number of steps of all ranks together above which their breakdown takes some tenths of a second."""
OTHER_COLORS: Final = (
    ("other DDP traffic", ("buffers", "bitmap", "construction", "join", "hook")),
    ("other all_reduce", ("all_reduce",)),
    ("broadcast", ("broadcast",)),
    ("gather", ("gather",)),
    ("scatter", ("scatter",)),
    ("barrier", ("barrier",)),
)
"""Legend of collectives that are not buckets: label, and the categories that share it."""


@dataclass(frozen=True, kw_only=True)
class LaneLabel:
    """The label of a lane."""

    name: str
    note: str
    hint: str
    is_blamed: bool


def build(document: Document, snapshot: Snapshot, arguments: QueryArguments, *, is_plain: bool = False) -> None:
    """Fill a document with the page, for the group, ranks and number in the query."""
    diagnosis = snapshot.diagnosis
    if diagnosis is None or not diagnosis.groups:
        _render_without_order(document, snapshot, is_plain=is_plain)
        return
    group = parse_group(diagnosis, arguments)
    lanes = diagnosis.lanes(group)
    shown, note = choose_lanes(lanes, arguments)
    highlight = find_highlight(diagnosis, lanes)
    selected = parse_selected_cell(diagnosis, lanes, shown, arguments)
    details = render_number_details(snapshot.trace, diagnosis, lanes, selected[1])
    # In an incident the step-time breakdown is not the question, and must not delay the page.
    must_be_quick = diagnosis.is_incident and len(snapshot.trace.steps) > _MAX_INCIDENT_STEPS
    plot = OrderPlot(lanes, shown, highlight=highlight, selected=selected)
    connect_details(plot.rpc, snapshot.trace, diagnosis, lanes, shown, selected)
    document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "order_plot.html" if is_plain else "order.html",
        title="Order",
        trace=snapshot.trace,
        roots=[plot.root, plot.axis],
        is_plain=is_plain,
        **_build_top(snapshot, diagnosis),
        groups=[(each.name, format_group(each)) for each in diagnosis.groups],
        group_name=group.name,
        lanes_note=note,
        chosen=get_argument(arguments, "ranks"),
        has_many_ranks=len(group.ranks) > MAX_RANKS,
        lane_labels=[build_lane_label(lane, lanes, diagnosis.evidence) for lane in shown],
        lane_px=plot.layout.lane_px,
        has_two_lines=plot.layout.has_two_lines,
        details=details,
        has_differences=highlight is not None or lanes.first_difference is not None,
        oldest=lanes.oldest,
        latest=lanes.latest,
        divergence_share=_compute_log_fraction(highlight[0], lanes) if highlight else None,
        bucket_slots=BUCKET_SLOTS,
        other_colors=OTHER_COLORS,
        **({} if is_plain or must_be_quick else build_breakdown_context(snapshot.summary)),
    )


def _render_without_order(document: Document, snapshot: Snapshot, *, is_plain: bool) -> None:
    """Fill a document with what went wrong, as far as it is known, or with why there is nothing to show."""
    diagnosis, trace = snapshot.diagnosis, snapshot.trace
    if diagnosis is not None and diagnosis.verdict.is_fault and not is_plain:
        render(document, "order_fault.html", title="Order", trace=trace, **_build_top(snapshot, diagnosis))
        return
    reason = build_unavailable_context(trace, diagnosis.verdict if diagnosis else None)
    render(document, "problem.html", title="Order", trace=trace, **reason)


def _build_top(snapshot: Snapshot, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what the page begins with, as template variables."""
    return {
        "further_problems": diagnosis.problems,
        "attempts": format_other_attempts(snapshot.attempts, snapshot.trace.path),
        **build_verdict_context(diagnosis),
    }


def connect_details(
    rpc: BrowserRpc,
    trace: Trace | None,
    diagnosis: Diagnosis,
    lanes: OrderLanes,
    shown: Sequence[OrderLane],
    selected: SelectedCell,
) -> None:
    """Answer what ranks have at the number that is selected.

    Args:
        rpc: messages of the plot.
        trace: the recording.
        diagnosis: diagnosis of the recording.
        lanes: the collectives of the group.
        shown: lanes that are drawn.
        selected: cell that is selected first.
    """

    def describe(args: RequestColumns) -> None:
        lane, number = int(args["lane"][0]), int(args["number"][0])
        cells = lanes.window([shown[lane]], number, number).cells
        entry = cells[0].entry if cells else None
        step = None if entry is None or entry.step == UNKNOWN_STEP else entry.step
        markup = render_number_details(trace, diagnosis, lanes, number)
        details.data = {"lane": [lane], "number": [number], "step": [step], "markup": [markup]}

    details = rpc.response("details", ("lane", "number", "step", "markup"))
    request = rpc.request("selected", ("lane", "number"), describe)
    request.data = {"lane": [selected[0]], "number": [selected[1]]}  # here the server sends the first request


def build_verdict_context(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the verdict and the evidence for it, as template variables."""
    verdict = diagnosis.verdict
    return {
        "kind": format_kind(verdict.kind),
        "kind_class": "healthy" if verdict.kind == "healthy" else "fault" if verdict.is_fault else "",
        "sentence": verdict.sentence,
        "lasting": describe_lasting_damage(verdict, diagnosis.evidence),
        "code_lines": list_code_lines(verdict),
        "alternative": verdict.alternative,
        "basis": describe_basis(verdict, diagnosis),
        "standings": list_rank_positions(diagnosis.evidence) if verdict.kind != "healthy" else [],
        "evidence": verdict.evidence,
        "advice": verdict.advice,
        "also": verdict.also,
        "remarks": [remark.sentence for remark in verdict.remarks],
        "reports": build_report_rows(diagnosis.reports, verdict.named, verdict_sentence=verdict.sentence),
    }


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """A line of code that the verdict is about."""

    ranks: str
    site: str
    what: str
    """The collective that was launched there; empty if unknown."""
    is_blamed: bool


def list_code_lines(verdict: Verdict) -> list[CodeLine]:
    """Return the lines of code that ranks were at, to be seen side by side, that of the ranks at fault first.

    Returns:
        Two or more lines, or none: a single one is in the sentence.
    """
    same: dict[tuple[str, str], list[int]] = {}
    for rank, site in sorted(verdict.call_sites.items()):
        entry = next((each for each in verdict.windows.get(rank, ()) if each.number == verdict.number), None)
        same.setdefault((str(site), "" if entry is None else collective_text(entry)), []).append(rank)
    if len({site for site, _ in same}) < 2:
        return []
    lines = [
        CodeLine(ranks=capitalize(rank_list(ranks)), site=site, what=what, is_blamed=_is_at_fault(verdict, ranks))
        for (site, what), ranks in same.items()
    ]
    return sorted(lines, key=lambda line: not line.is_blamed)[:_MAX_SIDES]


def _is_at_fault(verdict: Verdict, ranks: Sequence[int]) -> bool:
    return not set(verdict.named).isdisjoint(ranks)


def choose_lanes(lanes: OrderLanes, arguments: QueryArguments) -> tuple[tuple[OrderLane, ...], str]:
    """Return the lanes to show, and a note on them.

    Up to ``MAX_RANKS`` ranks have a lane each. Of more, those with the same collectives share one, unless the query
    asks for ranks. Blamed ranks are always shown.
    """
    ranks = lanes.group.ranks
    if len(ranks) <= MAX_RANKS:
        return lanes.lanes_of(ranks), ""
    asked, unknown = parse_ranks(get_argument(arguments, "ranks"), ranks)
    if asked:
        notes = [f"there is no rank {', '.join(unknown)}"] if unknown else []
        if len(asked) > MAX_RANKS:
            notes.append(f"{len(asked):,} were chosen, but only {MAX_RANKS} can be shown at a time")
        shown = lanes.lanes_of(asked[:MAX_RANKS])
        return shown, "; ".join([f"{len(shown)} of {len(ranks):,} ranks", *notes])
    folds = lanes.folds
    if len(folds) == 1:
        return folds, f"all {len(ranks):,} ranks did the same and share a lane"
    selected_folds = sorted(folds, key=lambda fold: (not fold.is_blamed, -len(fold.ranks)))[
        : max(MAX_RANKS, len(lanes.blamed))
    ]
    shown = tuple(sorted(selected_folds, key=lambda fold: fold.ranks[0]))
    note = f"{len(ranks):,} ranks; those that did the same share a lane"
    hidden = sum(len(fold.ranks) for fold in folds) - sum(len(fold.ranks) for fold in shown)
    return shown, note + (f", {hidden:,} that differ from each other are not shown" if hidden else "")


def build_lane_label(lane: OrderLane, lanes: OrderLanes, evidence: Evidence) -> LaneLabel:
    """Return the label of a lane: its ranks, their state, and the last number in their logs."""
    is_fold = len(lane.ranks) > 1
    name = f"{len(lane.ranks):,} ranks" if is_fold else f"rank {lane.ranks[0]}"
    parts = [format_ranks(lane.ranks)] if is_fold else []
    states = {evidence.ranks[rank].liveness if rank in evidence.ranks else "unknown" for rank in lane.ranks}
    parts += [FAULT_STATES[state] for state in states if state in FAULT_STATES and len(states) == 1]
    if not lane.latest:
        parts.append("left no log")
    elif lane.latest < lanes.latest:
        parts.append(f"to #{lane.latest:,}")
    note = " · ".join(parts)
    return LaneLabel(name=name, note=note, hint=f"{name}{' · ' * bool(note)}{note}", is_blamed=lane.is_blamed)


def describe_basis(verdict: Verdict, diagnosis: Diagnosis) -> str:
    """Return where the fault is: ranks, step, group and number."""
    parts = []
    if verdict.named:
        parts.append(capitalize(rank_list(verdict.named)))
    elif verdict.concerned and verdict.is_fault:
        parts.append(f"{capitalize(rank_list(verdict.concerned))} (no rank is blamed)")
    if verdict.step is not None:
        is_range = verdict.last_step not in (None, verdict.step)
        parts.append(f"a step from {verdict.step} to {verdict.last_step}" if is_range else f"step {verdict.step}")
    group = next((group for group in diagnosis.groups if group.name == verdict.group), None)
    if group is not None:
        parts.append(f"group {group.title}")
    if verdict.number is not None:
        parts.append(f"collective #{verdict.number:,}")
    return " · ".join(parts)


def format_group(group: ProcessGroup) -> str:
    """Return the title, members and backend of a group."""
    backend = f" · {group.backend}" if group.backend else ""
    return f"{group.title} · ranks {format_ranks(group.ranks)}{backend}"


def parse_group(diagnosis: Diagnosis, arguments: QueryArguments) -> ProcessGroup:
    """Return the group of ``?group=…``, else the verdict's, else the first."""
    for name in (get_argument(arguments, "group"), diagnosis.verdict.group):
        found = next((group for group in diagnosis.groups if group.name == name), None)
        if found is not None:
            return found
    return diagnosis.groups[0]


def find_highlight(diagnosis: Diagnosis, lanes: OrderLanes) -> tuple[int, str] | None:
    """Return the number where the fault began, and its label; None if it is that of a log with numbers of its own."""
    highlight, step = diagnosis.highlight(lanes.group), diagnosis.verdict.step
    if highlight is None or step is None:
        return highlight
    entries = [entry for entry in lanes.entries_at(highlight[0]).values() if entry is not None]
    steps = [entry.loop_step for entry in entries if entry.step != UNKNOWN_STEP]
    return highlight if not steps or any(abs(each - step) <= 1 for each in steps) else None


def parse_selected_cell(
    diagnosis: Diagnosis, lanes: OrderLanes, shown: Sequence[OrderLane], arguments: QueryArguments
) -> SelectedCell:
    """Return the cell of ``?number=…&rank=…``, by default a blamed rank's where the fault began, else the last one."""
    lane_index_of = {rank: lane_index for lane_index, lane in enumerate(shown) for rank in lane.ranks}
    wanted = [get_number(arguments, "rank"), *diagnosis.verdict.named, *diagnosis.verdict.concerned]
    lane_index = next((lane_index_of[rank] for rank in wanted if rank in lane_index_of), 0)
    highlight = find_highlight(diagnosis, lanes)
    numbers = [get_number(arguments, "number"), highlight and highlight[0], lanes.first_difference, lanes.latest]
    number = next(number for number in numbers if number is not None)
    return lane_index, min(max(number, lanes.oldest), max(lanes.latest, lanes.oldest))


def _compute_log_fraction(number: int, lanes: OrderLanes) -> float:
    """Return the position of a number in the log, from 0 for the oldest to 1 for the last."""
    return (number - lanes.oldest) / max(1, lanes.latest - lanes.oldest)


def build_unavailable_context(trace: Trace | None, verdict: Verdict | None) -> dict[str, Any]:
    """Return why there is no order to show and what to do, as template variables."""
    if trace is not None and (source := read_import_source(trace.run)):
        return {
            "headline": "No order of collectives to compare",
            "message": f"This recording was imported from {source}, whose traces don't hold what each rank launched.",
            "advice": "Record a run: 'overlapscope record -o FOLDER -- torchrun ...' logs all that ranks launch.",
        }
    return {
        "headline": "No order of collectives was recorded",
        "message": verdict.sentence
        if verdict
        else "This recording has no collective logs: nothing has been launched yet.",
        "advice": " ".join(verdict.advice)
        if verdict
        else "Record a run: 'overlapscope record -o FOLDER -- torchrun ...' logs every "
        "collective of each rank, also with stock DDP and plain torch.distributed.",
    }


# Details of one collective number on all ranks, as markup: the sides next to each other, and their parameters.

_MAX_SIDES: Final = 8

_Parameters = list[tuple[str, str, str]]
"""Name, shape and size of each parameter."""


def render_number_details(trace: Trace | None, diagnosis: Diagnosis, lanes: OrderLanes, number: int) -> str:
    """Return the markup of what all ranks have at a number."""
    sides = sorted(
        group_into_sides(lanes.entries_at(number)),
        key=lambda side: not (side.entries and _is_at_fault(diagnosis.verdict, side.ranks)),
    )
    shown = sides[:_MAX_SIDES]
    return render_fragment(
        "order_details.html",
        number=number,
        has_timeline=trace is not None and len(trace.steps) > 0,
        sides=[_build_heading(side) for side in shown],
        more_sides=len(sides) - len(shown),
        traits=compare_sides(shown, diagnosis.offsets_ns),
        buckets=_list_buckets(trace, shown),
    )


@dataclass(frozen=True, kw_only=True)
class SideHeading:
    """The heading of a side."""

    title: str
    ranks: str
    """Its ranks, for the page's script."""
    state: str
    link: str
    """Link to the same step on the timeline."""


def _build_heading(side: OrderSide) -> SideHeading:
    states = sorted({entry.state for entry in side.entries})
    return SideHeading(
        title=rank_list(side.ranks),
        ranks=" ".join(map(str, side.ranks)),
        state=" or ".join(states) if states else "nothing in its log",
        link=f"timeline?step={side.entry.step}&rank={side.ranks[0]}" if side.entry else "",
    )


def _list_buckets(trace: Trace | None, sides: Sequence[OrderSide]) -> list[tuple[str, _Parameters]]:
    """Return the parameters of each bucket that a side has, once if they are the same."""
    found: dict[tuple[tuple[str, str, str], ...], tuple[str, _Parameters]] = {}
    for side in sides:
        if side.entry is None or side.entry.signature.role != "bucket":
            continue
        parameters = _list_parameters(trace, side.entry)
        title = f"Bucket {side.entry.signature.bucket}"
        found.setdefault(tuple(parameters), (f"{title} of {rank_list(side.ranks)}", parameters))
        if len(sides) == 1:
            return [(title, parameters)]
    return list(found.values())


def _list_parameters(trace: Trace | None, entry: Entry) -> _Parameters:
    signature = entry.signature
    planned = [] if trace is None else _find_plan_parameters(trace, signature)
    return planned or [(name, "", "") for name in signature.names]


def _find_plan_parameters(trace: Trace, signature: Signature) -> _Parameters:
    plans = trace.plans
    rows = plans[
        (plans["model"] == signature.model)
        & (plans["plan_epoch"] == signature.plan_epoch)
        & (plans["bucket"] == signature.bucket)
    ]
    of_hash = rows[rows["plan_hash"].str[: len(signature.plan_hash)] == signature.plan_hash]
    rows = (of_hash if len(of_hash) else rows).drop_duplicates("position").sort_values("position")
    return [
        (str(name), str(shape), format_bytes(int(size)))
        for name, shape, size in zip(rows["name"], rows["shape"], rows["bytes"], strict=True)
    ]
