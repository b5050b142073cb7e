"""A recording as tracks for trace viewers: slices that never overlap, counters, and the links of related slices.

Viewers take overlapping slices of a track for nested calls, and misdraw those that are not nested. So slices that
overlap, such as two concurrent all-reduces, are put on separate tracks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.breakdown.arrivals import compute_arrivals, match_collectives
from overlapscope.breakdown.lanes import LaneCache, SpanIndex, buckets_of_gradients, index_spans
from overlapscope.breakdown.spans import Int64Array
from overlapscope.breakdown.text import PHASE_LABELS
from overlapscope.trace.off_steps import find_off_spans
from overlapscope.trace.recording import Trace

COUNTERS: Final = {"exposed communication": "exposed_ns", "hidden communication": "hidden_ns"}
"""Column of the step-time breakdown that each counter shows for every step, by the name of the counter."""

_NON_FACT_COLUMNS: Final = ("start_ns", "end_ns", "name", "way", "together")
"""Columns of slices that are not facts."""

_BUCKET: Final = ["rank", "model", "step", "bucket"]
_PLAN: Final = ["model", "plan_epoch", "bucket"]
_PARAMETERS_NAMED: Final = 8
_REDUCES: Final = ("all_reduce", "reduce_scatter")
"""Operations by which the gradients of a bucket are averaged."""


class Slice(NamedTuple):
    """A slice as it is written to a file."""

    start_ns: int
    end_ns: int
    name: str
    facts: dict[str, Any]
    """Properties that are known, as plain Python values."""
    links: tuple[str, ...]
    """Ids of flows: arrows lead from each slice of a flow to the next."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Track:
    """A row of a viewer: slices that don't overlap, in order of start."""

    rank: int
    name: str
    row: int
    """Index from 0 among the tracks of the same name."""
    slices: pd.DataFrame
    """start_ns, end_ns (of the common clock), name, and a column for each fact, NA where it is unknown.

    Slices of a rank with the same ``way`` are stages of one reduction of a bucket, slices of several ranks with the
    same ``together`` are one collective; both are NA where a slice has no related ones.
    """
    is_instants: bool
    """True if each slice is a point in time, without a duration."""

    def __iter__(self) -> Iterator[Slice]:
        columns = {str(name): _to_python(column) for name, column in self.slices.items()}
        facts = [(name, values) for name, values in columns.items() if name not in _NON_FACT_COLUMNS]
        nothing = [None] * len(self.slices)
        ways, together = columns.get("way", nothing), columns.get("together", nothing)
        for at, times in enumerate(zip(columns["start_ns"], columns["end_ns"], columns["name"], strict=True)):
            known = {name: values[at] for name, values in facts if values[at] is not None}
            links = {f"way {self.rank} {ways[at]}": ways[at], f"together {together[at]}": together[at]}
            yield Slice(*times, known, tuple(link for link, number in links.items() if number is not None))


@dataclass(frozen=True, eq=False, kw_only=True)
class CounterTrack:
    """A counter of a rank, with a value for each step."""

    rank: int
    name: str
    samples: pd.DataFrame
    """time_ns (start of the step), value (milliseconds)."""


class Tracks:
    """The tracks of a recording.

    Args:
        analysis: analysis of the recording.
        steps: slice of step numbers; only slices that overlap these steps in time are included.
    """

    def __init__(self, analysis: Analysis, steps: slice = slice(None)) -> None:
        trace = analysis.trace
        self._steps = trace.steps[_is_in(trace.steps["step"], steps)]
        self._is_all = steps == slice(None)
        self._figures = analysis.summary.figures
        self._lanes = LaneCache(trace)
        collectives = _collectives(trace)
        self._of_lane = {
            "phases": _phases(trace),
            "gradients": _gradients(trace),
            "buckets": pd.concat([_waits(collectives), _copies(trace, collectives)], ignore_index=True),
            "communication": collectives.drop(columns=["rank", "plan_epoch"]),
        }
        self._others = {
            "rounds": _rounds(trace),
            "garbage collection": trace.pauses.assign(
                name="collection of generation " + trace.pauses["generation"].astype(str)
            ),
            "recording": _off_spans(trace),
            "own collectives": trace.user_collectives.assign(name="waits for a collective of the script"),
        }

    def tracks_of_rank(self, rank: int) -> Iterator[Track | CounterTrack]:
        """Generate the tracks of a rank, from top to bottom; none if it has none of the steps."""
        steps = self._steps[self._steps["rank"] == rank]
        if steps.empty and not self._is_all:
            return
        whole = np.iinfo(np.int64)
        window = (whole.min, whole.max) if self._is_all else (int(steps["start_ns"].min()), int(steps["end_ns"].max()))
        names = "step " + steps["step"].astype(str)
        yield from _stack_tracks(rank, "steps", steps[["start_ns", "end_ns", "step"]].assign(name=names))
        timeline = self._lanes.timeline([rank])
        for lane in timeline.lanes:
            facts = self._of_lane[lane.name]
            yield from _tracks(rank, lane.name, lane.spans, facts, timeline.begin_ns, window, lane.is_instants)
        for name, table in self._others.items():
            own = table[(table["rank"] == rank) & _overlaps_window(table["start_ns"], table["end_ns"], window)]
            yield from _stack_tracks(rank, name, own.drop(columns="rank"))
        figures = self._figures[self._figures["rank"] == rank].merge(steps[["step", "start_ns"]], on="step")
        for name, figure in COUNTERS.items():
            samples = pd.DataFrame({"time_ns": figures["start_ns"], "value": figures[figure] / 1e6})
            yield CounterTrack(rank=rank, name=name, samples=samples.sort_values("time_ns", ignore_index=True))


def _off_spans(trace: Trace) -> pd.DataFrame:
    """Return the spans in which recording was off, until it was on again or, at the end, to the last event."""
    begun = trace.modes[["rank", "time_ns", "every"]].itertuples(index=False, name=None)
    times_ns = pd.concat([trace.steps["end_ns"], trace.modes["time_ns"]])
    last_ns = int(times_ns.max()) if len(times_ns) else 0
    return pd.DataFrame(
        [(rank, start_ns, end_ns or last_ns, "recording is off") for rank, start_ns, end_ns in find_off_spans(begun)],
        columns=["rank", "start_ns", "end_ns", "name"],
    ).astype({"rank": "int64", "start_ns": "int64", "end_ns": "int64"})


def _to_python(column: pd.Series[Any]) -> list[Any]:
    """Convert a column to Python values, None where they are missing."""
    return column.astype("object").where(column.notna(), None).tolist()


def _is_in(numbers: pd.Series[int], which: slice) -> pd.Series[bool]:
    first = 0 if which.start is None else which.start
    return (numbers >= first) & (numbers < (np.inf if which.stop is None else which.stop))


def _tracks(
    rank: int,
    name: str,
    spans: SpanIndex,
    facts: pd.DataFrame,
    begin_ns: int,
    window: tuple[int, int],
    is_instants: bool = False,
) -> Iterator[Track]:
    """Generate a track for each row of a lane.

    Args:
        facts: table of the facts, which the spans refer to by its rows.
        begin_ns: time that is 0 in the spans.
        window: (start, end); slices outside are left out.
    """
    near = _overlaps_window(spans.starts_ns + begin_ns, spans.ends_ns + begin_ns, window)
    for row in np.unique(spans.stack[near]).tolist():
        at = np.flatnonzero(near & (spans.stack == row))
        times = {"start_ns": spans.starts_ns[at] + begin_ns, "end_ns": spans.ends_ns[at] + begin_ns}
        slices = facts.iloc[spans.rows[at]].reset_index(drop=True).assign(**times)
        yield Track(rank=rank, name=name, row=row, slices=slices, is_instants=is_instants)


def _overlaps_window(starts_ns: Any, ends_ns: Any, window: tuple[int, int]) -> Any:
    """Return a mask of the spans that overlap the window."""
    return ((ends_ns > window[0]) | (starts_ns >= window[0])) & (starts_ns < window[1])


def _stack_tracks(rank: int, name: str, table: pd.DataFrame) -> Iterator[Track]:
    starts_ns, ends_ns = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    spans = index_spans(starts_ns, ends_ns, np.zeros(len(table)), np.arange(len(table)))
    whole = np.iinfo(np.int64)
    yield from _tracks(rank, name, spans, table, 0, (whole.min, whole.max))


def _phases(trace: Trace) -> pd.DataFrame:
    names = trace.phases["phase"].astype(str).map(PHASE_LABELS)
    return trace.phases[["step", "model", "no_sync"]].assign(name=names)


def _gradients(trace: Trace) -> pd.DataFrame:
    gradients, keys = trace.gradients, ["model", "plan_epoch", "parameter"]
    known = trace.plans.drop_duplicates(keys)[[*keys, "name"]].astype(dict.fromkeys(keys, "int64"))
    names = gradients[keys].merge(known, on=keys, how="left")["name"].to_numpy()
    unnamed = "parameter " + gradients["parameter"].astype(str)
    return gradients[["step", "model"]].assign(
        name=pd.Series(names, index=gradients.index).fillna(unnamed) + " is ready",
        bucket=_negative_to_missing(buckets_of_gradients(gradients, trace.plans)),
    )


def _collectives(trace: Trace) -> pd.DataFrame:
    """Return name and facts of each row of ``trace.collectives``."""
    table = trace.collectives
    bucket = _negative_to_missing(table["bucket"].to_numpy())
    op = table["op"].astype(str)
    is_of_bucket = bucket.notna().to_numpy()
    names = op.where(~is_of_bucket, op + " of bucket " + bucket.astype(str))
    is_over = table["end_ns"].notna()
    facts = table[["rank", "plan_epoch", "step", "model", "group", "dtype", "elements", "bytes"]].assign(
        name=names.where(is_over, names + ", not completed"),
        bucket=bucket,
        parameters=_parameters(trace, table.assign(bucket=bucket)),
        call_site=_call_sites(trace),
        way=_negative_to_missing(np.where(is_of_bucket & op.isin(_REDUCES), np.arange(len(table)), -1)),
        together=_negative_to_missing(np.full(len(table), -1)),
        start_is_bound=table["start_is_bound"],
        end_uncertainty_ns=table["end_uncertainty_ns"],
    )
    matched = match_collectives(trace)
    rows, arrivals = matched.rows.ravel(), compute_arrivals(matched)
    for column in ("wait_ns", "transfer_ns", "last_rank", "busbw_bytes_per_s"):
        facts[column] = pd.Series(arrivals[column].to_numpy(), index=facts.index[rows]).reindex(facts.index)
    facts = facts.astype(dict.fromkeys(("wait_ns", "transfer_ns", "last_rank"), "Int64"))
    if matched.rows.shape[1] > 1:
        number = np.repeat(np.arange(len(matched.rows)), matched.rows.shape[1])
        if matched.groups:  # the ranks of a group have the same last rank
            number = number * (int(matched.ranks.max()) + 1) + arrivals["last_rank"].to_numpy()
        facts.loc[facts.index[rows], "together"] = number
    return facts


def _waits(collectives: pd.DataFrame) -> pd.DataFrame:
    """Return name and facts of the wait for launch of each collective's bucket."""
    names = "bucket " + collectives["bucket"].astype(str) + " waits for its launch"
    facts = collectives[["step", "model", "bucket", "bytes", "dtype", "parameters", "way"]].assign(name=names)
    return facts.astype({"bytes": "Int64"})  # nullable: copies have none


def _copies(trace: Trace, collectives: pd.DataFrame) -> pd.DataFrame:
    """Return name and facts of each row of ``trace.copies``.

    The n-th copy of a bucket in a step belongs to its n-th reduction, in either direction.
    """
    copies = trace.copies
    occurrence_keys = [*_BUCKET, "occurrence"]
    reduced = collectives[collectives["way"].notna()]
    reduced = reduced.assign(occurrence=reduced.groupby(_BUCKET).cumcount())[[*occurrence_keys, "way"]]
    occurrence = copies.groupby([*_BUCKET, "direction"], observed=True).cumcount()
    way = (
        copies[_BUCKET]
        .assign(occurrence=occurrence)
        .merge(reduced.astype(dict.fromkeys(occurrence_keys, "int64")), on=occurrence_keys, how="left")
    )
    return copies[["step", "model", "bucket"]].assign(
        name="bucket " + copies["bucket"].astype(str) + " is copied " + copies["direction"].astype(str),
        parameters=_parameters(trace, copies),
        way=way["way"].set_axis(copies.index),
    )


def _rounds(trace: Trace) -> pd.DataFrame:
    table = trace.segments
    of = table["rounds"].where(table["rounds"] > 0).astype("Int64").astype(str).replace("<NA>", "?")
    name = table["phase"] + " of bucket " + table["bucket"].astype(str) + ", round " + table["round"].astype(str)
    return table.drop(columns=["plan_epoch", "lane", "phase", "round", "rounds"]).assign(name=name + " of " + of)


def _parameters(trace: Trace, table: pd.DataFrame) -> pd.Series[Any]:
    """Return the parameters of each row's bucket as text."""
    by_bucket = trace.plans.sort_values("position").groupby(_PLAN)["name"].agg(_join_first_names)
    keys = pd.MultiIndex.from_frame(table[_PLAN].astype("Int64").fillna(-1).astype("int64"))
    return pd.Series(by_bucket.reindex(keys).to_numpy(), index=table.index, dtype="object")


def _join_first_names(names: pd.Series[str]) -> str:
    more = len(names) - _PARAMETERS_NAMED
    return ", ".join(names.iloc[:_PARAMETERS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _call_sites(trace: Trace) -> pd.Series[Any]:
    """Return the call site of each collective as text: file, line and function."""
    sites = trace.call_sites
    text = sites["file"] + ":" + sites["line"].astype(str) + " (" + sites["function"] + ")"
    known = text.set_axis(pd.MultiIndex.from_frame(sites[["rank", "call_site"]]))
    known = known[~known.index.duplicated()]
    keys = pd.MultiIndex.from_frame(trace.collectives[["rank", "call_site"]].astype("int64"))
    return pd.Series(known.reindex(keys).to_numpy(), index=trace.collectives.index, dtype="object")


def _negative_to_missing(numbers: Int64Array) -> pd.Series[int]:
    """Convert to nullable integers, with negative numbers as NA."""
    series = pd.Series(numbers).astype("Int64")
    return series.mask(series < 0)
