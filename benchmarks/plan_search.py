"""How long it takes to replay bucket plans and to find the best one, and what the best one gains.

    python benchmarks/plan_search.py

Jobs are made up: gradients of a transformer and of a convolutional network, whose times go with their bytes, or
don't, on links of several kinds. No training is run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from overlapscope.bucket_model.cost import CollectiveCost, CostLine
from overlapscope.bucket_model.partition import MB, Gradients, build_table_from_cuts
from overlapscope.bucket_model.plans import default_plan, find_caps_mb, uniform_plans
from overlapscope.bucket_model.schedule import Costs, replay
from overlapscope.bucket_model.search import find_best_plan
from overlapscope.bucket_model.work import ComputeTimes

MS = 1e6
LINKS = {
    "loopback": (0.3, 1500.0),
    "1 Gbit/s": (0.4, 118.0),
    "1 Gbit/s, 5 ms away": (11.0, 118.0),
    "100 Gbit/s": (0.05, 9000.0),
}
"""Latency in ms, and MB/s."""


def transformer(layers: int, width: int, vocabulary: int) -> np.ndarray:
    """Return the bytes of the gradients, last layer first."""
    layer = [4 * width * width, width, width, 4 * width * width, 4 * width, width, width * width, 3 * width * width]
    sizes = [width, width] + layer * layers + [vocabulary * width]
    return np.array(sizes) * 4


def convnet(blocks: int) -> np.ndarray:
    """Return the bytes of the gradients, last layer first: large ones come first, and take little time."""
    channels = np.repeat([512, 256, 128, 64], blocks // 4)
    sizes = [1000 * 512, 1000]
    for width in channels:
        sizes += [width, width, width * width * 9, width, width, width * width * 9]
    return np.array([*sizes, 64 * 3 * 49]) * 4


def job(sizes: np.ndarray, backward_ms: float, times_follow_bytes: float, cycles: int, ranks: int) -> ComputeTimes:
    """Make up work of ranks that differ by 3 %."""
    random = np.random.default_rng(0)
    share = times_follow_bytes * sizes / sizes.sum() + (1 - times_follow_bytes) / len(sizes)
    speed = np.exp(0.03 * random.standard_normal((cycles, ranks, 1)))
    jitter = np.exp(0.1 * random.standard_normal((cycles, ranks, len(sizes))))
    start_ns = 0.6 * backward_ms * MS * speed[:, :, 0]
    ready_ns = start_ns[:, :, None] + np.cumsum(backward_ms * MS * share * speed * jitter, axis=2)
    gradients = Gradients(
        names=tuple(f"p{number}" for number in range(len(sizes))),
        bytes=sizes.astype(np.int64),
        kinds=np.zeros(len(sizes), dtype=np.int64),
        order=np.arange(len(sizes)),
    )
    return ComputeTimes(
        gradients=gradients,
        ranks=np.arange(start_ns.shape[1]),
        start_ns=start_ns,
        ready_ns=ready_ns,
        end_ns=ready_ns[:, :, -1],
    )


def costs_of(latency_ms: float, mb_per_s: float, lanes: int, compute_slowdown: float = 1.0) -> Costs:
    """Return the costs of a link."""
    sizes = np.geomspace(1e3, 1e9, 30)
    line = CostLine(alpha_ns=latency_ms * MS, beta_ns=1e9 / (mb_per_s * MB))
    cost = CollectiveCost(
        world_size=2, sizes_bytes=sizes, times_ns=line.time_ns(sizes), line=line, is_identifiable=True
    )
    copy = CostLine(alpha_ns=2e4, beta_ns=0.1)
    return Costs(collective=cost, copy_in=copy, copy_out=copy, compute_slowdown=compute_slowdown, lanes=lanes)


def seconds(what: Callable[[], object], times: int = 5) -> float:
    """Return the middle of some attempts."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        what()
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


def speed(plans: int, parameters: int, cycles: int, ranks: int) -> None:
    random = np.random.default_rng(1)
    work = job(random.integers(1_000, 4_000_000, size=parameters), 100, 0.8, cycles, ranks)
    cuts = random.random((plans, parameters)) < random.uniform(0.005, 0.5, size=(plans, 1))
    print(f"{plans} plans of {parameters} parameters, {cycles} cycles, {ranks} ranks:")
    for lanes in (1, 2):
        costs = costs_of(0.4, 118.0, lanes)
        replaying = seconds(lambda costs=costs: replay(build_table_from_cuts(cuts, work.gradients), work, costs))
        searching = seconds(lambda costs=costs: find_best_plan(work, costs), times=3)
        print(f"  {lanes} lane(s): replayed in {replaying:.2f} s, best plan found in {searching:.2f} s")
    listing = seconds(lambda: uniform_plans(work.gradients))
    print(f"  {len(uniform_plans(work.gradients))} partitions by cap listed in {listing:.2f} s")


def gains() -> None:
    models = {
        "transformer": job(transformer(12, 512, 20_000), 400, 0.9, 24, 2),
        "convnet": job(convnet(16), 250, 0.2, 24, 2),
    }
    print(f"\n{'model':<14}{'link':<22}{'lanes':>6}{'default':>11}{'best cap':>11}{'at MB':>8}{'best plan':>11}"
          f"{'buckets':>9}{'gain on cap':>13}  as a list of caps")  # fmt: skip
    for name, work in models.items():
        for link, (latency_ms, mb_per_s) in LINKS.items():
            for lanes in (1, 2):
                costs = costs_of(latency_ms, mb_per_s, lanes, 1.1)
                caps = uniform_plans(work.gradients)
                best = find_best_plan(work, costs)
                plans = [default_plan(work.gradients).buckets, best, *(plan.buckets for plan in caps)]
                default_ns, best_ns, *cap_ns = replay(plans, work, costs).cycle_ns.mean(axis=1)
                cap = int(np.argmin(cap_ns))
                as_list = find_caps_mb(best, work.gradients)
                print(f"{name:<14}{link:<22}{lanes:>6}{default_ns / MS:>8.1f} ms{cap_ns[cap] / MS:>8.1f} ms"
                      f"{caps[cap].cap_mb:>8g}{best_ns / MS:>8.1f} ms{len(best):>9}"
                      f"{100 * (1 - best_ns / cap_ns[cap]):>11.1f} %  {as_list}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=400)
    parser.add_argument("--cycles", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    speed(args.plans, args.parameters, args.cycles, args.ranks)
    gains()


if __name__ == "__main__":
    main()
