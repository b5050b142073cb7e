"""A recording, and a calibration if there is one -> the advice on bucket sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overlapscope.analysis.observations import lanes_of, observations_of, reduced_models
from overlapscope.errors import OverlapScopeError
from overlapscope.model.calibration import CALIBRATION_FILE, Calibration, read_calibration, spans_of
from overlapscope.model.fit import Fitted, fit
from overlapscope.model.plan_file import PlanFile, PlannedParameter
from overlapscope.model.recommend import Recommendation, recommend
from overlapscope.trace.reader import Trace


@dataclass(frozen=True, eq=False, kw_only=True)
class Advice:
    """The advice, and what it rests on."""

    fitted: Fitted
    recommendation: Recommendation
    parameters: tuple[PlannedParameter, ...]
    """By number, as plans have them."""
    is_calibrated: bool
    other_models: int
    """How many models of the run were left out, because they reduce less."""
    missing_ranks: int
    """Ranks that left no log. Time spent waiting for them looks like transfer."""

    def plan_file(self) -> PlanFile:
        """The best plan of all, for ``DistributedDataParallel(bucket_plan=...)``."""
        advice, names = self.recommendation, [parameter.name for parameter in self.parameters]
        return PlanFile(
            parameters=self.parameters,
            buckets=tuple(tuple(names[number] for number in bucket) for bucket in advice.free.buckets),
            bucket_cap_mb_list=advice.free_caps_mb,
            predicted={
                "step_ns": advice.free.step_ns.value,
                "step_low_ns": advice.free.step_ns.low,
                "step_high_ns": advice.free.step_ns.high,
                "step_now_ns": advice.now.step_ns.value,
            },
        )


def advise(trace: Trace, calibration: Path | None = None) -> Advice:
    """Fit the model to a recording and derive the advice.

    Args:
        calibration: a file of ``overlapscope calibrate``; if not given, the one in the folder of the recording, if any.

    Raises:
        OverlapScopeError: the recording doesn't hold enough, or the calibration is of another job.
    """
    observations = observations_of(trace)
    found = _calibration(trace, calibration, observations.world_size)
    alone, pairs = (spans_of(found.samples), spans_of(found.pairs)) if found is not None else (None, None)
    fitted = fit(observations, lanes=lanes_of(trace), calibration=alone, pairs=pairs)
    return Advice(
        fitted=fitted,
        recommendation=recommend(fitted, hosts=trace.ranks["host"].nunique()),
        parameters=_parameters(trace),
        is_calibrated=found is not None,
        other_models=len(reduced_models(trace)) - 1,
        missing_ranks=max(0, observations.world_size - len(trace.ranks)),
    )


def _calibration(trace: Trace, path: Path | None, world_size: int) -> Calibration | None:
    beside = trace.path / CALIBRATION_FILE
    if path is None and not beside.exists():
        return None
    path = path or beside
    found = read_calibration(path)
    if found.world_size != world_size:
        raise OverlapScopeError(
            f"{path}: was measured with {found.world_size} ranks, but the recording has {world_size}: calibrate with "
            f"as many, or move the file away"
        )
    hosts = trace.ranks["host"]
    is_known = len(hosts) == world_size and "unknown" not in set(hosts)
    if is_known and hosts.nunique() != len(set(found.hosts)):
        raise OverlapScopeError(
            f"{path}: was measured on {_hosts(set(found.hosts))}, but the recording is from {_hosts(set(hosts))}: "
            f"links within a host and between hosts differ, so calibrate where the training runs"
        )
    return found


def _hosts(names: set[str]) -> str:
    return "1 host" if len(names) == 1 else f"{len(names)} hosts"


def _parameters(trace: Trace) -> tuple[PlannedParameter, ...]:
    plans = trace.plans[trace.plans["model"] == reduced_models(trace)[0]]
    rows = plans.drop_duplicates("parameter").sort_values("parameter")
    columns = (rows[name].tolist() for name in ("name", "shape", "dtype", "bytes"))
    return tuple(
        PlannedParameter(name=str(name), shape=_shape(str(shape)), dtype=str(dtype), bytes=int(bytes_))
        for name, shape, dtype, bytes_ in zip(*columns, strict=True)
    )


def _shape(text: str) -> tuple[int, ...]:
    return () if text == "scalar" else tuple(int(length) for length in text.split("×"))
