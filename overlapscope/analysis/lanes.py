"""A recording as lanes of a timeline: for each rank its phases, gradients, buckets and communication.

Every span has a category, which is what its colour stands for: a phase by its name, all that concerns a bucket by
the bucket. There are more buckets than colours that people can tell apart, so buckets share ``BUCKET_SLOTS`` of
them in turn; neighbours in launch order never share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.analysis.density import SpanIndex, index_spans
from overlapscope.trace.reader import Trace
from overlapscope.trace.tables import PHASE_NAMES

BUCKET_SLOTS: Final = 8
CATEGORIES: Final = (*PHASE_NAMES, *(f"bucket_{slot}" for slot in range(BUCKET_SLOTS)), "no_bucket")
"""Names of the categories, by number: phases, slots of buckets, and what belongs to no bucket."""

LANE_NAMES: Final = ("phases", "gradients", "buckets", "communication")
"""The lanes of each rank, from top to bottom."""

_FIRST_SLOT: Final = len(PHASE_NAMES)
_NO_BUCKET: Final = CATEGORIES.index("no_bucket")


@dataclass(frozen=True, eq=False, kw_only=True)
class Lane:
    """One row of the timeline.

    ``spans.rows`` are positions in the table that the lane is made of: ``trace.phases``, ``trace.gradients``,
    ``trace.collectives``; in the lane of buckets, waits to be launched are positions in ``trace.collectives`` and
    copies are the positions in ``trace.copies`` after those.
    """

    rank: int
    name: str
    """One of ``LANE_NAMES``."""
    spans: SpanIndex
    collectives: int = 0
    """How many rows ``trace.collectives`` has."""

    def is_wait(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which rows are waits of a bucket that is ready for its launch, in which nothing is done."""
        return (rows < self.collectives) & (self.name == "buckets")

    @property
    def is_instants(self) -> bool:
        """Whether the lane holds moments instead of stretches of time."""
        return self.name == "gradients"


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """All lanes of a recording. Times are nanoseconds from ``begin_ns`` of the common clock."""

    lanes: tuple[Lane, ...]
    """By rank, and within a rank as in ``LANE_NAMES``."""
    begin_ns: int
    """The earliest moment recorded: time 0 of the timeline, on the trace's clock."""
    length_ns: int
    steps: pd.DataFrame
    """step, start_ns, end_ns: from where the first rank begins it to where the last one ends it."""
    unfinished: pd.DataFrame
    """lane, row, start_ns, end_ns, bucket: collectives that were launched and never seen to complete.

    ``end_ns`` is how long that is known: to the end of the step, or of the recording if the step has none.
    """

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """In ascending order."""
        return tuple(sorted({lane.rank for lane in self.lanes}))


def timeline_of(trace: Trace) -> Timeline:
    """Arrange a recording in lanes."""
    begin_ns, end_ns = _extent_ns(trace)
    collectives = _with_open_ends(trace, begin_ns, end_ns)
    bucket_of_gradient = _buckets_of_gradients(trace)
    lanes: list[Lane] = []
    for rank in sorted(trace.ranks["rank"]):
        for name, spans in (
            ("phases", _phases(trace.phases, rank, begin_ns)),
            ("gradients", _gradients(trace.gradients, bucket_of_gradient, rank, begin_ns)),
            ("buckets", _buckets(collectives, trace.copies, rank, begin_ns)),
            ("communication", _communication(collectives, rank)),
        ):
            lanes.append(Lane(rank=int(rank), name=name, spans=spans, collectives=len(collectives)))
    steps = trace.steps.groupby("step", as_index=False).agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
    steps[["start_ns", "end_ns"]] -= begin_ns
    lane_of_rank = {lane.rank: number for number, lane in enumerate(lanes) if lane.name == "communication"}
    unfinished = collectives[collectives["is_unfinished"]]
    return Timeline(
        lanes=tuple(lanes),
        begin_ns=begin_ns,
        length_ns=max(1, end_ns - begin_ns),
        steps=steps.sort_values("start_ns", ignore_index=True),
        unfinished=pd.DataFrame(
            {
                "lane": unfinished["rank"].map(lane_of_rank).to_numpy(dtype=np.int64),
                "row": unfinished.index.to_numpy(dtype=np.int64),
                "start_ns": unfinished["from_ns"].to_numpy(),
                "end_ns": unfinished["to_ns"].to_numpy(),
                "bucket": unfinished["bucket"].to_numpy(),
            }
        ),
    )


def bucket_categories(buckets: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The category of each bucket number; negative numbers stand for no bucket."""
    return np.where(buckets < 0, _NO_BUCKET, _FIRST_SLOT + buckets % BUCKET_SLOTS).astype(np.uint8)


def _extent_ns(trace: Trace) -> tuple[int, int]:
    firsts = [trace.steps["start_ns"], trace.phases["start_ns"], trace.gradients["ready_ns"]]
    lasts = [trace.steps["end_ns"], trace.phases["end_ns"], trace.gradients["ready_ns"], trace.copies["end_ns"]]
    firsts.append(trace.collectives["launch_ns"])
    lasts += [trace.collectives["launch_ns"], trace.collectives["end_ns"].dropna()]
    starts_ns = [int(times.min()) for times in firsts if len(times)]
    ends_ns = [int(times.max()) for times in lasts if len(times)]
    return min(starts_ns, default=0), max(ends_ns, default=0)


def _with_open_ends(trace: Trace, begin_ns: int, end_ns: int) -> pd.DataFrame:
    """Collectives with ``from_ns`` and ``to_ns`` on the timeline, which those without an end have too."""
    table = trace.collectives
    step_ends = trace.steps[["rank", "step", "end_ns"]].drop_duplicates(["rank", "step"])
    step_end_ns = table[["rank", "step"]].merge(step_ends, how="left", on=["rank", "step"])["end_ns"].astype("Int64")
    is_unfinished = table["end_ns"].isna().to_numpy()
    until_ns = step_end_ns.fillna(end_ns).to_numpy(dtype=np.int64)
    to_ns = np.where(is_unfinished, until_ns, table["end_ns"].fillna(0).to_numpy(dtype=np.int64))
    from_ns = table["start_ns"].fillna(table["launch_ns"]).to_numpy(dtype=np.int64)
    return table.reset_index(drop=True).assign(
        from_ns=from_ns - begin_ns, to_ns=to_ns - begin_ns, is_unfinished=is_unfinished
    )


def _buckets_of_gradients(trace: Trace) -> npt.NDArray[np.int64]:
    """The bucket of each gradient's parameter, or -1 if no plan says."""
    keys = ["model", "plan_epoch", "parameter"]
    known = trace.plans[[*keys, "bucket"]].drop_duplicates(keys)
    if known.empty:
        return np.full(len(trace.gradients), -1, dtype=np.int64)
    found = trace.gradients[keys].merge(known.astype("int64"), how="left", on=keys)["bucket"]
    return found.fillna(-1).to_numpy(dtype=np.int64)


def _of_rank(table: pd.DataFrame, rank: int) -> npt.NDArray[np.int64]:
    return np.flatnonzero(table["rank"].to_numpy() == rank)


def _phases(phases: pd.DataFrame, rank: int, begin_ns: int) -> SpanIndex:
    rows = _of_rank(phases, rank)
    starts_ns, ends_ns = phases["start_ns"].to_numpy()[rows], phases["end_ns"].to_numpy()[rows]
    categories = phases["phase"].cat.codes.to_numpy()[rows]
    return index_spans(starts_ns - begin_ns, ends_ns - begin_ns, categories, rows)


def _gradients(gradients: pd.DataFrame, buckets: npt.NDArray[np.int64], rank: int, begin_ns: int) -> SpanIndex:
    rows = _of_rank(gradients, rank)
    ready_ns = gradients["ready_ns"].to_numpy()[rows] - begin_ns
    return index_spans(ready_ns, ready_ns, bucket_categories(buckets[rows]), rows)


def _buckets(collectives: pd.DataFrame, copies: pd.DataFrame, rank: int, begin_ns: int) -> SpanIndex:
    waits = _of_rank(collectives, rank)
    waits = waits[collectives["ready_ns"].notna().to_numpy()[waits]]
    moved = _of_rank(copies, rank)
    starts_ns = collectives["ready_ns"].iloc[waits].to_numpy(dtype=np.int64)
    launched_ns = collectives["launch_ns"].to_numpy()[waits]
    copies_start_ns, copies_end_ns = copies["start_ns"].to_numpy()[moved], copies["end_ns"].to_numpy()[moved]
    buckets = np.concatenate([collectives["bucket"].to_numpy()[waits], copies["bucket"].to_numpy()[moved]])
    return index_spans(
        np.concatenate([starts_ns, copies_start_ns]) - begin_ns,
        np.concatenate([launched_ns, copies_end_ns]) - begin_ns,
        bucket_categories(buckets),
        np.concatenate([waits, moved + len(collectives)]),
    )


def _communication(collectives: pd.DataFrame, rank: int) -> SpanIndex:
    rows = _of_rank(collectives, rank)
    from_ns, to_ns = collectives["from_ns"].to_numpy()[rows], collectives["to_ns"].to_numpy()[rows]
    return index_spans(from_ns, to_ns, bucket_categories(collectives["bucket"].to_numpy()[rows]), rows)
