"""Timeline page of the chosen ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import pandas as pd
from bokeh.document import Document

from dashboards.pages.area import render_area
from dashboards.pages.breakdown import StepBar, build_breakdown_context
from dashboards.pages.rank_choice import RankChoice, choose_ranks, suggest_ranks
from dashboards.pages.shell import (
    QueryArguments,
    find_incident,
    get_argument,
    get_number,
    has_only_collectives,
    render,
    render_fragment,
)
from dashboards.plots.browser_rpc import RequestColumns
from dashboards.plots.lane_ends import describe_ends
from dashboards.plots.lane_layout import RANK_UNITS, LaneLayout, lane_units, layout_lanes
from dashboards.plots.related_spans import MOMENTS, find_counterparts
from dashboards.plots.span_details import find_step_start_ns, get_span_details
from dashboards.plots.timeline import MIN_VIEW_NS, TimelinePlot, compute_step_view, find_step
from dashboards.plots.timeline_area import parse_area
from dashboards.plots.timeline_columns import View
from dashboards.plots.timeline_selection import MARKERS
from dashboards.plots.tooltip import build_tooltip
from dashboards.recording import Rounds, Snapshot
from overlapscope.breakdown.lanes import LANE_NAMES, Timeline
from overlapscope.breakdown.summary import Summary
from overlapscope.breakdown.trend import build_step_strip
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.text import format_bytes, format_ns, format_timestamp_ns
from overlapscope.trace.folders import read_import_source
from overlapscope.trace.off_steps import list_off_spans
from overlapscope.trace.recording import Trace

# Details of the span that is selected on the timeline, as markup.

_MAX_RANKS: Final = 64
_MAX_ROUNDS: Final = 128
_SYMBOLS: Final = {
    "circle": "●",
    "square": "■",
    "triangle": "▲",
    "diamond": "◆",
    "inverted_triangle": "▼",
    "hex": "⬢",
}
"""Characters for the markers of the plot."""


def render_selected_span(
    trace: Trace, rounds: Rounds, timeline: Timeline, lane: int, row: int, flow: pd.DataFrame
) -> str:
    """Return all that is known of a span, the same span on every rank, and the path of its bucket on the ranks shown.

    Args:
        trace: the recording.
        rounds: rounds of the all-reduces of the recording.
        timeline: lanes of the ranks shown.
        lane: index of the span's lane on the timeline.
        row: row of the span, one of its lane's ``spans.rows``.
        flow: path of its bucket, from ``compute_bucket_flow``.
    """
    chosen = timeline.lanes[lane]
    span = get_span_details(trace, timeline.begin_ns, chosen, row)
    title, rows = build_tooltip(span, most_parameters=None)
    same = find_counterparts(trace, chosen, row)
    shown = same.sort_values("late_ns", ascending=False, kind="stable").head(_MAX_RANKS)
    step_ns = find_step_start_ns(trace, chosen.rank, span.step)
    origin_ns = timeline.begin_ns if step_ns is None else step_ns
    of_all = rounds.of(row) if chosen.name == "communication" else rounds.table[:0]
    return render_fragment(
        "selection.html",
        title=f"{title} of step {span.step} on rank {span.rank}",
        rows=rows,
        step=span.step if span.step_is_known else None,
        origin=format_timestamp_ns(origin_ns - timeline.begin_ns),
        is_collective=chosen.name == "communication" or bool(same["wait_ns"].notna().any()),
        is_instant=chosen.is_instants,
        ranks=[_build_rank_row(one, origin_ns, chosen.rank) for one in shown.to_dict("records")],
        others=len(same) - len(shown),
        moments=[(moment, _SYMBOLS[MARKERS[moment]]) for moment in MOMENTS],
        ways=_build_bucket_path_rows(flow, origin_ns - timeline.begin_ns, chosen.rank),
        rounds=_build_round_rows(of_all, origin_ns, chosen.rank),
        other_rounds=max(0, len(of_all) - _MAX_ROUNDS),
    )


def _build_round_rows(rounds: pd.DataFrame, origin_ns: int, own: int) -> list[dict[str, Any]]:
    """Return a table row per round, those of the span's rank first."""
    ordered = rounds.assign(is_other=rounds["rank"] != own).sort_values(["is_other", "rank", "start_ns"], kind="stable")
    return [
        {
            "rank": one["rank"],
            "is_own": one["rank"] == own,
            "phase": one["phase"],
            "round": f"{one['round']} of {one['rounds']}" if one["rounds"] > 1 else "",
            "sent_to": one["sent_to"],
            "sent": format_bytes(one["sent_bytes"]) if one["sent_to"] else "",
            "received_from": one["received_from"],
            "received": format_bytes(one["received_bytes"]) if one["received_from"] else "",
            "begin": format_timestamp_ns(one["start_ns"] - origin_ns),
            "takes": format_ns(one["end_ns"] - one["start_ns"]),
        }
        for one in ordered.head(_MAX_ROUNDS).to_dict("records")
    ]


def _build_bucket_path_rows(flow: pd.DataFrame, origin_ns: int, own: int) -> list[dict[str, Any]]:
    """Return a table row per rank and reduction of a bucket; of its gradients only the last counts."""
    last = flow.groupby(["rank", "occurrence", "moment"], sort=False)["time_ns"].max()
    return [
        {
            "rank": rank,
            "is_own": rank == own,
            "times": [
                format_timestamp_ns(int(last[rank, occurrence, moment]) - origin_ns)
                if (rank, occurrence, moment) in last.index
                else "not known"
                for moment in MOMENTS
            ],
        }
        for rank, occurrence in flow[["rank", "occurrence"]].drop_duplicates().itertuples(index=False)
    ]


def _build_rank_row(one: dict[Any, Any], origin_ns: int, own: int) -> dict[str, Any]:
    """Return the table row of a rank."""
    has_ended = not pd.isna(one["end_ns"])
    return {
        "rank": int(one["rank"]),
        "is_own": int(one["rank"]) == own,
        "start": format_timestamp_ns(int(one["start_ns"]) - origin_ns),
        "late": format_ns(int(one["late_ns"])),
        "wait": _format_duration(one["wait_ns"]),
        "transfer": _format_duration(one["transfer_ns"]),
        "duration": format_ns(int(one["end_ns"]) - int(one["start_ns"])) if has_ended else "",
        "end": format_timestamp_ns(int(one["end_ns"]) - origin_ns) if has_ended else "never",
    }


def _format_duration(value_ns: Any) -> str:
    return "not known" if pd.isna(value_ns) else format_ns(int(value_ns))


_MAX_NAMES: Final = 2_000


def build(document: Document, snapshot: Snapshot, arguments: QueryArguments, *, is_plain: bool = False) -> None:
    """Fill a document with the timeline, of the ranks and with the view in the query."""
    if has_only_collectives(snapshot.trace):
        _build_unavailable(document, snapshot)
        return
    whole = _get_timeline(snapshot, snapshot.trace.ranks["rank"].tolist()[:1])  # any rank: steps are common to all
    incident = find_incident(snapshot)
    view = (
        parse_view(whole, arguments)
        or _compute_incident_view(whole, incident)
        or _typical_view(whole, snapshot.summary)
    )
    step = find_step(whole, sum(view or (0, whole.length_ns)) // 2)
    sorted_step = _sorted_step(arguments, step)
    lateness_ns = {} if sorted_step is None or snapshot.cycles is None else snapshot.cycles.lateness_of(sorted_step)
    choice = choose_ranks(snapshot.trace.ranks, arguments, lateness_ns)

    ends = (
        {}
        if incident is None or snapshot.is_live
        else describe_ends(snapshot.diagnosis, _list_unfinished(whole, snapshot))
    )
    plot = TimelinePlot(snapshot, _get_timeline(snapshot, choice.shown), view, _layout_ranks(choice), ends)
    timeline = plot.shown.timeline
    connect_ranks(plot, snapshot, is_plain=is_plain)
    if not is_plain:
        connect_markup(plot, snapshot)
        if (edges_ns := parse_area(get_argument(arguments, "area"))) is not None:
            plot.area.select(*edges_ns, get_argument(arguments, "area_ranks"))
        elif "span" in arguments:
            plot.selection.select_named(get_argument(arguments, "span"))
    document.js_on_event("document_ready", plot.start_script)
    render(
        document,
        "timeline.html",
        title="Timeline",
        trace=snapshot.trace,
        incident=incident,
        roots=[plot.root, plot.axis],
        is_plain=is_plain,
        breakdown="" if is_plain or step is None else _render_breakdown(snapshot.summary, step),
        layout=plot.layout,
        choice=choice,
        sorted_step=sorted_step,
        gutter=_render_gutter(choice, plot.layout, sorted_step, lateness_ns, is_plain=is_plain),
        has_hosts=snapshot.trace.ranks["host"].nunique() > 1,
        chosen=get_argument(arguments, "ranks"),
        suggestions=suggest_ranks(snapshot.trace.ranks),
        strip=_build_step_strip(snapshot.summary, timeline, plot.fit),
        off_spans=_build_off_spans(snapshot.trace, timeline, plot.fit),
        names=[] if is_plain else _list_searchable_names(snapshot.trace),
        is_ideal=arguments.get("ideal") == [b"1"],
        is_path=arguments.get("path") == [b"1"],
        has_rounds=len(snapshot.trace.segments) > 0,
        no_gradients=_explain_missing_gradients(snapshot.trace),
        first_step=min(timeline.steps["step"].tolist(), default=0),
        last_step=max(timeline.steps["step"].tolist(), default=0),
    )


def _get_timeline(snapshot: Snapshot, ranks: Sequence[int]) -> Timeline:
    return snapshot.lanes.timeline(ranks, is_over=not snapshot.is_live)


def _sorted_step(arguments: QueryArguments, seen: int | None) -> int | None:
    """Return the step by whose lateness ranks are sorted: that of ``?sorted=…``, else the one seen."""
    asked = get_number(arguments, "sorted")
    return seen if asked is None else asked


def _list_unfinished(timeline: Timeline, snapshot: Snapshot) -> dict[int, frozenset[int]]:
    """Return the steps that each rank has begun and not finished."""
    starts = {rank: timeline.step_starts(rank) for rank in snapshot.trace.ranks["rank"].tolist()}
    return {rank: frozenset(of_rank.loc[~of_rank["is_finished"], "step"]) for rank, of_rank in starts.items()}


def connect_ranks(plot: TimelinePlot, snapshot: Snapshot, *, is_plain: bool) -> None:
    """Show other ranks, or the same in another way, when the query of the page changes."""
    gutter = plot.rpc.response("gutter", ("markup", "note", "sorted_step"))

    def show_asked(asked: RequestColumns) -> None:
        arguments = {name: [value.encode() for value in values] for name, values in parse_qs(asked["query"][0]).items()}
        step = _sorted_step(arguments, int(asked["step"][0]))
        lateness_ns = {} if step is None or snapshot.cycles is None else snapshot.cycles.lateness_of(step)
        choice = choose_ranks(snapshot.trace.ranks, arguments, lateness_ns)
        plot.show_ranks(_get_timeline(snapshot, choice.shown), _layout_ranks(choice))
        markup = _render_gutter(choice, plot.layout, step, lateness_ns, is_plain=is_plain)
        # Last, because the browser waits for it, and then has the rows.
        gutter.data = {"markup": [markup], "note": [choice.note], "sorted_step": [step]}

    plot.rpc.request("asked_ranks", ("id", "query", "step"), show_asked)


def _layout_ranks(choice: RankChoice) -> LaneLayout:
    """Return the layout of the ranks chosen, in which the one that a link is about is expanded."""
    usual = layout_lanes(len(choice.shown))
    chosen = choice.expanded if choice.marked is None or choice.expanded is not None else {choice.marked}
    if chosen is None or (choice.expanded is None and all(usual.is_expanded)):
        return usual
    return layout_lanes(len(choice.shown), [at for at, rank in enumerate(choice.shown) if rank in chosen])


def _render_gutter(
    choice: RankChoice, layout: LaneLayout, step: int | None, lateness_ns: Mapping[int, int], *, is_plain: bool
) -> str:
    """Return the names of ranks and lanes beside the plot."""
    return render_fragment(
        "timeline_gutter.html",
        choice=choice,
        layout=layout,
        sorted_step=step,
        late=_format_lateness(choice, lateness_ns),
        is_plain=is_plain,
        lanes=[(name, lane_units(LANE_NAMES.index(name))) for name in layout.labeled_lanes],
        rank_units=RANK_UNITS,
    )


def connect_markup(plot: TimelinePlot, snapshot: Snapshot) -> None:
    """Send the breakdown of the step in the middle of the view, and what is known of the selected span or area.

    They reach the browser before the response of the plot that causes them.
    """
    breakdown = plot.rpc.response("breakdown", ("step", "markup"))
    panel = plot.rpc.response("panel", ("markup",))

    def show_breakdown(_attribute: str, _old: object, shown: RequestColumns) -> None:
        (step,) = shown["step"]
        if step is not None and [step] != breakdown.data["step"]:
            breakdown.data = {"step": [step], "markup": [_render_breakdown(snapshot.summary, step)]}

    def show_panel(_attribute: str, _old: object, chosen: RequestColumns) -> None:
        if chosen["name"][0]:
            lane, row, flow = chosen["lane"][0], chosen["row"][0], plot.selection.flow
            timeline = plot.shown.timeline
            panel.data = {"markup": [render_selected_span(snapshot.trace, snapshot.rounds, timeline, lane, row, flow)]}

    def show_area(_attribute: str, _old: object, _found: RequestColumns) -> None:
        if plot.area.area is not None:
            panel.data = {"markup": [render_area(plot.shown.timeline, plot.area.area, plot.area.tabulate())]}

    plot.response.on_change("data", show_breakdown)
    plot.area.response.on_change("data", show_area)
    plot.selection.response.on_change("data", show_panel)


def _format_lateness(choice: RankChoice, lateness_ns: Mapping[int, int]) -> dict[int, str]:
    """Return the lateness of each rank as text, if ranks are ordered by it."""
    if choice.order == "rank":
        return {}
    known = {rank: lateness_ns[rank] for rank in choice.shown if rank in lateness_ns}
    return {rank: f"{format_ns(abs(ns))} {'late' if ns >= 0 else 'early'}" for rank, ns in known.items()}


def _compute_incident_view(timeline: Timeline, incident: Verdict | None) -> View | None:
    """Return the view of the step of an incident; if training ended there, up to the end of what was recorded."""
    step = None if incident is None else incident.step
    view = None if step is None else compute_step_view(timeline, step)
    if view is None or step is None or int(timeline.steps["step"].max()) > step + 1:
        return view
    return view[0], timeline.length_ns + (timeline.length_ns - view[0]) // 40


def _typical_view(timeline: Timeline, summary: Summary) -> View | None:
    step = summary.typical_step
    return None if step is None else compute_step_view(timeline, step)


def _render_breakdown(summary: Summary, step: int) -> str:
    """Return the bars of the mean step and of this one."""
    this = summary.step(step)
    others = [(f"Step {step}", this)] if this is not None else []
    context = build_breakdown_context(summary, *others)
    if this is None and context["bars"]:
        context["bars"].append(StepBar(title=f"Step {step}, unfinished", step="", pieces=()))
    return render_fragment("breakdown.html", **context)


def _build_step_strip(summary: Summary, timeline: Timeline, fit: View) -> list[dict[str, Any]]:
    """Return all steps as bars: position and width as shares of the strip, height by exposed communication."""
    steps, length_ns = build_step_strip(summary.figures, timeline), fit[1] - fit[0]
    highest_ns = max(1.0, float(steps["exposed_ns"].max())) if len(steps) else 1.0
    return [
        {
            "left": (one["start_ns"] - fit[0]) / length_ns,
            "width": (one["end_ns"] - one["start_ns"]) / length_ns,
            "height": one["exposed_ns"] / highest_ns,
            "title": f"{_format_steps(one)}: {format_ns(one['exposed_ns'])} of "
            f"{format_ns(one['step_time_ns'])} exposed",
        }
        for one in steps.to_dict("records")
    ]


def _build_off_spans(trace: Trace, timeline: Timeline, fit: View) -> list[dict[str, Any]]:
    """Return where recording was off as bars: position and width as shares of the strip."""
    spans = []
    for span in list_off_spans(trace.modes):
        begin = max(fit[0], span.start_ns - timeline.begin_ns)
        end = fit[1] if span.end_ns is None else min(fit[1], span.end_ns - timeline.begin_ns)
        if begin < end:
            left, width = (begin - fit[0]) / (fit[1] - fit[0]), (end - begin) / (fit[1] - fit[0])
            spans.append({"left": left, "width": width, "title": f"recording was off {span.steps}"})
    return spans


def _format_steps(one: dict[Any, Any]) -> str:
    first, last = int(one["step"]), int(one["last_step"])
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _explain_missing_gradients(trace: Trace) -> str:
    """Return why the lanes of gradients are empty; an empty text if they are not."""
    if len(trace.gradients):
        return ""
    if read_import_source(trace.run):
        return "gradients: not in the imported traces"
    if trace.run.get("detail") == "parameters":
        return "gradients: none recorded"
    return "gradients: only with record --detail parameters"


def _list_searchable_names(trace: Trace) -> list[str]:
    """Return the names that the search field suggests."""
    buckets = sorted({int(bucket) for bucket in trace.collectives["bucket"].unique() if bucket >= 0})
    return [*(f"bucket {bucket}" for bucket in buckets), *trace.plans["name"].drop_duplicates()][:_MAX_NAMES]


def _build_unavailable(document: Document, snapshot: Snapshot) -> None:
    render(
        document,
        "problem.html",
        title="Timeline",
        trace=snapshot.trace,
        headline="Nothing to draw on a timeline yet",
        message="No rank has recorded a phase, a gradient or a bucket.",
        advice="If the run has just begun, reload this page to see them; plain torch.distributed has none. Its "
        "collectives are on the Order page.",
    )


def parse_view(timeline: Timeline, arguments: QueryArguments) -> View | None:
    """Parse the view of ``?from=…&to=…`` in nanoseconds, else of ``?step=…``, else None; invalid values are ignored."""

    def number(name: str) -> int | None:
        try:
            return int(float(get_argument(arguments, name)))
        except (ValueError, OverflowError):
            return None

    from_ns, to_ns, step = number("from"), number("to"), number("step")
    if from_ns is not None and to_ns is not None:
        from_ns, to_ns = max(from_ns, -timeline.length_ns), min(to_ns, 2 * timeline.length_ns)
        if to_ns - from_ns >= MIN_VIEW_NS:
            return from_ns, to_ns
    return None if step is None else compute_step_view(timeline, step)
