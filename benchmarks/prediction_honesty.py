"""Predictions of ``overlapscope recommend``, written down before the settings are run: do their intervals hold?

    python -m benchmarks.prediction_honesty FOLDER

For each model over each link, five bucket sizes other than DDP's default: the best one, and others spread over all.
They are predicted from one recording of 30 steps with ``--probe-buckets`` and no calibration, and the predictions are
written to FOLDER/honesty.jsonl, each at once; only then ``benchmarks.bucket_sweep`` measures them and the default with
torch's own DDP, and the measurements follow in the same file. Two models over two links are 20 settings. Of honest
predictions 17 to 19 of 20 measured step times are within the 90 % interval, and no advised gain is more than twice the
measured one. All of it takes about 10 minutes of a quiet machine with two cores, and needs root for the links.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.bucket_sweep import record, sweep
from benchmarks.sweep_file import Measured
from benchmarks.swept_training import MODELS, WORLD_SIZE, Setting
from overlapscope.advice.advice import advise
from overlapscope.analysis import Analysis
from overlapscope.bucket_model.partition import Buckets
from overlapscope.bucket_model.recommend import Recommendation
from overlapscope.interval import Interval
from overlapscope.trace.recording import read_trace
from tests.cluster.shaped_link import LINKS, ranks_over

SIZES: Final = 5
"""Settings of each model over each link."""
ROUNDS: Final = 4


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is predicted of a setting before it is run."""

    model: str
    link: str
    setting: Setting
    buckets: Buckets
    step_ns: Interval
    verdict: str
    """Of the whole advice, if this is the best size; else empty."""
    gain: Interval
    """Over DDP's default, as a share of its step."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prediction and its measurement."""

    predicted: Predicted
    measured_ns: float
    default_ns: float
    noise: float
    """Difference between odd and even blocks of the measurement, as a share."""

    @property
    def holds(self) -> bool:
        """Return whether the measured step time is within the interval."""
        return self.predicted.step_ns.low <= self.measured_ns <= self.predicted.step_ns.high

    @property
    def gain(self) -> float:
        """Return the gain as measured, over DDP's default."""
        return 1 - self.measured_ns / self.default_ns

    @property
    def promises_too_much(self) -> bool:
        """Return whether it was advised for more than twice of what it gains."""
        return self.predicted.verdict == "change" and self.predicted.gain.value > 2 * self.gain

    def __str__(self) -> str:
        """As a line of the table."""
        step, ms = self.predicted.step_ns, 1e6
        interval = f"{step.value / ms:7.1f} ({step.low / ms:.1f} to {step.high / ms:.1f})"
        noise = "-" if math.isnan(self.noise) else f"{self.noise:.1%}"
        marks = ["" if self.holds else "outside", "promises too much" if self.promises_too_much else ""]
        return (
            f"{self.predicted.model:<14}{self.predicted.link:<13}{self.predicted.setting.label:>8}  {interval:<28}"
            f"{self.measured_ns / ms:>8.1f}{step.value / self.measured_ns - 1:>+8.1%}{noise:>7}  "
            f"{self.predicted.gain.value:+.1%} / {self.gain:+.1%}  {' '.join(filter(None, marks))}"
        )


def predict(model: str, link: str, found: Recommendation) -> list[Predicted]:
    """Predict the best size, and others that are spread over all; DDP's default is none of them."""
    curve = found.curve
    others = [index for index, size in enumerate(curve.sizes) if size.buckets != found.default.buckets]
    spread = [others[int(at)] for at in np.linspace(0, len(others) - 1, min(SIZES, len(others))).round()]
    best = curve.plans.index(found.best.buckets)
    if best in others and best not in spread:
        spread[int(np.argmin(np.abs(np.array(spread) - best)))] = best
    return [
        Predicted(
            model=model,
            link=link,
            setting=Setting(bucket_cap_mb=curve.sizes[index].cap_mb),
            buckets=curve.plans[index],
            step_ns=curve.step_of(index),
            verdict=found.verdict if index == best else "",
            gain=curve.compute_gain_between(curve.plans[index], found.default.buckets),
        )
        for index in spread
    ]


def run(folder: Path, model: str, link: str, rounds: int, seconds: float) -> list[Row]:
    """Predict settings, write that down, and only then measure them."""
    trace = folder / f"{model}-{link}"
    with ranks_over(LINKS[link], WORLD_SIZE) as ranks:
        record(ranks, model, trace, probe_buckets=True)
        predicted = predict(model, link, advise(Analysis(read_trace(trace))).recommendation)
        for each in predicted:
            write(folder, "predicted", asdict(each))
        measured = sweep(
            model, link, ranks, [Setting(), *(each.setting for each in predicted)], rounds, seconds
        ).measured
    default_ns = 1e6 * _find(measured, Setting()).median_ms
    rows = []
    for each in predicted:
        of_setting = _find(measured, each.setting)
        if tuple(map(tuple, of_setting.buckets)) != each.buckets:
            raise RuntimeError(f"{each.setting.label}: torch has filled other buckets than were predicted")
        row = Row(predicted=each, measured_ns=1e6 * of_setting.median_ms, default_ns=default_ns, noise=of_setting.noise)
        cap_mb = each.setting.bucket_cap_mb
        content = {"model": model, "link": link, "bucket_cap_mb": cap_mb, "step_ns": of_setting.step_ns.tolist()}
        write(folder, "measured", {**content, "measured_ns": row.measured_ns, "default_ns": default_ns})
        print(row, flush=True)
        rows.append(row)
    return rows


def write(folder: Path, kind: str, content: dict[str, Any]) -> None:
    """Append a line, which stays whatever comes later."""
    with (folder / "honesty.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, **content}) + "\n")


def _find(measured: Sequence[Measured], setting: Setting) -> Measured:
    return next(each for each in measured if setting in each.settings)


def main() -> None:
    """Print a row for each setting, and how many hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction_honesty",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["gpt", "mlp-wide"], metavar="MODEL")
    parser.add_argument("--links", choices=LINKS, nargs="+", default=["1gbit", "1gbit-2.5ms"], metavar="LINK")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"blocks of each setting (default: {ROUNDS})")
    parser.add_argument(
        "--seconds", type=float, default=90, help="for each sweep, if the machine is not quiet (default: 90)"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that links are taken down
    args.folder.mkdir(parents=True, exist_ok=True)
    heads = (
        f"{'model':<14}{'link':<13}{'size, MB':>8}  {'predicted, ms (90 %)':<28}{'measured':>8}{'error':>8}{'noise':>7}"
    )
    print(f"{heads}  gain: predicted / measured")
    rows = [
        row
        for link in args.links
        for model in args.models
        for row in run(args.folder, model, link, args.rounds, args.seconds)
    ]
    holds, too_much = sum(row.holds for row in rows), sum(row.promises_too_much for row in rows)
    print(
        f"{holds} of {len(rows)} within their 90 % interval; {too_much} advised gains more than twice the measured ones"
    )


if __name__ == "__main__":
    main()
