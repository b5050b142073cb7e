"""How often ``overlapscope compare`` calls the same program slower, and how often it finds slower all-reduces.

    python -m benchmarks.compare FOLDER [--pairs 20]

Two ranks train over gloo on hosts of their own, with emulated compute (``tests/cluster/straggling.py``) and real
all-reduces over a link of 500 Mbit/s, on which a third of the step is exposed communication. Each pair is of three
recordings, made one right after the other by new processes: ``base``; ``same``, the same once more; and ``slower``,
with a link that lets through less, so that all-reduces take 5 % longer. They take turns in who is first.

For the step and some of its parts the tables say how often ``same`` was called slower than ``base``, which is false,
and how often ``slower`` was. Recordings that FOLDER holds already are compared and not made again. A link with a rate
needs root; ``--link loopback`` does without, and has no ``slower``.

What other processes do to one recording and not to the other is a difference, and is found as one: measure on a quiet
machine, or look at the parts that they hardly touch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.quiet_machine import wait_until_quiet
from overlapscope.analysis import Analysis
from overlapscope.compare.comparison import Comparison, compare
from overlapscope.compare.side import ComparisonSide, StepChoice
from overlapscope.lab.network.link import Link
from overlapscope.trace.recording import read_trace
from tests.cluster.shaped_link import Ranks, ranks_over

RATE_BITS: Final = 500e6
SLOWER: Final = 0.05
PARTS: Final = ("step", "communication", "exposed", "exposed_transfer")
TIME_LIMIT_S: Final = 300
LONGEST_WAIT_S: Final = 60
"""For a quiet machine, before a recording."""


def record(ranks: Ranks, folder: Path, steps: int) -> None:
    """Train once, in new processes."""
    with tempfile.TemporaryDirectory() as rendezvous:
        arguments = ["-m", "tests.cluster.straggling", str(folder), "--steps", str(steps)]
        arguments += ["--rendezvous", f"{rendezvous}/file"]
        ranks.run(arguments, os.environ | {"OMP_NUM_THREADS": "1"}, TIME_LIMIT_S)


def record_pairs(folder: Path, pairs: int, steps: int, sides: tuple[str, ...]) -> None:
    """Make the recordings that are not there yet."""
    has_rate = "slower" in sides
    with ranks_over(Link(bits_per_s=RATE_BITS) if has_rate else Link()) as ranks:
        for pair in range(pairs):
            for turn in range(len(sides)):
                side = sides[(pair + turn) % len(sides)]
                if (folder / f"{pair}_{side}").exists():
                    continue
                if has_rate:
                    ranks.set_rate(RATE_BITS / (1 + SLOWER if side == "slower" else 1))
                wait_until_quiet(LONGEST_WAIT_S)
                record(ranks, folder / f"{pair}_{side}", steps)


def compared(folder: Path, pair: int, side: str) -> Comparison:
    base, new = (
        ComparisonSide.of(Analysis(read_trace(folder / f"{pair}_{name}")), StepChoice()) for name in ("base", side)
    )
    return compare(base, new)


def main() -> None:
    """Record, compare, and print how often something was called slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where recordings go, or are")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--link", choices=("shaped", "loopback"), default="shaped")
    parser.add_argument("--fail-above", type=float, default=0.0, help="share of the step; 0.01 is 1 %%")
    args = parser.parse_args()
    sides = ("base", "same", "slower") if args.link == "shaped" else ("base", "same")
    record_pairs(args.folder, args.pairs, args.steps, sides)
    for side in sides[1:]:
        found = [compared(args.folder, pair, side) for pair in range(args.pairs)]
        print(f"\n{side:<18}{'called slower':>14}{'difference, and what would have been seen, of the step':>60}")
        for part in PARTS:
            slower = sum(each.outcome(part, args.fail_above) == "slower" for each in found)
            shares = [each.share(each.changes[part].middle.ns.value) for each in found]
            seen = sum(each.share(each.changes[part].seen_ns) for each in found) / len(found)
            told = f"{min(shares):+.1%} to {max(shares):+.1%}; {seen:.1%}"
            print(f"{part:<18}{f'{slower} of {len(found)}':>14}{told:>60}")


if __name__ == "__main__":
    main()
