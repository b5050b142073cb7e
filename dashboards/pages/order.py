"""Order page: why a job hangs, or where ranks diverged, with the lanes of collectives that show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bokeh.document import Document

from dashboards.pages.account import account_variables
from dashboards.pages.order_details import describe_number
from dashboards.pages.rank_choice import MAX_RANKS
from dashboards.pages.report_rows import report_rows
from dashboards.pages.shell import Arguments, render
from dashboards.pages.standings import NOTEWORTHY, standings
from dashboards.plots.order import OrderPlot, Selected
from dashboards.recording import Snapshot
from overlapscope.analysis.rank_numbers import format_ranks, parse_ranks
from overlapscope.diagnosis.attempts import others_text
from overlapscope.diagnosis.categories import BUCKET_SLOTS
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.evidence import Evidence
from overlapscope.diagnosis.order_lanes import OrderLane, OrderLanes
from overlapscope.diagnosis.order_source import ProcessGroup
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wording import capitalised, ranks_text
from overlapscope.trace.folders import imported_from
from overlapscope.trace.reader import Trace

_MOST_STEPS_IN_TROUBLE: Final = 20_000
"""Number of steps of all ranks together above which their breakdown takes some tenths of a second."""
OTHER_COLOURS: Final = (
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


def build(document: Document, snapshot: Snapshot, arguments: Arguments, *, is_plain: bool = False) -> None:
    """Fill a document with the page, for the group, ranks and number in the query."""
    diagnosis = snapshot.diagnosis
    if diagnosis is None or not diagnosis.groups:
        verdict = diagnosis.verdict if diagnosis else None
        render(
            document, "problem.html", title="Order", trace=snapshot.trace, **reason_variables(snapshot.trace, verdict)
        )
        return
    group = group_of_address(diagnosis, arguments)
    lanes = diagnosis.lanes(group)
    shown, note = choose_lanes(lanes, arguments)
    highlight = diagnosis.highlight(group)
    selected = selected_of_address(diagnosis, lanes, shown, arguments)

    def describe(number: int) -> str:
        return describe_number(snapshot.trace, diagnosis, lanes, number)

    # In an incident the step-time breakdown is not the question, and must not delay the page.
    must_be_quick = diagnosis.is_incident and len(snapshot.trace.steps) > _MOST_STEPS_IN_TROUBLE
    plot = OrderPlot(lanes, shown, highlight=highlight, selected=selected, describe=describe)
    document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "order_plot.html" if is_plain else "order.html",
        title="Order",
        trace=snapshot.trace,
        roots=[plot.root, plot.axis],
        is_plain=is_plain,
        further_problems=diagnosis.problems,
        attempts=others_text(snapshot.attempts, snapshot.trace.path),
        **verdict_variables(diagnosis),
        groups=[(each.name, group_label(each)) for each in diagnosis.groups],
        group_name=group.name,
        lanes_note=note,
        chosen=_text(arguments, "ranks"),
        has_many_ranks=len(group.ranks) > MAX_RANKS,
        lane_labels=[lane_label(lane, lanes, diagnosis.evidence) for lane in shown],
        lane_px=plot.layout.lane_px,
        has_two_lines=plot.layout.has_two_lines,
        details=describe(selected[1]),
        has_differences=highlight is not None or lanes.first_difference is not None,
        oldest=lanes.oldest,
        newest=lanes.newest,
        divergence_share=_share(highlight[0], lanes) if highlight else None,
        bucket_slots=BUCKET_SLOTS,
        other_colours=OTHER_COLOURS,
        **({} if is_plain or must_be_quick else account_variables(snapshot.summary)),
    )


def verdict_variables(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the verdict and the evidence for it, as template variables."""
    verdict = diagnosis.verdict
    return {
        "kind": kind_text(verdict),
        "kind_class": "healthy" if verdict.kind == "healthy" else "fault" if verdict.is_fault else "",
        "sentence": verdict.sentence,
        "alternative": verdict.alternative,
        "basis": basis_of(verdict, diagnosis),
        "standings": standings(diagnosis.evidence) if verdict.kind != "healthy" else [],
        "evidence": verdict.evidence,
        "advice": verdict.advice,
        "also": verdict.also,
        "reports": report_rows(diagnosis.reports, verdict.named, verdict_sentence=verdict.sentence),
    }


def choose_lanes(lanes: OrderLanes, arguments: Arguments) -> tuple[tuple[OrderLane, ...], str]:
    """Return the lanes to show, and a note on them.

    Up to ``MAX_RANKS`` ranks have a lane each. Of more, those with the same collectives share one, unless the query
    asks for ranks. Blamed ranks are always shown.
    """
    ranks = lanes.group.ranks
    if len(ranks) <= MAX_RANKS:
        return lanes.lanes_of(ranks), ""
    asked, unknown = parse_ranks(_text(arguments, "ranks"), ranks)
    if asked:
        notes = [f"there is no rank {', '.join(unknown)}"] if unknown else []
        if len(asked) > MAX_RANKS:
            notes.append(f"{len(asked):,} were chosen, but only {MAX_RANKS} can be shown at a time")
        shown = lanes.lanes_of(asked[:MAX_RANKS])
        return shown, "; ".join([f"{len(shown)} of {len(ranks):,} ranks", *notes])
    folds = lanes.folds
    if len(folds) == 1:
        return folds, f"all {len(ranks):,} ranks did the same and share a lane"
    kept = sorted(folds, key=lambda fold: (not fold.is_blamed, -len(fold.ranks)))[: max(MAX_RANKS, len(lanes.blamed))]
    shown = tuple(sorted(kept, key=lambda fold: fold.ranks[0]))
    note = f"{len(ranks):,} ranks; those that did the same share a lane"
    hidden = sum(len(fold.ranks) for fold in folds) - sum(len(fold.ranks) for fold in shown)
    return shown, note + (f", {hidden:,} that differ from each other are not shown" if hidden else "")


def lane_label(lane: OrderLane, lanes: OrderLanes, evidence: Evidence) -> LaneLabel:
    """Return the label of a lane: its ranks, their state, and the last number in their logs."""
    is_fold = len(lane.ranks) > 1
    name = f"{len(lane.ranks):,} ranks" if is_fold else f"rank {lane.ranks[0]}"
    parts = [format_ranks(lane.ranks)] if is_fold else []
    states = {evidence.ranks[rank].liveness if rank in evidence.ranks else "unknown" for rank in lane.ranks}
    parts += [NOTEWORTHY[state] for state in states if state in NOTEWORTHY and len(states) == 1]
    if not lane.newest:
        parts.append("left no log")
    elif lane.newest < lanes.newest:
        parts.append(f"to #{lane.newest:,}")
    note = " · ".join(parts)
    return LaneLabel(name=name, note=note, hint=f"{name}{' · ' * bool(note)}{note}", is_blamed=lane.is_blamed)


def kind_text(verdict: Verdict) -> str:
    """Return the label of a kind of fault."""
    return capitalised(verdict.kind)


def basis_of(verdict: Verdict, diagnosis: Diagnosis) -> str:
    """Return where the fault is: ranks, step, group and number."""
    parts = []
    if verdict.named:
        parts.append(capitalised(ranks_text(verdict.named)))
    elif verdict.concerned and verdict.is_fault:
        parts.append(f"{capitalised(ranks_text(verdict.concerned))} (no rank is blamed)")
    if verdict.step is not None:
        is_range = verdict.last_step not in (None, verdict.step)
        parts.append(f"a step from {verdict.step} to {verdict.last_step}" if is_range else f"step {verdict.step}")
    group = next((group for group in diagnosis.groups if group.name == verdict.group), None)
    if group is not None:
        parts.append(f"group {group.title}")
    if verdict.number is not None:
        parts.append(f"collective #{verdict.number:,}")
    return " · ".join(parts)


def group_label(group: ProcessGroup) -> str:
    """Return the title, members and backend of a group."""
    backend = f" · {group.backend}" if group.backend else ""
    return f"{group.title} · ranks {format_ranks(group.ranks)}{backend}"


def group_of_address(diagnosis: Diagnosis, arguments: Arguments) -> ProcessGroup:
    """Return the group of ``?group=…``, else the verdict's, else the first."""
    for name in (_text(arguments, "group"), diagnosis.verdict.group):
        found = next((group for group in diagnosis.groups if group.name == name), None)
        if found is not None:
            return found
    return diagnosis.groups[0]


def selected_of_address(
    diagnosis: Diagnosis, lanes: OrderLanes, shown: Sequence[OrderLane], arguments: Arguments
) -> Selected:
    """Return the cell of ``?number=…&rank=…``, by default a blamed rank's where the fault began, else the last one."""
    place_of = {rank: place for place, lane in enumerate(shown) for rank in lane.ranks}
    wanted = [_number(arguments, "rank"), *diagnosis.verdict.named, *diagnosis.verdict.concerned]
    place = next((place_of[rank] for rank in wanted if rank in place_of), 0)
    highlight = diagnosis.highlight(lanes.group)
    numbers = [_number(arguments, "number"), highlight and highlight[0], lanes.first_difference, lanes.newest]
    number = next(number for number in numbers if number is not None)
    return place, min(max(number, lanes.oldest), max(lanes.newest, lanes.oldest))


def _share(number: int, lanes: OrderLanes) -> float:
    """Return the position of a number in the log, from 0 for the oldest to 1 for the last."""
    return (number - lanes.oldest) / max(1, lanes.newest - lanes.oldest)


def reason_variables(trace: Trace | None, verdict: Verdict | None) -> dict[str, Any]:
    """Return why there is no order to show and what to do, as template variables."""
    if trace is not None and (source := imported_from(trace.run)):
        return {
            "headline": "No order of collectives to compare",
            "message": f"This recording was imported from {source}, whose traces don't hold what each rank launched.",
            "advice": "Record a run: 'overlapscope record -o FOLDER -- torchrun ...' logs all that ranks launch.",
        }
    return {
        "headline": "No order of collectives was recorded",
        "message": verdict.sentence
        if verdict
        else "This recording has no collective logs: an older version made it, or nothing has been launched yet.",
        "advice": " ".join(verdict.advice)
        if verdict
        else "Record it again with this version: 'overlapscope record -o FOLDER -- torchrun ...' logs every "
        "collective of each rank, also with stock DDP and plain torch.distributed.",
    }


def _text(arguments: Arguments, name: str) -> str:
    return b",".join(arguments.get(name, [])).decode(errors="replace")


def _number(arguments: Arguments, name: str) -> int | None:
    text = _text(arguments, name)
    return int(text) if text.isdecimal() and len(text) < 12 else None
