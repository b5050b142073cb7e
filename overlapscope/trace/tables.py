"""Records of one rank -> tidy tables: one row per observation, times in nanoseconds of the rank's own clock.

========== ====================================================================================================
steps      rank, step, start_ns, end_ns
phases     rank, model, step, phase, start_ns, end_ns, no_sync
gradients  rank, model, step, plan_epoch, parameter, ready_ns
copies     rank, model, step, plan_epoch, bucket, direction ("in", "out"), start_ns, end_ns
collectives rank, model, group, step, plan_epoch, plan_hash, bucket (-1: none), op, dtype, elements, bytes,
           call_site, ready_ns, launch_ns, start_ns, end_ns, end_uncertainty_ns, start_is_bound
incidents  rank, step, incident, time_ns
pauses     rank, step, generation, start_ns, end_ns
segments   rank, model, step, plan_epoch, segment (its line in ``segments.jsonl``), start_ns, end_ns
========== ====================================================================================================

``ready_ns`` is missing where no bucket is concerned, ``start_ns`` and ``end_ns`` of a collective if it was launched
but never seen to complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.trace.clock import ClockMap
from overlapscope.trace.format import DTYPE_BYTES, DTYPES, NO_INDEX, OPS, Flag, Kind, Phase
from overlapscope.trace.log import Records
from overlapscope.trace.turns import turns

TABLES: Final = ("steps", "phases", "gradients", "copies", "collectives", "incidents", "pauses", "segments")
"""Names of the tables that ``rank_tables`` makes."""

PHASE_NAMES: Final = tuple(phase.name.lower() for phase in Phase)

_DTYPE_BYTES: Final = np.array([DTYPE_BYTES[name] for name in DTYPES], dtype=np.int64)


_TIMES: Final = ("start_ns", "end_ns", "ready_ns", "launch_ns", "time_ns")
"""Columns that hold moments; other columns of nanoseconds hold durations."""


def rank_tables(records: Records, rank: int, *, are_newest: bool = False) -> dict[str, pd.DataFrame]:
    """Turn the records of one rank into tables.

    Args:
        records: in the order of their sequence numbers.
        are_newest: they may begin in the middle of a step.
    """
    records = drop_steps_cut_by_ring(records, are_newest=are_newest)
    by_kind = {kind: records[records["kind"] == kind] for kind in Kind}
    return {
        "steps": _frame(
            rank,
            step=by_kind[Kind.STEP]["step"],
            start_ns=by_kind[Kind.STEP]["start_ns"],
            end_ns=by_kind[Kind.STEP]["end_ns"],
        ),
        "phases": _phases(by_kind[Kind.PHASE], rank),
        "gradients": _frame(
            rank,
            **_place(by_kind[Kind.GRADIENT_READY]),
            parameter=by_kind[Kind.GRADIENT_READY]["index"],
            ready_ns=by_kind[Kind.GRADIENT_READY]["end_ns"],
        ),
        "copies": _copies(by_kind[Kind.COPY_IN], by_kind[Kind.COPY_OUT], rank),
        "collectives": _collectives(by_kind[Kind.LAUNCH], by_kind[Kind.COLLECTIVE], by_kind[Kind.BUCKET_READY], rank),
        "incidents": _frame(
            rank,
            step=by_kind[Kind.INCIDENT]["step"],
            incident=by_kind[Kind.INCIDENT]["index"],
            time_ns=by_kind[Kind.INCIDENT]["start_ns"],
        ),
        "pauses": _frame(
            rank,
            step=by_kind[Kind.PAUSE]["step"],
            generation=by_kind[Kind.PAUSE]["index"],
            start_ns=by_kind[Kind.PAUSE]["start_ns"],
            end_ns=by_kind[Kind.PAUSE]["end_ns"],
        ),
        "segments": _frame(
            rank,
            **_place(by_kind[Kind.SEGMENT]),
            segment=by_kind[Kind.SEGMENT]["index"],
            start_ns=by_kind[Kind.SEGMENT]["start_ns"],
            end_ns=by_kind[Kind.SEGMENT]["end_ns"],
        ),
    }


def on_clock(tables: dict[str, pd.DataFrame], clock: ClockMap) -> dict[str, pd.DataFrame]:
    """Tables with their times mapped to another clock."""
    return {name: table.assign(**_on_clock(table, clock)) for name, table in tables.items()}


def _on_clock(table: pd.DataFrame, clock: ClockMap) -> dict[str, pd.Series[int]]:
    times = table[[name for name in _TIMES if name in table]]
    moved = {name: pd.Series(clock(column.fillna(0)), dtype=column.dtype) for name, column in times.items()}
    return {str(name): column.mask(times[name].isna()) for name, column in moved.items()}


def drop_steps_cut_by_ring(records: Records, *, are_newest: bool = False) -> Records:
    """Drop the steps that a gap in the sequence numbers may have cut, or the beginning of the newest records.

    Device times are written late, in order, with a step's own record last. So before a gap only the steps that have
    ended are complete, and after it those that begin after it, as the records that are never late tell. The newest
    step stays if it has not ended: it is in no statistics, and shows where the rank stands.
    """
    stretch = np.concatenate([[0], np.cumsum(np.diff(records["sequence"].astype(np.int64)) > 1)])
    last = stretch[-1]
    if not last and not are_newest:
        return records
    step = records["step"].astype(np.int64)
    is_prompt = np.isin(records["kind"], (Kind.ENTER, Kind.LAUNCH))
    cut_up_to = np.full(last + 1, np.iinfo(np.int64).max)
    np.minimum.at(cut_up_to, stretch[is_prompt], step[is_prompt])
    if records["sequence"][0] == 1:
        cut_up_to[0] = -1
    # Steps are 32-bit numbers, so a stretch and a step share 64 bits without loss.
    place, is_end = (stretch << 32) | step, records["kind"] == Kind.STEP
    has_ended = (stretch == last) | np.isin(place, place[is_end])
    is_newest = (step == step.max()) & (stretch == last) & ~np.any(is_end & (step == step.max()))
    return records[(step > cut_up_to[stretch]) & has_ended | is_newest]


def _frame(rank: int, **columns: Any) -> pd.DataFrame:
    frame = pd.DataFrame(columns)
    for name, values in frame.items():
        if values.dtype.kind == "u":
            frame[name] = values.astype(np.int64)
    frame.insert(0, "rank", np.full(len(frame), rank, dtype=np.int64))
    return frame


def _categories(numbers: npt.NDArray[Any], names: Sequence[str]) -> pd.Categorical[str]:
    return pd.Categorical.from_codes(numbers.astype(np.int8), categories=pd.Index(names))


def _place(records: Records) -> dict[str, npt.NDArray[Any]]:
    return {"model": records["model"], "step": records["step"], "plan_epoch": records["plan_epoch"]}


def _phases(records: Records, rank: int) -> pd.DataFrame:
    return _frame(
        rank,
        model=records["model"],
        step=records["step"],
        phase=_categories(records["index"], PHASE_NAMES),
        start_ns=records["start_ns"],
        end_ns=records["end_ns"],
        no_sync=(records["flags"] & Flag.NO_SYNC) != 0,
    )


def _copies(copies_in: Records, copies_out: Records, rank: int) -> pd.DataFrame:
    records = np.concatenate([copies_in, copies_out])
    direction = np.repeat(np.array([0, 1], dtype=np.int8), [len(copies_in), len(copies_out)])
    return _frame(
        rank,
        **_place(records),
        bucket=records["index"],
        direction=_categories(direction, ["in", "out"]),
        start_ns=records["start_ns"],
        end_ns=records["end_ns"],
    )


def _collectives(launches: Records, completions: Records, readies: Records, rank: int) -> pd.DataFrame:
    """One row per launch; the completion and the bucket's readiness are those of the same turn in the same step.

    What is gathered are parameters, for which no gradient has to be ready.
    """
    elements = launches["elements"].astype(np.int64)
    done = _of_same_turn(launches, completions, match_op=True)
    ready = np.full(len(launches), -1)
    for op in set(np.unique(launches["op"]).tolist()) - {OPS.index("all_gather")}:
        of_op = launches["op"] == op  # a bucket may take several operations, each of which has a first turn
        ready[of_op] = _of_same_turn(launches[of_op], readies, match_op=False)
    uncertainty = _taken(completions["end_uncertainty_ns"].astype(np.int64), done)
    is_bound = _taken((completions["flags"] & Flag.START_IS_LOWER_BOUND).astype(np.int64), done)
    return _frame(
        rank,
        model=launches["model"],
        group=launches["group"],
        step=launches["step"],
        plan_epoch=launches["plan_epoch"],
        plan_hash=launches["plan_hash"],
        bucket=np.where(launches["index"] == NO_INDEX, -1, launches["index"].astype(np.int64)),
        op=_categories(launches["op"], OPS),
        dtype=_categories(launches["dtype"], DTYPES),
        elements=elements,
        bytes=elements * _DTYPE_BYTES[launches["dtype"]],
        call_site=launches["call_site"],
        ready_ns=_taken(readies["end_ns"], ready),
        launch_ns=launches["start_ns"],
        start_ns=_taken(completions["start_ns"], done),
        end_ns=_taken(completions["end_ns"], done),
        end_uncertainty_ns=uncertainty.fillna(0).astype("int64"),
        start_is_bound=(is_bound.fillna(0) != 0).to_numpy(dtype=bool),
    )


def _of_same_turn(launches: Records, others: Records, *, match_op: bool) -> npt.NDArray[Any]:
    """The position of each launch's counterpart in ``others``, or -1."""
    fields = ["model", "step", "index"] + (["op"] if match_op else [])
    sides = [[records[field] for field in fields] for records in (launches, others)]
    keys = [np.concatenate(pair) for pair in zip(*([*side, turns(*side)] for side in sides), strict=True)]
    is_other = np.arange(len(keys[0])) >= len(launches)
    order = np.lexsort((is_other, *keys))
    # Keys are told apart by their turn, so equal neighbours are a launch and its counterpart.
    is_pair = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    position = np.full(len(launches), -1)
    position[order[:-1][is_pair]] = order[1:][is_pair] - len(launches)
    return position


def _taken(values: npt.NDArray[Any], positions: npt.NDArray[Any]) -> pd.Series[int]:
    """``values[positions]`` as nullable integers, missing where the position is -1."""
    if not len(values):
        return pd.Series(pd.NA, index=range(len(positions)), dtype="Int64")
    return pd.Series(values[positions]).astype("Int64").mask(pd.Series(positions < 0))
