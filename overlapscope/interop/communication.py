"""Communication in profiles, by process group and operation: how much, how much of it alone, and who came last.

This needs kernels and the names of collectives only, no steps: profiles of any job have it, also those of inference,
of tensor parallelism and of sharded models. Without a device, the backend's annotations stand for kernels, and
operators of the host for compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.breakdown.spans import Int64Array, merge_spans
from overlapscope.interop.kineto import Profile
from overlapscope.trace.clocks import MAX_DRIFT
from overlapscope.trace.communication import ENDS_TOGETHER, GroupCommunication
from overlapscope.trace.schema import DTYPE_BYTES

UNKNOWN_GROUP: Final = "unknown"
_MOST_SPREAD_NS: Final = 50_000
"""By how much the ends of the same collectives on two ranks vary at most, beside the drift of their clocks."""
_END_SKEW_NS: Final = 7_000
"""By how much the ends of one collective's kernels were seen to differ at most."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Communication of a profile, and how much of it was hidden under compute."""

    communication_ns: int
    """Time in which any collective ran."""
    hidden_ns: int
    """The part of ``communication_ns`` in which something was computed as well."""

    @property
    def exposed_ns(self) -> int:
        """Return the time in which there was communication only."""
        return self.communication_ns - self.hidden_ns


def compute_overlap(profile: Profile) -> Overlap:
    """Compute overlap as HolisticTraceAnalysis does: from unions of all kernels of a trace, without copies and memsets.

    The step-time breakdown counts a backward as compute from its beginning to its end, even while the device is idle
    because the host is late; this does not.

    Example: communication from 0 to 10 and other kernels from 4 to 20: 6 are hidden.
    """
    communication = merge_spans(_edges(_unmeasured_spans(profile)))
    return Overlap(
        communication_ns=_total_ns(communication),
        hidden_ns=int(_overlap_ns(communication, _find_compute(profile)).sum()),
    )


@dataclass(frozen=True, kw_only=True)
class BusyTime:
    """What a rank's time went to, by what ran: its parts sum to the time, in nanoseconds."""

    time_ns: int
    compute_ns: int
    """Time in which something was computed, beside communication or not."""
    exposed_ns: int
    """Time in which there was communication only."""

    @property
    def idle_ns(self) -> int:
        """Return the time in which nothing ran, or only copies."""
        return self.time_ns - self.compute_ns - self.exposed_ns


def divide_time(profile: Profile, window_ns: tuple[int, int] | None = None) -> BusyTime:
    """Divide the time of a profile, or a part of it, by what ran.

    Args:
        window_ns: start and end; by default from the first kernel to the end of the last.
    """
    compute, communication = _find_compute(profile), merge_spans(_edges(_unmeasured_spans(profile)))
    both = np.concatenate([compute, communication], axis=1)
    if not both.shape[1]:
        return BusyTime(time_ns=0, compute_ns=0, exposed_ns=0)
    window = np.array(window_ns or (both[0].min(), both[1].max()), dtype=np.int64)[:, np.newaxis]
    compute_ns, busy_ns = (int(_overlap_ns(window, union)[0]) for union in (compute, merge_spans(both)))
    time_ns = int(window[1, 0] - window[0, 0])
    return BusyTime(time_ns=time_ns, compute_ns=compute_ns, exposed_ns=busy_ns - compute_ns)


def find_collective_spans(profile: Profile) -> pd.DataFrame:
    """Return when the collectives of a profile ran.

    Returns:
        One row per collective in order of start: group (its title), name and group_size of the group, op, bytes,
        is_kernel, start_ns, end_ns, exposed_ns (time in which nothing was computed). Kernels whose launch is not in the
        profile have the group ``UNKNOWN_GROUP``.
    """
    found = _unmeasured_spans(profile)
    hidden_ns = _overlap_ns(_edges(found), _find_compute(profile))
    return found.assign(exposed_ns=found["end_ns"] - found["start_ns"] - hidden_ns)


def _unmeasured_spans(profile: Profile) -> pd.DataFrame:
    parts = [_kernel_spans(profile), _annotation_spans(profile)]
    filled = [part for part in parts if len(part)] or parts[:1]
    return pd.concat(filled, ignore_index=True).sort_values("start_ns", kind="stable", ignore_index=True)


def _kernel_spans(profile: Profile) -> pd.DataFrame:
    kernels = profile.kernels[profile.kernels["op"] != ""].reset_index(drop=True)
    known = kernels["id"].isin(profile.collectives["id"])
    # Each kernel without a launch is a collective of its own.
    key = kernels["id"].where(known, -2 - np.arange(len(kernels)))
    spans = kernels.groupby(key).agg(op=("op", "first"), start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
    spans = spans.sort_values("start_ns", kind="stable")
    calls = profile.collectives.drop_duplicates("id").set_index("id").reindex(spans.index)
    return _describe(calls.assign(op=calls["op"].fillna(spans["op"])), spans, is_kernel=True)


def _annotation_spans(profile: Profile) -> pd.DataFrame:
    """Return the spans of gloo's annotations, which it makes on threads of its own, one for each call.

    They begin in the order of the calls. If there are not as many of both, the n-th of an operation belongs to the n-th
    call of it; gloo makes a reduce-scatter of an all-reduce, and annotates it as that.
    """
    annotations, calls = profile.annotations, profile.collectives
    spans = annotations[~annotations["is_of_device"].astype(bool)].reset_index(drop=True)
    if len(spans) == len(calls):
        return _describe(calls, spans, is_kernel=False)
    calls = calls.assign(number=calls.groupby("op").cumcount()).set_index(["op", "number"], drop=False)
    own = pd.MultiIndex.from_arrays([spans["op"], spans.groupby("op").cumcount()])
    return _describe(calls.reindex(own).assign(op=spans["op"].to_numpy()), spans, is_kernel=False)


def _describe(calls: pd.DataFrame, spans: pd.DataFrame, *, is_kernel: bool) -> pd.DataFrame:
    """Return the collectives of n calls, some of which are unknown, and their spans."""
    is_known, description = calls["group"].notna(), calls["description"].fillna("")
    title = description.where(description != "undefined", "").str.removesuffix("_pg")
    title = title.where(title != "", calls["group"].fillna(""))
    elements = calls["elements"].fillna(0).to_numpy(dtype=np.int64)
    sizes = np.array([DTYPE_BYTES.get(dtype, 0) for dtype in calls["dtype"].fillna("")], dtype=np.int64)
    return pd.DataFrame(
        {
            "group": title.where(is_known, UNKNOWN_GROUP).to_numpy(),
            "name": calls["group"].fillna(UNKNOWN_GROUP).to_numpy(),
            "group_size": calls["group_size"].fillna(0).to_numpy(dtype=np.int64),
            "op": calls["op"].to_numpy(),
            "bytes": elements * sizes,
            "is_kernel": is_kernel,
            "start_ns": spans["start_ns"].to_numpy(dtype=np.int64),
            "end_ns": spans["end_ns"].to_numpy(dtype=np.int64),
        }
    )


def _find_compute(profile: Profile) -> Int64Array:
    """Return the union (2, n) of the spans in which something is computed."""
    if not has_device(profile):
        return profile.host_compute_ns
    is_compute = (profile.kernels["kind"] == "kernel") & (profile.kernels["op"] == "")
    return merge_spans(_edges(profile.kernels[is_compute]))


def has_device(profile: Profile) -> bool:
    """Return whether any kernel ran in a profile."""
    return bool((profile.kernels["kind"] == "kernel").any())


def _edges(spans: pd.DataFrame) -> Int64Array:
    return spans[["start_ns", "end_ns"]].to_numpy(dtype=np.int64).T


def _overlap_ns(spans_ns: Int64Array, union_ns: Int64Array) -> Int64Array:
    """Return how much (n,) of each span (2, n) is covered by a union (2, m) of others.

    Example: a union of 4 to 6 and 8 to 9 covers 2 of the span from 0 to 8.
    """
    if not union_ns.shape[1]:
        return np.zeros(spans_ns.shape[1], dtype=np.int64)
    lengths = union_ns[1] - union_ns[0]
    before = np.append(0, np.cumsum(lengths))

    def until(time_ns: Int64Array) -> Int64Array:
        index = np.searchsorted(union_ns[0], time_ns, side="right") - 1
        inside = np.clip(time_ns - union_ns[0][np.maximum(index, 0)], 0, lengths[np.maximum(index, 0)])
        covered: Int64Array = np.where(index < 0, 0, before[np.maximum(index, 0)] + inside)
        return covered

    return until(spans_ns[1]) - until(spans_ns[0])


def _total_ns(spans_ns: Int64Array) -> int:
    return int((spans_ns[1] - spans_ns[0]).sum())


def summarize_communication(spans: Mapping[int, pd.DataFrame], world_size: int) -> tuple[GroupCommunication, ...]:
    """Summarize the collectives of all ranks: those that take longest first.

    Args:
        spans: ``find_collective_spans`` of each rank, with a column ``is_bucket``.
        world_size: number of ranks of groups whose size is unknown.
    """
    parts = [own.assign(rank=rank, last_rank=-1, wait_ns=np.nan) for rank, own in spans.items() if len(own)]
    if not parts:
        return ()
    table = _compare_ranks(pd.concat(parts, ignore_index=True), world_size)
    found = []
    for (group, op, is_bucket), own in table.groupby(["group", "op", "is_bucket"], sort=False):
        by_rank = own.groupby("rank").agg(
            count=("op", "size"),
            bytes=("bytes", "sum"),
            time_ns=("end_ns", "sum"),
            start_ns=("start_ns", "sum"),
            exposed_ns=("exposed_ns", "sum"),
            wait_ns=("wait_ns", "sum"),
        )
        by_rank["time_ns"] -= by_rank.pop("start_ns")
        mean = by_rank.astype(np.float64).mean()
        is_compared = own["wait_ns"].notna()
        of = own.loc[is_compared, "rank"].value_counts()
        last = Counter(own.loc[own["rank"] == own["last_rank"], "rank"].tolist())
        found.append(
            GroupCommunication(
                group=str(group),
                op=str(op),
                is_bucket=bool(is_bucket),
                ranks=len(by_rank),
                count=float(mean["count"]),
                bytes=float(mean["bytes"]),
                time_ns=float(mean["time_ns"]),
                exposed_ns=float(mean["exposed_ns"]),
                wait_ns=float(mean["wait_ns"]) if is_compared.all() else None,
                last_ranks={str(rank): (count, int(of[rank])) for rank, count in last.most_common()},
            )
        )
    return tuple(sorted(found, key=lambda one: -(one.time_ns or 0.0)))


def _compare_ranks(table: pd.DataFrame, world_size: int) -> pd.DataFrame:
    """Fill in which rank was the last to start each collective, and for how long each rank waited for it.

    All ranks leave a collective together, so the last to come has the shortest kernel, whatever their clocks. Only
    groups are compared in which all ranks have the same operations and sizes, one by one.

    Example: kernels of 500, 480 and 20 µs: rank 2 was the last, and ranks 0 and 1 waited 480 and 460 µs for it. Of
    kernels of 20 and 21 µs neither is.
    """
    for _, of_group in table.groupby("name", sort=False):
        members = [own for _, own in of_group.groupby("rank")]
        is_whole = len(members) == (int(of_group["group_size"].max()) or world_size)
        if len(members) < 2 or not is_whole or not _are_alike(members):
            continue
        start_ns, end_ns = (np.stack([own[edge].to_numpy() for own in members]) for edge in ("start_ns", "end_ns"))
        time_ns = end_ns - start_ns
        ranks = np.array([int(own["rank"].iloc[0]) for own in members])
        together = (members[0]["op"].isin(ENDS_TOGETHER) & members[0]["is_kernel"]).to_numpy()
        if not _are_the_same(end_ns[:, together], is_named=bool(members[0]["name"].iloc[0] not in ("", UNKNOWN_GROUP))):
            continue
        wait_ns = np.where(together, time_ns - time_ns.min(axis=0), np.nan)
        shortest_ns = np.sort(time_ns, axis=0)[:2]
        is_clear = together & (shortest_ns[1] - shortest_ns[0] > _END_SKEW_NS)
        last = np.where(is_clear, ranks[time_ns.argmin(axis=0)], -1)
        for own, waits in zip(members, wait_ns, strict=True):
            table.loc[own.index, "wait_ns"] = waits
            table.loc[own.index, "last_rank"] = last
    return table


def _are_the_same(end_ns: Int64Array, *, is_named: bool) -> bool:
    """Return whether n collectives of R ranks are the same ones, by their ends (R, n) on the clock of each rank.

    Then two ranks see them end with the same difference, that of their clocks. Otherwise profiles began at different
    collectives, or the ranks are of different groups. Of a single collective only the group can tell.

    Example: ends of 10, 20, 40 ms on one rank and of 510, 520, 540 on another differ by 500 ms each time.
    """
    if end_ns.shape[1] < 2:
        return is_named
    apart_ns = end_ns - end_ns[0]
    spread_ns = apart_ns.max(axis=1) - apart_ns.min(axis=1)
    return bool((spread_ns <= _MOST_SPREAD_NS + MAX_DRIFT * np.ptp(end_ns, axis=1)).all())


def _are_alike(members: Sequence[pd.DataFrame]) -> bool:
    first = members[0][["op", "bytes"]].to_numpy()
    ops = first[:, 0]
    sizes_differ = np.isin(ops.astype(str), ["all_to_all"])
    for own in members[1:]:
        theirs = own[["op", "bytes"]].to_numpy()
        if len(theirs) != len(first) or (theirs[:, 0] != ops).any():
            return False
        if (theirs[:, 1] != first[:, 1])[~sizes_differ].any():
            return False
    return True
