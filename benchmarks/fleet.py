"""How long `overlapscope fleet` takes for many runs, and whether it names the hosts that are slow, and no other.

    python -m benchmarks.fleet                       # 1,000 runs of 64 ranks; the first time they are made up, 8 GB
    python -m benchmarks.fleet --runs 100 --folder /data/made-up-fleet

Runs start over twelve weeks, each on eight of 96 hosts, in any order, with one of three models. In a quarter of them a
rank is late by chance. One host is slow on whichever of its GPUs, and of another one GPU: both in seven of ten runs
that they take part in. Each run has its event logs, and the collective logs of all ranks. It is said how long the
command takes with nothing known before, and again with what it has kept; and whom it names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.lab.synth import RANKS_PER_HOST, SyntheticRun, write_recording
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.manifest import write_manifest
from tests.ordered import end, steps, write_order

PROGRAM = str(Path(sys.executable).with_name("overlapscope"))
HOSTS = 96
WEEKS = 12
WEEK_S = 7 * 24 * 3600
FIRST_S = 1_788_000_000
MODELS = (("Encoder", 6), ("Decoder", 8), ("Mixer", 10))
"""Class and number of buckets."""
SLOW_HOST = "node42"
SLOW_DEVICE = ("node17", 5)
SLOW_SHARE = 0.7
BY_CHANCE = 0.25


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that is made up: everything follows from its number."""

    number: int
    ranks: int
    steps: int

    @property
    def seed(self) -> int:
        """Return the seed of everything that is random."""
        return 7919 * self.ranks + self.number

    def make(self, folder: Path) -> None:
        """Write the recording."""
        chance = random.Random(self.seed)
        hosts = tuple(f"node{each}" for each in chance.sample(range(HOSTS), max(1, self.ranks // RANKS_PER_HOST)))
        model, buckets = MODELS[self.number % len(MODELS)]
        run = SyntheticRun(
            slow_rank=self.slow_rank(chance, hosts),
            hosts=hosts,
            started_unix_ns=int((FIRST_S + chance.random() * WEEKS * WEEK_S) * 1e9),
            model=model,
            seed=self.seed,
        )
        write_recording(folder, self.ranks, self.steps, buckets, run=run)
        order = steps(self.steps, buckets=buckets)
        write_order(folder, dict.fromkeys(range(self.ranks), order))
        end(folder, range(self.ranks))
        for rank_folder in find_rank_folders(folder).values():
            write_manifest(rank_folder)

    def slow_rank(self, chance: random.Random, hosts: tuple[str, ...]) -> int | None:
        """Return the late rank: on a slow host, else sometimes any."""
        on_slow = {SLOW_HOST: chance.randrange(RANKS_PER_HOST), SLOW_DEVICE[0]: SLOW_DEVICE[1]}
        for index, host in enumerate(hosts):
            if host in on_slow and chance.random() < SLOW_SHARE:
                return RANKS_PER_HOST * index + on_slow[host]
        return chance.randrange(self.ranks) if chance.random() < BY_CHANCE else None


def make(task: tuple[Path, Plan]) -> None:
    """Make a run up, all at once: what was interrupted is not there."""
    folder, plan = task
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as draft:
        plan.make(Path(draft) / folder.name)
        (Path(draft) / folder.name).rename(folder)


def timed(folder: Path, cache: Path) -> tuple[float, dict[str, object]]:
    """Return the seconds that the command takes, and what it says."""
    begin = time.monotonic()
    ran = subprocess.run(
        [PROGRAM, "fleet", folder, "--json"],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return time.monotonic() - begin, json.loads(ran.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "made-up-fleet", help="kept")
    args = parser.parse_args()
    folder: Path = args.folder / f"{args.ranks}x{args.steps}x{args.runs}"
    folder.mkdir(parents=True, exist_ok=True)
    plans = [Plan(number=number, ranks=args.ranks, steps=args.steps) for number in range(args.runs)]
    missing = [(folder / f"run-{plan.number:05}", plan) for plan in plans]
    missing = [(run, plan) for run, plan in missing if not run.exists()]
    begin = time.monotonic()
    with ProcessPoolExecutor() as pool:
        list(pool.map(make, missing))
    print(f"made up {len(missing):,} of {args.runs:,} runs in {time.monotonic() - begin:.0f} s: {folder}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        for what in ("nothing known", "all known"):
            seconds, said = timed(folder, Path(cache))
            print(f"{what:>13}: {seconds:6.1f} s, {1000 * seconds / args.runs:.0f} ms a run", flush=True)
    named = {each["name"] for each in said["late"]["standouts"]}  # type: ignore[index]
    planted = {SLOW_HOST, f"cuda:{SLOW_DEVICE[1]} of {SLOW_DEVICE[0]}"}
    print(f"named: {', '.join(sorted(named)) or 'nobody'}")
    print(f"planted and found: {len(named & planted)} of {len(planted)}; named and not planted: {len(named - planted)}")


if __name__ == "__main__":
    main()
