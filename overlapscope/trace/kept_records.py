"""Recovery of records that are not in a rank's event log: from incident logs and gradient-ready files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.board import read_ready_times_ns
from overlapscope.trace.format import INCIDENT_PATTERN, Kind, gradient_ready_file
from overlapscope.trace.log import Problem, Records, read_log
from overlapscope.trace.seal import Manifest


def merge_incident_logs(records: Records, folder: Path, problems: list[Problem]) -> Records:
    """Merge the records of the event log and those that incident logs saved from being overwritten."""
    kept = [records]
    for path in sorted(folder.glob(INCIDENT_PATTERN)):
        try:
            _, incident_records, found = read_log(path)
        except OverlapScopeError as error:
            problems.append(Problem("error", str(error)))
            continue
        problems += found
        kept.append(incident_records)
    if len(kept) == 1:
        return records
    merged = np.concatenate(kept)
    _, first = np.unique(merged["sequence"], return_index=True)
    return merged[first]


def recover_from_ready_files(records: Records, folder: Path, seal: Manifest, problems: list[Problem]) -> Records:
    """Add records of ready gradients in buckets that never became ready: theirs had not been written yet."""
    if not len(records):
        return records
    kept = [records]
    plans = records[records["kind"] == Kind.PLAN]
    for model in np.unique(plans["model"]):
        if seal.is_damaged(gradient_ready_file(model)):
            continue
        ready_ns = np.asarray(read_ready_times_ns(folder, int(model), problems), dtype=np.int64)
        logged = records[(records["kind"] == Kind.GRADIENT_READY) & (records["model"] == model)]
        logged = logged[logged["index"] < len(ready_ns)]
        logged_ns = np.zeros(len(ready_ns), dtype=np.int64)
        np.maximum.at(logged_ns, logged["index"], logged["end_ns"])
        (parameters,) = np.nonzero(ready_ns > logged_ns)
        rows = np.zeros(len(parameters), dtype=records.dtype)
        rows["kind"], rows["index"], rows["model"] = Kind.GRADIENT_READY, parameters, model
        rows["start_ns"] = rows["end_ns"] = ready_ns[parameters]
        rows["step"], rows["sequence"] = records["step"].max(), records["sequence"][-1]
        rows["plan_epoch"] = plans["plan_epoch"][plans["model"] == model].max()
        kept.append(rows)
    return np.concatenate(kept) if len(kept) > 1 else records
