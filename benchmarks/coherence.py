"""What is said of made-up recordings that can't be, or that is said otherwise elsewhere.

    python -m benchmarks.coherence [--recordings 10000] [--first 0]

Each seed is a job of ``tests.made_up_job``: drift, jumps, heavy tails, few steps, 1 to 8 ranks, idle and busy links.
All that commands, pages, report and metrics say of it has to hold (``tests.coherence``), and also of its comparison:
with itself for odd seeds, with another job for even ones. Whatever does not is printed below the job as it is found,
and counted at the end; the exit code is 1 if there is any. A recording takes about 0.7 s of a core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.coherence import find_contradictions
from tests.made_up_job import make_up_job, write_made_up_job

OTHER_SEED = 1_000_000
"""Added to the seed of a job for the one that it is compared with."""


def check(seed: int) -> list[str]:
    """Return what does not hold of the recording of a seed, an exception included."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        one, other = Path(folder, "one"), Path(folder, "other")
        try:
            write_made_up_job(make_up_job(seed), one)
            write_made_up_job(make_up_job(seed if seed % 2 else OTHER_SEED + seed), other)
            return find_contradictions(one, other)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]


def main() -> int:
    """Print what does not hold; return 1 if there is anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=10_000, help="number of them (default: 10,000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first one (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.recordings)
    kinds: Counter[str] = Counter()
    wrong, began_s = 0, time.monotonic()
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for seed, found in zip(seeds, pool.map(check, seeds, chunksize=4), strict=True):
            if found:
                wrong += 1
                kinds.update({line.partition(":")[0] for line in found})
                print("\n    ".join([str(make_up_job(seed)), *found]), flush=True)
    took_s = time.monotonic() - began_s
    by_kind = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "nothing"
    print(f"{len(seeds):,} recordings in {took_s:,.0f} s, {wrong:,} with something that does not hold: {by_kind}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
