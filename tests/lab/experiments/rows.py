"""Rows of results in which every number is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.lab.experiments.results import Conditions
from overlapscope.lab.experiments.trial import ExperimentTrial

MS = 1e6
CONDITIONS = Conditions(
    hosts=("host0", "host1"),
    device="cpu",
    versions={"torch": "2.9"},
    link_latency_ns=100_000.0,
    link_bytes_per_s=1.2e8,
    argv=("overlapscope", "lab", "run", "breakdown"),
)


def trial(repetition: int = 0, **settings: Any) -> ExperimentTrial:
    usual: dict[str, Any] = {"experiment": "breakdown", "model": "convnet", "ranks": 2, "backend": "gloo", "steps": 10}
    return ExperimentTrial(repetition=repetition, seed=repetition, **{**usual, **settings})


def rows_of(steps_ms: Sequence[float], measured: dict[str, Any] | None = None, **settings: Any) -> pd.DataFrame:
    """A row for each repetition, with these steps; all of a step is backward unless something else is given."""
    rows = []
    for repetition, step_ms in enumerate(steps_ms):
        done = trial(repetition, **settings)
        blocks = {f"{name}_ns": 0.0 for name in BLOCKS} | {"backward_ns": step_ms * MS}
        own = {"step_ns": step_ms * MS, **blocks, "steps_ns": [step_ms * MS] * 4, **(measured or {})}
        rows.append({"trial": done.key, **asdict(done), **CONDITIONS.columns(), **own, "failure": "", "recording": ""})
    return pd.DataFrame(rows)


def together(*parts: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True)
