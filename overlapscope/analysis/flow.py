"""Path of a bucket through a step on each rank: gradients ready, bucket ready, launch, all-reduce, copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.analysis.lanes import LANE_NAMES, Timeline
from overlapscope.analysis.related_spans import find_counterparts
from overlapscope.trace.entering import compute_arrival_ns
from overlapscope.trace.reader import Trace

MOMENTS: Final = ("gradient ready", "bucket ready", "launched", "last rank there", "ended", "copied out")
"""Moments of the path, in order. "gradient ready" occurs once for each recorded parameter of the bucket."""

_COLUMNS: Final = ("rank", "turn", "moment", "time_ns", "lane", "place")
_GRADIENTS, _BUCKETS, _COMMUNICATION = (LANE_NAMES.index(name) for name in ("gradients", "buckets", "communication"))
_NOTHING: Final = np.zeros(0, dtype=np.int64)


def compute_bucket_flow(trace: Trace, timeline: Timeline, about: Mapping[int, npt.NDArray[np.int64]]) -> pd.DataFrame:
    """Return the moments of a bucket on the ranks of the timeline.

    Args:
        about: All spans that concern the bucket in one step, from ``spans_about``.

    Returns:
        rank (from top to bottom), turn (which reduction of the bucket in its step, from 0), moment (one of ``MOMENTS``,
        in this order; an unknown one has no row), time_ns (on the timeline), lane (its number on the timeline) and
        place (in ``lanes[lane].spans``) of the span that it belongs to. Without rows if the bucket was not reduced.
    """
    rows: list[tuple[Any, ...]] = []
    last_ns: dict[int, int | None] = {}
    for place, rank in enumerate(timeline.ranks):
        lanes = range(place * len(LANE_NAMES), (place + 1) * len(LANE_NAMES))
        for turn, at in enumerate(about.get(lanes[_COMMUNICATION], _NOTHING).tolist()):
            if turn not in last_ns:
                last_ns[turn] = _last_arrival_ns(trace, timeline, lanes[_COMMUNICATION], at)
            found = _reduction_moments(trace, timeline, lanes, about, turn)
            rows += [(rank, turn, *row) for row in found]
            if (arrived_ns := last_ns[turn]) is not None:
                rows.append((rank, turn, "last rank there", arrived_ns, lanes[_COMMUNICATION], at))
    table = pd.DataFrame(rows, columns=_COLUMNS).astype({name: "int64" for name in _COLUMNS if name != "moment"})
    order = table["moment"].map(MOMENTS.index)
    return table.assign(order=order, top=table["rank"].map(timeline.ranks.index)).sort_values(
        ["top", "turn", "order", "time_ns"], kind="stable", ignore_index=True
    )[list(_COLUMNS)]


def _reduction_moments(
    trace: Trace, timeline: Timeline, lanes: range, about: Mapping[int, npt.NDArray[np.int64]], turn: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield moment, time, lane and position for each event of one rank in one reduction.

    Args:
        lanes: Numbers of the rank's lanes.
        turn: Index of its all-reduce among those of the bucket.
    """
    gradients, buckets, sent = (timeline.lanes[lanes[number]].spans for number in range(1, len(LANE_NAMES)))
    own_gradients, own_buckets, own_sent = (about.get(lane, _NOTHING) for lane in lanes[1:])
    row = int(sent.rows[own_sent[turn]])
    from_ns = _arrival_ns(trace, timeline, int(sent.rows[own_sent[turn - 1]])) if turn else None
    until_ns = _arrival_ns(trace, timeline, row)
    ready_ns, launch_ns, end_ns = _times_ns(trace, timeline, row)
    for place in own_gradients.tolist():
        time_ns = int(gradients.starts_ns[place])
        if time_ns <= until_ns and (from_ns is None or time_ns > from_ns):
            yield "gradient ready", time_ns, lanes[_GRADIENTS], place
    waits = own_buckets[buckets.rows[own_buckets] == row].tolist()
    if ready_ns is not None:
        yield from (("bucket ready", ready_ns, lanes[_BUCKETS], wait) for wait in waits)
    if launch_ns is not None:
        lane, place = (lanes[_BUCKETS], waits[0]) if waits else (lanes[_COMMUNICATION], int(own_sent[turn]))
        yield "launched", launch_ns, lane, place
    if end_ns is None:
        return
    yield "ended", end_ns, lanes[_COMMUNICATION], int(own_sent[turn])
    copies = [place for place in own_buckets.tolist() if _is_copy_out(trace, int(buckets.rows[place]))]
    after = [place for place in copies if buckets.starts_ns[place] >= end_ns]
    yield from (("copied out", int(buckets.ends_ns[place]), lanes[_BUCKETS], place) for place in after[:1])


def _times_ns(trace: Trace, timeline: Timeline, row: int) -> tuple[int | None, ...]:
    """Return when a collective was ready, launched and ended, on the timeline."""
    found = trace.collectives.iloc[row]
    moments = (found[name] for name in ("ready_ns", "launch_ns", "end_ns"))
    return tuple(None if pd.isna(moment) else int(moment) - timeline.begin_ns for moment in moments)


def _arrival_ns(trace: Trace, timeline: Timeline, row: int) -> int:
    """Return when a rank entered a collective, on the timeline."""
    return int(compute_arrival_ns(trace.collectives.iloc[[row]])[0]) - timeline.begin_ns


def _is_copy_out(trace: Trace, row: int) -> bool:
    """Return True if a row of the lane of buckets is a copy of averages to gradients."""
    copy = row - len(trace.collectives)
    return copy >= 0 and bool(trace.copies["direction"].iloc[copy] == "out")


def _last_arrival_ns(trace: Trace, timeline: Timeline, lane: int, place: int) -> int | None:
    """Return when the last rank entered a collective; None unless all ranks are known to have."""
    found = timeline.lanes[lane]
    same = find_counterparts(trace, found, int(found.spans.rows[place]))
    known = same[same["wait_ns"].notna()].head(1)
    return None if known.empty else int((known["start_ns"] + known["wait_ns"]).iloc[0]) - timeline.begin_ns
