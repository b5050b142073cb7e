"""Recordings of a few nanoseconds, sensible or not, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import strategies as st

from overlapscope.breakdown.lanes import LaneCache, Timeline
from overlapscope.trace.recording import Trace, empty_trace
from overlapscope.trace.schema import OPS
from overlapscope.trace.tables import PHASE_NAMES

Rows = list[dict[str, Any]]
BACKENDS = ("gloo", "nccl")


def recording(
    *,
    steps: Rows,
    phases: Rows = (),  # type: ignore[assignment]
    collectives: Rows = (),  # type: ignore[assignment]
    copies: Rows = (),  # type: ignore[assignment]
    pauses: Rows = (),  # type: ignore[assignment]
    user_collectives: Rows = (),  # type: ignore[assignment]
    ranks: int = 2,
    world_size: int | None = None,
    backend: str = "gloo",
    device: str = "cpu",
    clocks: tuple[str, ...] = (),
) -> Trace:
    """A recording made of rows as in ``trace.tables``; what a row leaves out is 0, or missing."""
    trace = empty_trace(Path("made-up"), range(ranks))
    clock = [clocks[rank] if rank < len(clocks) else "same boot" for rank in range(ranks)]
    tables = {
        "ranks": trace.ranks.assign(clock=clock, device=device, boot="made-up", error_ns=0.0),
        "steps": _table(trace.steps, steps),
        "phases": _table(trace.phases, phases, phase=pd.CategoricalDtype(PHASE_NAMES)),
        "collectives": _table(trace.collectives, collectives, op=pd.CategoricalDtype(OPS)),
        "copies": _table(trace.copies, copies),
        "pauses": _table(trace.pauses, pauses),
        "user_collectives": _table(trace.user_collectives, user_collectives),
    }
    run = {"backend": backend, "world_size": world_size or ranks, "ranks": list(range(world_size or ranks))}
    return Trace(path=trace.path, run=run, problems=(), **{**_tables(trace), **tables})


def _tables(trace: Trace) -> dict[str, pd.DataFrame]:
    names = ("gradients", "incidents", "plans", "call_sites", "links", "segments", "modes")
    return {name: getattr(trace, name) for name in names}


def _table(like: pd.DataFrame, rows: Rows, **categories: pd.CategoricalDtype) -> pd.DataFrame:
    rows = list(rows)
    columns: dict[str, Any] = {}
    for name in like.columns:
        values = [row.get(name) for row in rows]
        if name in categories:
            columns[name] = pd.Categorical(values, dtype=categories[name])
        elif name in ("ready_ns", "start_ns", "end_ns") and "launch_ns" in like.columns:
            columns[name] = pd.array(values, dtype="Int64")
        elif isinstance(like[name].dtype, pd.CategoricalDtype):
            columns[name] = pd.Categorical(values, dtype=like[name].dtype)
        else:
            columns[name] = np.array([0 if value is None else value for value in values], dtype=np.int64)
    return pd.DataFrame(columns)


MOMENTS = st.integers(0, 40)
SPANS = st.tuples(MOMENTS, st.integers(0, 12)).map(lambda pair: {"start_ns": pair[0], "end_ns": sum(pair)})


@st.composite
def wild_recordings(draw: st.DrawFn) -> Trace:
    """Whatever could be in a file: phases that overlap, lie outside of steps, or have no end after their start."""
    ranks = draw(st.integers(1, 3))
    steps, phases = [], []
    for rank in range(ranks):
        edges = sorted(draw(st.lists(MOMENTS, min_size=2, max_size=4, unique=True)))
        for step, (start_ns, end_ns) in enumerate(pairwise(edges)):
            steps.append({"rank": rank, "step": step, "start_ns": start_ns, "end_ns": end_ns})
        found = draw(st.lists(st.sampled_from([*PHASE_NAMES, "finalize"]), max_size=6))
        phases += [{"rank": rank, "model": draw(st.integers(0, 1)), "phase": phase} | draw(SPANS) for phase in found]
    return _with_the_rest(draw, ranks, steps, phases)


@st.composite
def orderly_recordings(draw: st.DrawFn) -> Trace:
    """One phase after the other, in steps without a gap between them."""
    ranks = draw(st.integers(1, 3))
    steps, phases = [], []
    for rank in range(ranks):
        now_ns = begin_ns = draw(st.integers(0, 3))
        for step in range(draw(st.integers(1, 3))):
            for phase in draw(st.lists(st.sampled_from([None, *PHASE_NAMES, "finalize"]), min_size=1, max_size=5)):
                start_ns, now_ns = now_ns, now_ns + draw(st.integers(1, 6))
                if phase is not None:
                    model = draw(st.integers(0, 1))
                    place = {"rank": rank, "model": model, "step": step, "phase": phase}
                    phases.append(place | {"start_ns": start_ns, "end_ns": now_ns})
            steps.append({"rank": rank, "step": step, "start_ns": begin_ns, "end_ns": now_ns})
            begin_ns = now_ns
    return _with_the_rest(draw, ranks, steps, phases)


def _with_the_rest(draw: st.DrawFn, ranks: int, steps: Rows, phases: Rows) -> Trace:
    """Collectives, which need not have ended or be on every rank, copies and pauses; clocks that can't be compared."""
    copies, pauses, user_collectives = (
        [{"rank": rank} | one for rank in range(ranks) for one in draw(st.lists(SPANS, max_size=2))] for _ in "abc"
    )
    collectives: Rows = []
    for number in range(draw(st.integers(0, 6))):
        bucket = draw(st.sampled_from([-1, 0, 1, 2]))
        op = "broadcast" if bucket < 0 else draw(st.sampled_from(["all_reduce", "all_gather"]))
        what = {"step": number // 3, "bucket": bucket, "op": op}
        what |= {"model": draw(st.integers(0, 1)), "group": draw(st.integers(0, 1))}
        for rank in range(ranks):
            launch_ns, took_ns = draw(MOMENTS), draw(st.integers(-2, 20))
            ready_ns = draw(st.none() | MOMENTS) if bucket >= 0 else None
            if took_ns > -2:
                ended = {"end_ns": launch_ns + took_ns if took_ns >= 0 else None}
                began = {"launch_ns": launch_ns, "start_ns": draw(st.none() | MOMENTS), "ready_ns": ready_ns}
                collectives.append({"rank": rank} | began | what | ended)
    has_clock = [draw(st.integers(0, 5)) > 0 for _ in range(ranks)]
    return recording(
        steps=steps,
        phases=phases,
        collectives=collectives,
        copies=copies,
        pauses=pauses,
        user_collectives=user_collectives,
        ranks=ranks,
        world_size=ranks + (draw(st.integers(0, 5)) == 0),
        backend=draw(st.sampled_from(BACKENDS)),
        device=draw(st.sampled_from(["cpu", "cuda:0"])),
        clocks=tuple("same boot" if has else "none" for has in has_clock),
    )


def build_timeline(trace: Trace, ranks: Sequence[int] | None = None) -> Timeline:
    """Lanes of some ranks from top to bottom; by default of all, ascending."""
    return LaneCache(trace).timeline(sorted(trace.ranks["rank"].tolist()) if ranks is None else ranks)
