"""How much communication hides under computing, per rank and step: the only place that defines both.

*Compute* is the union of the phases forward, backward, optimizer and evaluation, and of the copies of reduced
buckets back into the gradients. The rest of finalise is waiting. *Communication* is the union of all collectives.
Their intersection is the *overlap*; what is left of communication is *exposed*.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.account.intervals import Int64Array, Intervals, intersection_measure, measure, union
from overlapscope.trace.reader import Trace
from overlapscope.trace.tables import PHASE_NAMES

COMPUTE_PHASES: Final = ("forward", "backward", "optimizer", "evaluation")


def overlap_by_step(trace: Trace) -> pd.DataFrame:
    """One row per rank and finished step, in the order of ``trace.steps``.

    What happened belongs to the step that it is recorded under. A collective that was never seen to complete has no
    end and is left out: it can only be among the last ones of a rank whose process died.

    Returns:
        rank, step, step_time_ns, compute_ns, communication_ns, overlap_ns, exposed_ns, overlap_ratio (overlap over
        communication; NaN without communication), and the time in each phase: data_wait_ns, forward_ns, backward_ns,
        finalise_ns, optimizer_ns, evaluation_ns.
    """
    steps = trace.steps
    copies_out = trace.copies[trace.copies["direction"] == "out"]
    completed = trace.collectives[trace.collectives["end_ns"].notna()]
    is_compute = trace.phases["phase"].isin(COMPUTE_PHASES)
    compute = _union_by_step(steps, pd.concat([_spans(trace.phases[is_compute]), _spans(copies_out)]))
    communication = _union_by_step(steps, _spans(completed))

    communication_ns = measure(communication, len(steps))
    overlap_ns = intersection_measure(communication, compute, len(steps))
    return pd.DataFrame(
        {
            "rank": steps["rank"].to_numpy(),
            "step": steps["step"].to_numpy(),
            "step_time_ns": (steps["end_ns"] - steps["start_ns"]).to_numpy(),
            "compute_ns": measure(compute, len(steps)),
            "communication_ns": communication_ns,
            "overlap_ns": overlap_ns,
            "exposed_ns": communication_ns - overlap_ns,
            "overlap_ratio": _ratio(overlap_ns, communication_ns),
            **{f"{name}_ns": _phase_ns(steps, trace.phases, name) for name in PHASE_NAMES},
        }
    )


def _phase_ns(steps: pd.DataFrame, phases: pd.DataFrame, name: str) -> Int64Array:
    return measure(_union_by_step(steps, _spans(phases[phases["phase"] == name])), len(steps))


def _spans(table: pd.DataFrame) -> pd.DataFrame:
    return table[["rank", "step", "start_ns", "end_ns"]].astype("int64")


def _union_by_step(steps: pd.DataFrame, spans: pd.DataFrame) -> Intervals:
    """The union of spans in each row of ``steps``; spans of a step that never ended are left out."""
    position, is_finished = _position_in(_keys(steps), _keys(spans))
    spans = spans[is_finished]
    return union(position[is_finished], spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy())


def _keys(table: pd.DataFrame) -> Int64Array:
    # Steps are 32-bit numbers in a record, so a rank and a step share 64 bits without loss.
    return (table["rank"].to_numpy(dtype=np.int64) << 32) | table["step"].to_numpy(dtype=np.int64)


def _position_in(keys: Int64Array, wanted: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Where each wanted key is among ``keys``, and whether it is there at all."""
    order = np.argsort(keys, kind="stable")
    place = np.searchsorted(keys, wanted, sorter=order)
    found = place < len(keys)
    position = np.zeros(len(wanted), dtype=np.int64)
    position[found] = order[place[found]]
    found[found] = keys[position[found]] == wanted[found]
    return position, found


def _ratio(part_ns: Int64Array, whole_ns: Int64Array) -> npt.NDArray[np.float64]:
    nothing = np.full(len(whole_ns), np.nan)
    return np.divide(part_ns, whole_ns, out=nothing, where=whole_ns > 0)
