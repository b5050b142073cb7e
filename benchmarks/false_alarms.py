"""How often a rank is named although nothing but noise makes ranks differ, and how small a real delay is found.

    python -m benchmarks.false_alarms

Every line is of so many made-up recordings of a step of 42 ms, in which each rank's compute varies by 5 % of the step,
its data wait by 10 % and all-reduces by 20 % of themselves, all with noise of one kind. What counts is a finding of any
kind: a rank, a host or all-reduces that take longer. The aim is fewer than 1 in 1,000 recordings. With --delay one rank
computes longer by that share of the step in all steps, and what counts is that it is named, and nobody else, or at
least suspected. Without a delay, a rank may be suspected in one recording of twenty.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.stragglers.cycles import CAUSES, Cycles
from overlapscope.stragglers.finding import Finding
from overlapscope.stragglers.replay import Replay
from overlapscope.stragglers.stragglers import Suspect, by_rank, find_all_findings, find_costliest
from tests.noise import Floats, Noise, autoregressive, bimodal, bursts, heavy_tailed

MS = 1_000_000
USUAL_MS = {"bucket_copies": 1, "optimizer": 3, "data_wait": 2, "forward": 10, "inter_phase": 1, "backward": 20}
TRANSFER_MS = (2, 3)
STEP_MS = sum(USUAL_MS.values()) + TRANSFER_MS[-1]
COMPUTE_NOISE = 0.05
DATA_NOISE = 0.10
TRANSFER_NOISE = 0.20


def shared_core(rng: np.random.Generator, steps: int, ranks: int) -> Floats:
    """Make noise of two neighbors on a core: what one gets of it the other one lacks, for some steps on end."""
    series = autoregressive(0.9)(rng, steps, ranks)
    series[:, 1::2] = -series[:, : ranks - ranks % 2 : 2]
    return series


NOISE: dict[str, Noise] = {
    "normal": autoregressive(0.0),
    "heavy-tailed": heavy_tailed,
    "AR 0.5": autoregressive(0.5),
    "AR 0.9": autoregressive(0.9),
    "drifting": autoregressive(0.99),
    "bimodal": bimodal,
    "bursts": bursts,
    "shared core": shared_core,
}


def made_up(rng: np.random.Generator, noise: Noise, ranks: int, steps: int, delay: float = 0.0) -> Cycles:
    """Make up the cycles of a recording in which rank 0 computes longer by a share of the step."""
    local_ns = np.zeros((len(CAUSES), steps, ranks))
    for name, usual_ms in USUAL_MS.items():
        local_ns[CAUSES.index(name)] = usual_ms * MS
    local_ns[CAUSES.index("backward")] += COMPUTE_NOISE * STEP_MS * MS * noise(rng, steps, ranks)
    local_ns[CAUSES.index("backward"), :, 0] += delay * STEP_MS * MS
    local_ns[CAUSES.index("data_wait")] *= 1 + DATA_NOISE * noise(rng, steps, ranks)
    own = np.maximum(local_ns, 0).astype(np.int64)
    last_ns = own.sum(axis=0)
    lead_ns = np.stack([own[CAUSES.index("backward")] // 2, np.zeros_like(last_ns)], axis=2)
    arrival_ns = last_ns[:, :, None] - lead_ns
    transfer_noise = np.maximum(1 + TRANSFER_NOISE * noise(rng, steps, 2), 0)
    transfer_ns = (np.array(TRANSFER_MS) * MS * transfer_noise).astype(np.int64)
    end_ns = np.zeros((steps, 2), dtype=np.int64)
    end_ns[:, 0] = arrival_ns[:, :, 0].max(axis=1) + transfer_ns[:, 0]
    end_ns[:, 1] = np.maximum(arrival_ns[:, :, 1].max(axis=1), end_ns[:, 0]) + transfer_ns[:, 1]
    return Cycles(
        ranks=np.arange(ranks),
        steps=np.arange(3, 3 + steps),
        missing_ranks=0,
        left_out=3,
        buckets=np.arange(2),
        bytes=np.array([4, 4]) * 1024**2,
        begin_ns=np.arange(steps) * STEP_MS * MS,
        local_ns=own,
        lead_ns=lead_ns,
        arrival_ns=arrival_ns,
        end_ns=end_ns,
        broadcast_ns=np.zeros((steps, ranks), dtype=np.int64),
        clock_error_ns=0.0,
    )


def judged(cycles: Cycles) -> tuple[tuple[Finding, ...], Suspect | None]:
    """Return what is said of a recording, eight ranks to a host."""
    hosts = {rank: f"node{rank // 8}" for rank in cycles.ranks.tolist()}
    step_time_ns = float(cycles.end_ns[:, -1].mean())
    findings, replay = find_all_findings(cycles, hosts, [], step_time_ns), Replay(cycles)
    costliest = find_costliest(replay, findings, by_rank(replay, hosts, None), step_time_ns)
    return findings, None if costliest is None or costliest.is_chance else costliest


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=10_000, help="of each kind, as time allows (default: 10,000)")
    parser.add_argument("--seconds", type=float, default=30.0, help="most time for each line (default: 30)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8, 64, 1024])
    parser.add_argument("--steps", type=int, nargs="+", default=[30, 100, 1000])
    parser.add_argument("--noise", nargs="+", choices=NOISE, default=list(NOISE))
    parser.add_argument("--delay", type=float, nargs="*", default=[], help="shares of the step; 0.05 is 5 %%")
    args = parser.parse_args()
    rng = np.random.default_rng(15)
    print("ranks steps  noise         delay recordings   named   wrong suspected  what was named")
    for ranks in args.ranks:
        for steps in args.steps:
            for name in args.noise:
                for delay in [0.0, *args.delay]:
                    count = named = wrong = suspected = 0
                    kinds: Counter[str] = Counter()
                    until = time.monotonic() + args.seconds
                    while count < args.recordings and time.monotonic() < until:
                        found, suspect = judged(made_up(rng, NOISE[name], ranks, steps, delay))
                        is_right = [delay > 0 and finding.ranks == (0,) for finding in found]
                        count += 1
                        named += any(is_right)
                        wrong += not all(is_right)
                        suspected += suspect is not None and (suspect.rank == 0 or not delay)
                        kinds.update(f"{finding.cause} {finding.pattern.kind}" for finding in found)
                    most = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common(3))
                    print(
                        f"{ranks:>5} {steps:>5}  {name:<13}{delay:>6.1%}{count:>11,}{named / count:>8.1%}"
                        f"{wrong / count:>8.2%}{suspected / count:>10.1%}  {most}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
