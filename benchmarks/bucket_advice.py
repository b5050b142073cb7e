"""Predicted step times against measured ones: how good the advice of ``overlapscope recommend`` is.

    python -m benchmarks.bucket_advice FOLDER ...

Each FOLDER is one that ``benchmarks.bucket_sweep`` has written: recordings of 30 steps, a calibration, and the step
time of torch's own DDP with every size, really measured. For each recording, with and without the calibration:

MAPE      mean of the absolute errors of the predicted step times, over all sizes
shape     the same of step times as shares of the default's: without what one day is slower than another
bias      mean of the errors: positive where predictions are too long
in 90 %   share of the measured step times that lie in their interval
chosen    the size with the shortest predicted step time; DDP's default if the advice is to leave it
regret    measured step time of what is chosen, over the shortest measured one
gain      of what is chosen over DDP's default, as measured

The same for the model with all else as fitted but a straight line through the same all-reduces, latency and bandwidth
alone (*all-reduces on a line*), and the size that it predicts to be the fastest, however little that gains; for a
Bayesian search among the measured sizes (regret and gain are then means of some searches, and *chosen* is what most of
them choose), for leaving DDP's default, and for the best plan of all, really run with torch's DDP and with ours. Noise
is the difference between the medians of odd and of even blocks of steps, the median of all sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.bayesian_search import SAMPLES, STEPS_PER_SAMPLE, search
from benchmarks.sweep_file import Measured, read_sweep
from benchmarks.swept_training import Setting
from overlapscope.advice.observations import extract_observations, get_backend_lanes
from overlapscope.bucket_model.calibration import collect_spans, read_calibration
from overlapscope.bucket_model.cost import CollectiveCost, fit_line
from overlapscope.bucket_model.fit import FittedModel, fit_model
from overlapscope.bucket_model.observation import Spans
from overlapscope.bucket_model.partition import Buckets
from overlapscope.bucket_model.prediction import Options, draw_step_times_ns
from overlapscope.bucket_model.recommend import recommend
from overlapscope.bucket_model.schedule import replay
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import CALIBRATION_FILE

RECORDINGS: Final = ("plain", "probe")
SEARCHES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What was measured: Q partitions of one model over one link."""

    labels: tuple[str, ...]
    plans: tuple[Buckets, ...]
    step_ns: NDArray[np.float64]
    """(Q,)"""
    noise: NDArray[np.float64]
    """(Q,) as shares."""
    steps_ns: tuple[NDArray[np.float64], ...]
    """Of each, all that count."""
    caps_mb: NDArray[np.float64]
    """(Q,) one that gives it; NaN for DDP's default."""
    default: int
    """Which of them is DDP's default."""
    others: tuple[Measured, ...]
    """The best plan of all, and what our DDP took."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One way to predict, held against the truth."""

    way: str
    predicted_ns: NDArray[np.float64] | None
    interval_ns: NDArray[np.float64] | None
    """(2, Q)"""
    chosen: int

    def cells(self, truth: Truth) -> list[str]:
        """Return a row of the table."""
        errors = None if self.predicted_ns is None else self.predicted_ns / truth.step_ns - 1
        held, shape = None, None
        if self.predicted_ns is not None:
            shape = self.predicted_ns / self.predicted_ns[truth.default] * truth.step_ns[truth.default] / truth.step_ns
        if self.interval_ns is not None:
            held = np.mean((self.interval_ns[0] <= truth.step_ns) & (truth.step_ns <= self.interval_ns[1]))
        regret = truth.step_ns[self.chosen] / truth.step_ns.min() - 1
        gain = 1 - truth.step_ns[self.chosen] / truth.step_ns[truth.default]
        return [
            self.way,
            "" if errors is None else f"{np.abs(errors).mean():.1%}",
            "" if shape is None else f"{np.abs(shape - 1).mean():.1%}",
            "" if errors is None else f"{errors.mean():+.1%}",
            "" if held is None else f"{held:.0%}",
            truth.labels[self.chosen],
            f"{regret:.1%}",
            f"{gain:+.1%}",
        ]


def read_truth(folder: Path) -> Truth:
    """Return the sizes, of torch's DDP; the best plan that no size gives is left out."""
    measured = read_sweep(folder / "sweep.json").measured
    rows = [each for each in measured if not each.is_ours and _has_size(each)]
    caps = [[s.bucket_cap_mb for s in each.settings if s.bucket_cap_mb is not None] for each in rows]
    return Truth(
        labels=tuple(each.label for each in rows),
        plans=tuple(tuple(tuple(bucket) for bucket in each.buckets) for each in rows),
        step_ns=np.array([each.median_ms * 1e6 for each in rows]),
        noise=np.array([each.noise for each in rows]),
        steps_ns=tuple(each.quiet_step_ns.ravel().astype(np.float64) for each in rows),
        caps_mb=np.array([of_row[0] if of_row else np.nan for of_row in caps]),
        default=next(place for place, each in enumerate(rows) if Setting() in each.settings),
        others=tuple(each for each in measured if each not in rows),
    )


def _has_size(measured: Measured) -> bool:
    return any(setting.bucket_cap_mb_list is None for setting in measured.settings)


def read_spans(folder: Path) -> dict[str, Spans | None]:
    """Return the all-reduces that were measured alone and in pairs, as ``fit_model`` takes them."""
    calibration = read_calibration(folder / CALIBRATION_FILE)
    return {"calibration": collect_spans(calibration.samples), "pairs": collect_spans(calibration.pairs)}


def scores(folder: Path, truth: Truth) -> Iterator[Score]:
    """Score all ways to predict."""
    calibrated = read_spans(folder)
    for name in RECORDINGS:
        path = folder / "traces" / name
        if not path.exists():
            continue
        trace = read_trace(path)
        observations, lanes = extract_observations(trace), get_backend_lanes(trace)
        if name != RECORDINGS[0] and len(set(observations.plan.tolist())) == 1:
            continue  # nothing was probed
        for spans in ({}, calibrated):
            fitted = fit_model(observations, lanes=lanes, **spans)
            way = f"{name}, calibrated" if spans else name
            yield _score(way, fitted, truth)
            yield _score(f"{way}, all-reduces on a line", _with_line(fitted), truth, has_interval=False)
    yield Score(way="leave it", predicted_ns=None, interval_ns=None, chosen=truth.default)


def _score(way: str, fitted: FittedModel, truth: Truth, *, has_interval: bool = True) -> Score:
    predicted_ns = replay(truth.plans, fitted.work, fitted.costs).typical_ns
    interval_ns = (
        np.quantile(draw_step_times_ns(fitted, truth.plans, Options()), [0.05, 0.95], axis=0) if has_interval else None
    )
    best = int(np.argmin(predicted_ns))
    is_change = not has_interval or recommend(fitted, truth.plans[truth.default]).verdict == "change"
    chosen = best if is_change else truth.default
    return Score(way=way, predicted_ns=predicted_ns, interval_ns=interval_ns, chosen=chosen)


def _with_line(fitted: FittedModel) -> FittedModel:
    """Return the same, except that an all-reduce takes a latency and its bytes over a bandwidth."""
    cost = fitted.costs.collective
    line = fit_line(cost.sizes_bytes, cost.times_ns) if fitted.calibration is None else _line_of(fitted.calibration)
    straight = CollectiveCost(
        world_size=cost.world_size,
        sizes_bytes=cost.sizes_bytes[:1],
        times_ns=line.time_ns(cost.sizes_bytes[:1]),
        line=line,
        is_identifiable=True,
    )
    return replace(fitted, costs=replace(fitted.costs, collective=straight))


def _line_of(spans: Spans) -> Any:
    return fit_line(spans.bytes, spans.time_ns)


def searched(truth: Truth, searches: int) -> Iterator[list[str]]:
    """Return rows of the search by trying, after some samples and after all."""
    places = np.flatnonzero(~np.isnan(truth.caps_mb))
    steps_ns = [truth.steps_ns[place] for place in places]
    found = [search(truth.caps_mb[places].tolist(), steps_ns, seed).chosen for seed in range(searches)]
    for samples in (5, 10, SAMPLES):
        chosen = places[[each[samples - 1] for each in found]]
        step_ns = truth.step_ns[chosen].mean()
        most_often = int(np.bincount(chosen).argmax())
        yield [
            f"Bayesian search, {samples} samples of {STEPS_PER_SAMPLE} steps",
            *[""] * 4,
            truth.labels[most_often],
            f"{step_ns / truth.step_ns.min() - 1:.1%}",
            f"{1 - step_ns / truth.step_ns[truth.default]:+.1%}",
        ]


def _measured_otherwise(truth: Truth) -> Iterator[list[str]]:
    for each in truth.others:
        step_ns = each.median_ms * 1e6
        over = f"{step_ns / truth.step_ns.min() - 1:+.1%}"
        yield [each.label, *[""] * 4, "", over, f"{1 - step_ns / truth.step_ns[truth.default]:+.1%}"]


def print_case(console: Console, folder: Path, *, each_size: bool, searches: int) -> None:
    truth = read_truth(folder)
    found = list(scores(folder, truth))
    table = _table(
        f"{folder.name}, noise {np.nanmedian(truth.noise):.1%}", "", "MAPE", "shape", "bias", "in 90 %", "chosen"
    )
    for heading in ("regret", "gain"):
        table.add_column(heading, justify="right")
    for score in found:
        table.add_row(*score.cells(truth))
    for cells in (*searched(truth, searches), *_measured_otherwise(truth)):
        table.add_row(*cells)
    console.print(table)
    if each_size:
        ways = [score for score in found if score.interval_ns is not None]
        sizes = _table("", "bucket_cap_mb", "buckets", "measured, ms", "noise", *(score.way for score in ways))
        for place, label in enumerate(truth.labels):
            cells = [_cell(score, place, truth) for score in ways]
            measured = f"{truth.step_ns[place] / 1e6:.1f}"
            sizes.add_row(label, str(len(truth.plans[place])), measured, f"{truth.noise[place]:.1%}", *cells)
        console.print(sizes)


def _cell(score: Score, place: int, truth: Truth) -> str:
    assert score.predicted_ns is not None
    assert score.interval_ns is not None
    low, high = score.interval_ns[:, place] / 1e6
    step_ns = score.predicted_ns[place]
    return f"{step_ns / 1e6:.1f} ({low:.0f} to {high:.0f}) {step_ns / truth.step_ns[place] - 1:+.1%}"


def _table(title: str, label: str, *headings: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(label, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bucket_advice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--sizes", action="store_true", help="show each size as well")
    parser.add_argument(
        "--searches", type=int, default=SEARCHES, help=f"by trying, that means are taken of (default: {SEARCHES})"
    )
    args = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 160)
    for folder in args.folders:
        print_case(console, folder, each_size=args.sizes, searches=args.searches)


if __name__ == "__main__":
    main()
