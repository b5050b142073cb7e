"""Build the report of ``overlapscope tune``: what was run, what it took, and what to set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from overlapscope.interval import Interval
from overlapscope.report.report import Column, Report, Row, Section, Table
from overlapscope.tuning import text
from overlapscope.tuning.candidates import Choice
from overlapscope.tuning.verdict import Trained, TuningOutcome, measure_gain


def build_tuning_report(
    folder: Path, choice: Choice, base: Trained, tried: Sequence[Trained], outcome: TuningOutcome
) -> Report:
    """Build the report of a tuning.

    Args:
        base: Runs with the script's own settings.
        tried: Runs with other settings, those that failed included.
    """
    rows = [_row(base, base), *(_row(each, base) for each in tried)]
    code = text.format_code(outcome.best.setting) if outcome.verdict == "set" and outcome.best is not None else ""
    return Report(
        facts=(),
        sections=(
            Section(
                name="tuning",
                title="Tuning",
                headline=text.format_outcome(outcome, choice),
                preformatted=code,
                notes=(text.describe_own_settings(choice), *text.describe_kept(choice)),
                tables=(_tabulate(rows),),
                actions=(
                    *(f"{text.format_setting(each.setting)} failed: {each.failure}" for each in tried if each.failure),
                    f"Each run is a recording in {folder}: overlapscope serve {folder}",
                ),
            ),
        ),
        content={
            "schema": 1,
            "path": str(folder),
            "verdict": outcome.verdict.partition(":")[0],
            "sentence": text.format_outcome(outcome, choice),
            "code": code or None,
            "setting": asdict(outcome.best.setting) if code and outcome.best is not None else None,
            "gain": outcome.gain.gain if outcome.gain is not None else None,
            "reachable": choice.reachable,
            "own": dict(choice.own.sizes),
            "tried": [_content(each, base) for each in (base, *tried)],
        },
    )


def _tabulate(rows: Sequence[Row]) -> Table:
    return Table(
        name="runs",
        title="What was run",
        columns=(
            Column("setting", "setting", "text"),
            Column("runs", "runs", "count"),
            Column("steps", "steps", "count"),
            Column("step", "step", "ns"),
            Column("predicted", "predicted", "share"),
            Column("gain", "gain", "share"),
            Column("gain_range", "99 % interval", "text"),
        ),
        rows=tuple(rows),
    )


def _row(trained: Trained, base: Trained) -> Row:
    row: dict[str, Any] = {"setting": text.format_setting(trained.setting), "runs": len(trained.runs)}
    if trained.predicted is not None:
        row["predicted"] = trained.predicted.value
    if trained.runs:
        row["steps"] = trained.steps
        row["step"] = _mean_step_ns(trained)
        if trained is not base:
            gain = measure_gain(base, trained).gain
            row |= {"gain": gain.value, "gain_range": text.format_gain_range(gain)}
    return row


def _mean_step_ns(trained: Trained) -> float:
    return float(np.mean([run.steps_ns.mean() for run in trained.runs]))


def _content(trained: Trained, base: Trained) -> dict[str, Any]:
    gain: Interval | None = None
    if trained.runs and trained is not base:
        gain = measure_gain(base, trained).gain
    return {
        "setting": asdict(trained.setting),
        "runs": len(trained.runs),
        "steps": trained.steps,
        "step_ns": _mean_step_ns(trained) if trained.runs else None,
        "predicted_gain": trained.predicted,
        "gain": gain,
        "failure": trained.failure or None,
    }
