"""How often `overlapscope fleet` names anybody though only chance decides, and how many runs it takes to name a cause.

    python -m benchmarks.fleet_chance

Every line is of so many made-up fleets of 24 hosts, without recordings: only who was late in which run. The aim is that
in less than 1 % of the fleets without a cause anybody is named. With one, it is counted in how many fleets it is named
and nobody else, and in how many anybody else is.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.fleet.standouts import rank_occasions
from tests.fleet.made_up_fleet import MadeUpFleet

WITHOUT_CAUSE = {
    "one late rank in 3 of 10 runs": MadeUpFleet(),
    "hosts of 1, 4 and 8 ranks, up to 3 late": MadeUpFleet(sizes=(1, 4, 8), by_chance=0.8, most_by_chance=3),
    "6 hosts, 2 in a run, late in all": MadeUpFleet(runs=400, hosts=6, hosts_of_run=2, by_chance=1.0),
    "always the same hosts in one order": MadeUpFleet(shuffled=False, by_chance=1.0),
}
CAUSES = ("host3", "cuda:1 of host3", "5")
SHARES = (0.3, 0.7)
RUNS = (15, 30, 60, 120)


def judge(fleet: MadeUpFleet, seed: int) -> tuple[bool, bool]:
    """Return whether the cause is named, and whether anybody else is."""
    named = {each.name for each in rank_occasions(fleet.occasions(seed)).standouts}
    return bool(named & fleet.slow.keys()), bool(named - fleet.slow.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, default=2_000, help="of each line without a cause")
    parser.add_argument("--with-cause", type=int, default=200, help="fleets of each line with one")
    args = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        print(f"without a cause, {args.fleets:,} fleets each: anybody named in")
        for name, fleet in WITHOUT_CAUSE.items():
            judged = pool.map(judge, repeat(fleet), range(args.fleets), chunksize=50)
            print(f"  {name:<42} {100 * sum(other for _, other in judged) / args.fleets:5.2f} %", flush=True)
        print(f"with one, {args.with_cause:,} fleets each: named, and anybody else named, by runs of the fleet")
        for cause in CAUSES:
            for share in SHARES:
                row = []
                for runs in RUNS:
                    fleet = replace(MadeUpFleet(), runs=runs, slow={cause: share})
                    judged = [*pool.map(judge, repeat(fleet), range(args.with_cause), chunksize=10)]
                    found, others = (100 * sum(each) / args.with_cause for each in zip(*judged, strict=True))
                    row.append(f"{runs:>4}: {found:3.0f} % {others:4.1f} %")
                print(f"  {cause:<16} late in {share:.0%} of its runs  {'   '.join(row)}", flush=True)


if __name__ == "__main__":
    main()
