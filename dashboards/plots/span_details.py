"""Details of one span of the timeline: the numbers in its tooltip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from overlapscope.breakdown.arrivals import Arrival, find_arrival
from overlapscope.breakdown.lanes import Lane
from overlapscope.breakdown.text import PHASE_LABELS
from overlapscope.trace.recording import Trace


@dataclass(frozen=True, kw_only=True)
class SpanDetails:
    """Details of one span. Times are nanoseconds from when the first rank began its step, None where unknown."""

    what: str
    """A phase, "gradient ready", "wait for launch", "copy in", "copy out", or the name of a collective."""
    rank: int
    step: int
    step_is_known: bool
    """True if the start of the step was recorded; otherwise times count from the start of the recording."""
    start_ns: int
    end_ns: int | None
    """End of the span; None if it was never seen to end."""
    bucket: int | None = None
    parameters: tuple[str, ...] = ()
    bytes: int | None = None
    dtype: str | None = None
    no_sync: bool = False
    ready_ns: int | None = None
    launch_ns: int | None = None
    end_uncertainty_ns: int = 0
    """How much earlier than ``end_ns`` the span may have ended."""
    start_is_bound: bool = False
    """True if the span may have started later than ``start_ns``."""
    call_site: str | None = None
    arrival: Arrival | None = None
    """For a collective: which rank was last, and how long the transfer took after that."""

    @property
    def duration_ns(self) -> int | None:
        """Return the time from start to end, None if the span was never seen to end."""
        return None if self.end_ns is None else self.end_ns - self.start_ns


def get_span_details(trace: Trace, begin_ns: int, lane: Lane, row: int) -> SpanDetails:
    """Look up the details of a span.

    Args:
        begin_ns: Time 0 of the timeline, on the trace's clock.
        row: One of ``lane.spans.rows``.
    """
    if lane.name == "phases":
        return _phase(trace, begin_ns, trace.phases.iloc[row])
    if lane.name == "gradients":
        return _gradient(trace, begin_ns, trace.gradients.iloc[row])
    if lane.name == "communication":
        return _collective(trace, begin_ns, trace.collectives.iloc[row])
    if row < len(trace.collectives):
        return _wait(trace, begin_ns, trace.collectives.iloc[row])
    return _copy(trace, begin_ns, trace.copies.iloc[row - len(trace.collectives)])


def _phase(trace: Trace, begin_ns: int, row: pd.Series[Any]) -> SpanDetails:
    origin_ns, common = _find_origin(trace, begin_ns, row)
    return SpanDetails(
        what=PHASE_LABELS[str(row["phase"])],
        start_ns=int(row["start_ns"]) - origin_ns,
        end_ns=int(row["end_ns"]) - origin_ns,
        no_sync=bool(row["no_sync"]),
        **common,
    )


def _gradient(trace: Trace, begin_ns: int, row: pd.Series[Any]) -> SpanDetails:
    origin_ns, common = _find_origin(trace, begin_ns, row)
    ready_ns = int(row["ready_ns"]) - origin_ns
    plan = _plan_of(trace, row)
    found = plan[plan["parameter"] == row["parameter"]].head(1)
    about = (
        {"parameters": (f"parameter {row['parameter']}",)}
        if found.empty
        else {
            "bucket": int(found["bucket"].iloc[0]),
            "parameters": (str(found["name"].iloc[0]),),
            "bytes": int(found["bytes"].iloc[0]),
            "dtype": str(found["dtype"].iloc[0]),
        }
    )
    return SpanDetails(what="gradient ready", start_ns=ready_ns, end_ns=ready_ns, **common, **about)


def _wait(trace: Trace, begin_ns: int, row: pd.Series[Any]) -> SpanDetails:
    origin_ns, common = _find_origin(trace, begin_ns, row)
    return SpanDetails(
        what="wait for launch",
        start_ns=int(row["ready_ns"]) - origin_ns,
        end_ns=max(int(row["ready_ns"]), int(row["launch_ns"])) - origin_ns,  # a host may be ahead of its device
        bytes=int(row["bytes"]),
        dtype=str(row["dtype"]),
        **common,
        **_bucket(trace, row),
    )


def _copy(trace: Trace, begin_ns: int, row: pd.Series[Any]) -> SpanDetails:
    origin_ns, common = _find_origin(trace, begin_ns, row)
    return SpanDetails(
        what=f"copy {row['direction']}",
        start_ns=int(row["start_ns"]) - origin_ns,
        end_ns=int(row["end_ns"]) - origin_ns,
        **common,
        **_bucket(trace, row),
    )


def _collective(trace: Trace, begin_ns: int, row: pd.Series[Any]) -> SpanDetails:
    origin_ns, common = _find_origin(trace, begin_ns, row)

    def since_step(name: str) -> int | None:
        return None if pd.isna(row[name]) else int(row[name]) - origin_ns

    launch_ns = int(row["launch_ns"]) - origin_ns
    start_ns = since_step("start_ns")
    sites = trace.call_sites
    site = sites[(sites["rank"] == row["rank"]) & (sites["call_site"] == row["call_site"])].head(1)
    return SpanDetails(
        what=str(row["op"]).replace("_", "-"),
        start_ns=launch_ns if start_ns is None else start_ns,
        end_ns=since_step("end_ns"),
        bytes=int(row["bytes"]),
        dtype=str(row["dtype"]),
        ready_ns=since_step("ready_ns"),
        launch_ns=launch_ns,
        end_uncertainty_ns=int(row["end_uncertainty_ns"]),
        start_is_bound=bool(row["start_is_bound"]),
        arrival=None if pd.isna(row["end_ns"]) else find_arrival(trace, row),
        call_site=None if site.empty else f"{site['file'].iloc[0]}:{site['line'].iloc[0]}",
        **common,
        **_bucket(trace, row),
    )


def _find_origin(trace: Trace, begin_ns: int, row: pd.Series[Any]) -> tuple[int, dict[str, Any]]:
    """Return the moment that times count from, and the rank and step of the span."""
    rank, step = int(row["rank"]), int(row["step"])
    origin_ns = find_step_start_ns(trace, rank, step)
    is_known = origin_ns is not None
    return begin_ns if origin_ns is None else origin_ns, {"rank": rank, "step": step, "step_is_known": is_known}


def find_step_start_ns(trace: Trace, rank: int, step: int) -> int | None:
    """Return when the first rank began a step, of those on one clock with ``rank``; None if that was not recorded."""
    aligned = trace.aligned_ranks
    together = aligned if rank in aligned else (rank,)
    ranks, steps, starts_ns = (trace.steps[name].to_numpy() for name in ("rank", "step", "start_ns"))
    of_step = steps == step
    found_ns = starts_ns[of_step][np.isin(ranks[of_step], together)]
    return int(found_ns.min()) if len(found_ns) else None


def _plan_of(trace: Trace, row: pd.Series[Any]) -> pd.DataFrame:
    plans = trace.plans
    plan = plans[(plans["model"].to_numpy() == row["model"]) & (plans["plan_epoch"].to_numpy() == row["plan_epoch"])]
    hashes = plan["plan_hash"].unique()
    if len(hashes) <= 1:
        return plan
    # Ranks that disagree have different plans of one epoch; a record holds the first 32 bits of the hash of its own.
    own = [text for text in hashes if int(text[:8], 16) == row.get("plan_hash")]
    return plan[plan["plan_hash"] == (own[0] if own else hashes[0])]


def _bucket(trace: Trace, row: pd.Series[Any]) -> dict[str, Any]:
    """Return the bucket's number and parameters, and from the plan what the row itself doesn't have."""
    if row["bucket"] < 0:
        return {}
    plan = _plan_of(trace, row)
    members = plan[plan["bucket"] == row["bucket"]].sort_values("position")
    about: dict[str, Any] = {"bucket": int(row["bucket"]), "parameters": tuple(members["name"])}
    if "bytes" not in row.index and len(members):
        about |= {"bytes": int(members["bytes"].sum()), "dtype": str(members["dtype"].iloc[0])}
    return about
