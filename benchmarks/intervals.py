"""How often 90 % intervals hold what they are of.

    python -m benchmarks.intervals [FOLDER]

means        of series of steps with noise of several kinds; beside them two bootstraps of blocks of steps, of a length
             chosen as by Politis and White (2004), and of the cube root of the number of steps
stragglers   what a rank costs that computes longer by 10 % of the step, and what mending it saves, in recordings that
             ``benchmarks.false_alarms`` makes up; held against a recording of 20,000 steps
recommend    the step with the best size, and its gain over the size in force where it is another one, of jobs that are
             made up; held against other steps of these jobs with those sizes, simulated event by event
recordings   those in FOLDER, of trainings that do the same in every step: whether the means of the first and of the
             second half of the steps differ by no more than their intervals say
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bootstraps import bootstrap_holds, chosen_length
from benchmarks.false_alarms import judged, made_up
from overlapscope.analysis import Analysis
from overlapscope.breakdown.means import compute_mean_step, mean_with_ci
from overlapscope.bucket_model.fit import fit_model
from overlapscope.bucket_model.partition import Buckets
from overlapscope.bucket_model.plans import default_plan, plan_probe
from overlapscope.bucket_model.prediction import MeasuredSteps
from overlapscope.bucket_model.recommend import recommend
from overlapscope.interval import Interval
from overlapscope.stragglers.finding import Finding
from overlapscope.trace.recording import read_trace
from tests.bucket_model.oracle import Job, observe, simulate
from tests.noise import Floats, Noise, autoregressive, bimodal, heavy_tailed

DELAY = 0.10
TRUE_STEPS = 20_000
RECORDED_STEPS = 30
SIMULATED_STEPS = 200
MB = 1024**2


def every_fourth(rng: np.random.Generator, steps: int, count: int) -> Floats:
    """Make every fourth step longer."""
    phase = rng.integers(0, 4, count)
    return ((np.arange(steps)[:, None] + phase) % 4 == 0) - 0.25 + 0.1 * rng.standard_normal((steps, count))


NOISE: dict[str, Noise] = {
    "normal": autoregressive(0.0),
    "AR 0.5": autoregressive(0.5),
    "AR 0.9": autoregressive(0.9),
    "heavy-tailed": heavy_tailed,
    "bimodal": bimodal,
    "every fourth": every_fourth,
}


def holds(interval: Interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high


def print_means(rng: np.random.Generator, recordings: int, lengths: list[int]) -> None:
    """Print a line for each kind of noise and length."""
    print(f"means\n{'steps':>6}  {'noise':<13}{'ours':>8}{'Politis-White':>15}{'cube root':>11}")
    for steps in lengths:
        for name, noise in NOISE.items():
            series = noise(rng, steps, recordings)
            ours = np.mean([holds(mean, 0) for mean in mean_with_ci(series)])
            some = series[:, : max(1, recordings // 5)].T
            chosen = np.mean([bootstrap_holds(rng, one, chosen_length(one)) for one in some])
            cube = np.mean([bootstrap_holds(rng, one, round(steps ** (1 / 3))) for one in some])
            print(f"{steps:>6}  {name:<13}{ours:>8.1%}{chosen:>15.1%}{cube:>11.1%}", flush=True)


def print_stragglers(rng: np.random.Generator, recordings: int, lengths: list[int]) -> None:
    """Print a line for each number of ranks, kind of noise and length, of recordings in which the rank is named."""
    print(f"\nstragglers\n{'ranks':>6} {'steps':>6}  {'noise':<13}{'named':>8}{'saving':>8}")
    for ranks in (2, 4):
        for name in ("normal", "AR 0.5", "heavy-tailed", "bimodal"):
            truth = named_first(rng, NOISE[name], ranks, TRUE_STEPS)
            assert truth is not None, name
            for steps in lengths:
                every = [named_first(rng, NOISE[name], ranks, steps) for _ in range(recordings)]
                found = [each for each in every if each is not None]
                saving = _share([holds(each.saving.step, truth.saving.step.value) for each in found])
                share = f"{len(found) / recordings:.0%}"
                print(f"{ranks:>6} {steps:>6}  {name:<13}{share:>8}{saving:>8}", flush=True)


def named_first(rng: np.random.Generator, noise: Noise, ranks: int, steps: int) -> Finding | None:
    """Return what is said of rank 0, which computes longer in every step."""
    found, _ = judged(made_up(rng, noise, ranks, steps, DELAY))
    return next((each for each in found if each.ranks == (0,) and each.pattern.kind == "persistent"), None)


def print_recommend(rng: np.random.Generator, jobs: int) -> None:
    """Print a line for each size of noise and way to record."""
    print(f"\nrecommend\n{'noise':>6}  {'recorded with':<14}{'step':>8}{'gain':>8}{'another':>9}")
    for noise in (0.02, 0.10):
        for is_probed in (False, True):
            found = [advice_on(rng, any_job(rng), noise, is_probed=is_probed) for _ in range(jobs)]
            gains = [gain_holds for _, gain_holds in found if gain_holds is not None]
            step, gain = _share([step_holds for step_holds, _ in found]), _share(gains)
            way = "several sizes" if is_probed else "one size"
            print(f"{noise:>6.0%}  {way:<14}{step:>8}{gain:>8}{len(gains) / jobs:>9.0%}", flush=True)


def any_job(rng: np.random.Generator) -> Job:
    """Make a job of two ranks with 24 gradients, 100 MB in all; backward takes 100 ms, all-reduces 1/3 to 2 of it."""
    sizes = rng.lognormal(0.0, 1.0, 24)
    sizes = (100 * MB * sizes / sizes.sum()).astype(int) // 4 * 4
    return Job(
        sizes=sizes.tolist(),
        start=[40e6, 41e6],
        work=[(100e6 * rng.dirichlet(np.full(24, 5.0))).tolist()] * 2,
        wire=(float(rng.choice([2e4, 2e5, 2e6])), 100e6 * float(rng.uniform(0.3, 2.0)) / float(sizes.sum())),
        s=float(rng.choice([1.0, 1.2])),
        lanes=int(rng.choice([1, 2])),
    )


def noisy(job: Job, rng: np.random.Generator, noise: float) -> Job:
    """Make another step of a job: its ranks and its links are slower or quicker."""
    first, second, wire = np.exp(noise * rng.standard_normal(3)).tolist()
    work = [[each * speed for each in own] for own, speed in zip(job.work, (first, second), strict=True)]
    start = [job.start[0] * first, job.start[1] * second]
    return replace(job, work=work, start=start, wire=(job.wire[0] * wire, job.wire[1] * wire))


def advice_on(rng: np.random.Generator, job: Job, noise: float, *, is_probed: bool) -> tuple[bool, bool | None]:
    """Return whether the intervals hold of the best size's step, and of its gain; None if that size is in force."""
    in_force, probed = default_plan(job.gradients).buckets, plan_probe(job.gradients)
    plans: list[Buckets] = [probed.plans[number] for number in probed.plan_of_step] if is_probed else []
    plans += [in_force] * RECORDED_STEPS
    observations = observe([noisy(job, rng, noise) for _ in plans], plans)
    (step_ns,) = mean_with_ci(observations.cycle_ns[1 - RECORDED_STEPS :].mean(axis=1, keepdims=True))
    measured = MeasuredSteps(plan=in_force, step_ns=step_ns, exposed_ns=0.0)
    advice = recommend(fit_model(observations, lanes=job.lanes), measured=measured)
    truth_ns = mean_step_ns(rng, job, noise, advice.best.buckets)
    if advice.best.buckets == in_force:
        return holds(advice.best.step_ns, truth_ns), None
    true_gain = 1 - truth_ns / mean_step_ns(rng, job, noise, in_force)
    return holds(advice.best.step_ns, truth_ns), holds(advice.gain, true_gain)


def mean_step_ns(rng: np.random.Generator, job: Job, noise: float, plan: Buckets) -> float:
    return float(np.mean([simulate(noisy(job, rng, noise), plan).copied for _ in range(SIMULATED_STEPS)]))


def print_recordings(folder: Path) -> None:
    """Print a line for each block that any recording has."""
    found: dict[str, list[bool]] = defaultdict(list)
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        analysis = Analysis(read_trace(path))
        steady = analysis.summary.steady
        blocks_ns = analysis.breakdown.ns[steady.rows].mean(axis=1)
        half = len(blocks_ns) // 2
        if half < 3:
            continue
        change = compute_mean_step(blocks_ns[half:]).minus(compute_mean_step(blocks_ns[:half]))
        found["step"].append(holds(change.step, 0))
        for name, each in change.present.items():
            found[name].append(holds(each, 0))
    print(f"\nrecordings\n{'':<20}{'held':>8}{'recordings':>12}")
    for name, held in found.items():
        print(f"{name:<20}{_share(held):>8}{len(held):>12}")


def _share(found: list[bool]) -> str:
    return f"{np.mean(found):.1%}" if found else ""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of real recordings")
    parser.add_argument("--recordings", type=int, default=2000, help="simulated for each line (default: 2000)")
    parser.add_argument("--jobs", type=int, default=100, help="simulated for each line of recommend (default: 100)")
    parser.add_argument("--steps", type=int, nargs="+", default=[12, 30, 100, 300, 1000])
    args = parser.parse_args()
    rng = np.random.default_rng(15)
    print_means(rng, args.recordings, args.steps)
    print_stragglers(rng, max(1, args.recordings // 5), [steps for steps in args.steps if steps >= RECORDED_STEPS])
    print_recommend(rng, args.jobs)
    if args.folder is not None:
        print_recordings(args.folder)


if __name__ == "__main__":
    main()
