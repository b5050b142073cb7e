"""Details of the span that is selected on the timeline, as markup."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

from dashboards.pages.shell import render_fragment
from dashboards.plots.flow_content import MARKERS
from dashboards.plots.tooltip import build_tooltip
from overlapscope.analysis.flow import MOMENTS
from overlapscope.analysis.lanes import Timeline
from overlapscope.analysis.related_spans import find_counterparts
from overlapscope.analysis.rounds import Rounds
from overlapscope.analysis.span_details import get_span_details
from overlapscope.trace.reader import Trace
from overlapscope.units import format_bytes, format_ns, format_timestamp_ns

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
        flow: path of its bucket, from ``flow_of``.
    """
    chosen = timeline.lanes[lane]
    span = get_span_details(trace, timeline.begin_ns, chosen, row)
    title, rows = build_tooltip(span, most_parameters=None)
    same = find_counterparts(trace, chosen, row)
    shown = same.sort_values("late_ns", ascending=False, kind="stable").head(_MAX_RANKS)
    origin_ns = int(same["start_ns"].min())
    of_all = rounds.of(row) if chosen.name == "communication" else rounds.table[:0]
    return render_fragment(
        "selection.html",
        title=f"{title} of step {span.step} on rank {span.rank}",
        rows=rows,
        is_collective=chosen.name == "communication" or bool(same["wait_ns"].notna().any()),
        is_instant=chosen.is_instants,
        ranks=[_build_rank_row(one, origin_ns, chosen.rank) for one in shown.to_dict("records")],
        others=len(same) - len(shown),
        moments=[(moment, _SYMBOLS[MARKERS[moment]]) for moment in MOMENTS],
        ways=_build_bucket_path_rows(flow, _find_step_start_ns(timeline, span.step), chosen.rank),
        rounds=_build_round_rows(of_all, chosen.rank),
        other_rounds=max(0, len(of_all) - _MAX_ROUNDS),
    )


def _build_round_rows(rounds: pd.DataFrame, own: int) -> list[dict[str, Any]]:
    """Return a table row per round, those of the span's rank first; times count from the earliest round."""
    ordered = rounds.assign(is_other=rounds["rank"] != own).sort_values(["is_other", "rank", "start_ns"], kind="stable")
    origin_ns = rounds["start_ns"].min()
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


def _find_step_start_ns(timeline: Timeline, step: int) -> int:
    """Return when the first rank begins a step; 0, the start of the recording, if that is not known."""
    starts_ns = timeline.steps.loc[timeline.steps["step"] == step, "start_ns"]
    return 0 if starts_ns.empty else int(starts_ns.iloc[0])


def _build_bucket_path_rows(flow: pd.DataFrame, origin_ns: int, own: int) -> list[dict[str, Any]]:
    """Return a table row per rank and reduction of a bucket; of its gradients only the last counts."""
    last = flow.groupby(["rank", "turn", "moment"], sort=False)["time_ns"].max()
    return [
        {
            "rank": rank,
            "is_own": rank == own,
            "times": [
                format_timestamp_ns(int(last[rank, turn, moment]) - origin_ns)
                if (rank, turn, moment) in last.index
                else "not known"
                for moment in MOMENTS
            ],
        }
        for rank, turn in flow[["rank", "turn"]].drop_duplicates().itertuples(index=False)
    ]


def _build_rank_row(one: dict[Any, Any], origin_ns: int, own: int) -> dict[str, Any]:
    """Return the table row of a rank; its end counts from the earliest start of all ranks."""
    has_ended = not pd.isna(one["end_ns"])
    return {
        "rank": int(one["rank"]),
        "is_own": int(one["rank"]) == own,
        "late": format_timestamp_ns(int(one["late_ns"])),
        "wait": _format_duration(one["wait_ns"]),
        "transfer": _format_duration(one["transfer_ns"]),
        "duration": format_ns(int(one["end_ns"]) - int(one["start_ns"])) if has_ended else "",
        "end": format_timestamp_ns(int(one["end_ns"]) - origin_ns) if has_ended else "never",
    }


def _format_duration(value_ns: Any) -> str:
    return "not known" if pd.isna(value_ns) else format_ns(int(value_ns))
