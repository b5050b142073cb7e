"""What recording costs a step of FSDP2 over gloo and a link with a rate, in wall time and CPU time.

    python -m benchmarks.sharded_overhead [--model mlp] [--ranks 2] [--link 1gbit] [--rounds 8] [--steps 20]

Every run starts new processes. In each round the same training runs recorded and not recorded, first the one, next time
the other. Of both times the line has the median over rounds of the ratio of recorded to not recorded steps, with its
90 % interval from five rounds on. A run's wall time is the median of its steps, its CPU time the mean, both of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.medians import format_interval, median_with_ci
from benchmarks.quiet_machine import wait_until_quiet
from benchmarks.sharded_training import Setting, Task
from tests.cluster.shaped_link import LINKS, Ranks, ranks_over

TIME_LIMIT_S: Final = 400
LONGEST_WAIT_S: Final = 8


def run(ranks: Ranks, model: str, steps: int, *, records: bool) -> tuple[float, float]:
    """Return wall time and CPU time of a step in seconds."""
    wait_until_quiet(LONGEST_WAIT_S)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trace = str(folder / "trace") if records else ""
        Task(model=model, settings=(Setting(),), rounds=1, steps=steps, trace=trace).write(folder / "task.json")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks.run(["-m", "benchmarks.sharded_training", str(folder)], environment, TIME_LIMIT_S)
        times = json.loads((folder / "times.json").read_text())
    return float(np.median(times["wall_s"][0])), times["cpu_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=("tiny", "mlp", "transformer"), default="mlp")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--link", choices=LINKS, default="1gbit", metavar="LINK", help=", ".join(LINKS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that links are taken down
    taken_s: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with ranks_over(LINKS[args.link], args.ranks) as ranks:
        for number in range(args.rounds):
            for records in (bool(number % 2), not number % 2):
                taken_s[records].append(run(ranks, args.model, args.steps, records=records))
    recorded, plain = np.array(taken_s[True]), np.array(taken_s[False])
    wall, cpu = (format_interval(median_with_ci(list(ratios)), 3) for ratios in (recorded / plain).T)
    wall_ms, cpu_ms = 1e3 * np.median(plain, axis=0)
    print(
        f"{args.model}, {args.ranks} ranks, {args.link}: a step takes {wall_ms:.1f} ms ({cpu_ms:.1f} ms of CPU); "
        f"recorded {wall} times as long, and {cpu} times the CPU time"
    )


if __name__ == "__main__":
    main()
