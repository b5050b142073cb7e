"""Recordings of two ranks whose every step is given, for comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.compare.side import ComparisonSide, StepChoice
from overlapscope.trace.recording import Trace
from tests.breakdown.recordings import Rows, recording

MS = 1_000_000
PLAN = ((("a", "b"), 8), (("c",), 4))
"""Names of the parameters of each bucket, and bytes."""
Plan = Sequence[tuple[Sequence[str], int]]


def trace_of(
    steps: int = 40,
    *,
    forward_ms: Mapping[int, float] | float = 4,
    transfer_ms: Sequence[float] = (2, 3),
    plan: Plan = PLAN,
    plan_of_step: Mapping[int, int] | None = None,
    noise: float = 0.01,
    seed: int = 0,
    path: str = "made-up",
) -> Trace:
    """Steps of data wait 1 ms, forward, backward 3 ms, and finalize, in which buckets are reduced one after the other.

    Args:
        forward_ms: by step, 4 if a step is not in it; or of all.
        transfer_ms: of each bucket, which all ranks launch when backward is over.
        plan_of_step: epochs of the bucket plan, 0 if a step is not in it.
        noise: of forward, as a share.
    """
    luck = np.random.default_rng(seed)
    tables: dict[str, Rows] = {"steps": [], "phases": [], "collectives": []}
    now_ns = 0
    for step in range(steps):
        usual_ms = forward_ms if isinstance(forward_ms, int | float) else forward_ms.get(step, 4)
        forward_ns = round(usual_ms * MS * (1 + noise * luck.standard_normal()))
        edges_ns = now_ns + np.cumsum([0, MS, forward_ns, 3 * MS, round(sum(transfer_ms) * MS)])
        for rank in range(2):
            place = {"rank": rank, "step": step}
            tables["steps"].append(place | {"start_ns": now_ns, "end_ns": int(edges_ns[-1])})
            for number, phase in enumerate(("data_wait", "forward", "backward", "finalize")):
                span = {"start_ns": int(edges_ns[number]), "end_ns": int(edges_ns[number + 1])}
                tables["phases"].append(place | {"phase": phase} | span)
            begin_ns = int(edges_ns[3])
            epoch = (plan_of_step or {}).get(step, 0)
            for bucket, took_ms in enumerate(transfer_ms):
                end_ns = begin_ns + round(took_ms * MS)
                what = {"bucket": bucket, "bytes": plan[bucket][1], "plan_epoch": epoch, "launch_ns": begin_ns}
                tables["collectives"].append(place | what | {"ready_ns": begin_ns, "end_ns": end_ns})
                begin_ns = end_ns
        now_ns = int(edges_ns[-1])
    plans = pd.DataFrame(
        [
            {"model": 0, "plan_epoch": epoch, "bucket": bucket, "name": name, "shape": "1", "bytes": size // len(names)}
            for epoch in {0, *(plan_of_step or {}).values()}
            for bucket, (names, size) in enumerate(plan)
            for name in names
        ]
    )
    return replace(recording(**tables), plans=plans, path=Path(path))


def side_of(trace: Trace, choice: StepChoice | None = None) -> ComparisonSide:
    return ComparisonSide.of(Analysis(trace), choice or StepChoice())
