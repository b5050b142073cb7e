"""What ``bucket_cap_mb="auto"`` chooses, held against fixed sizes that are really measured.

    python -m benchmarks.auto_buckets --model gpt --link 1gbit
    python -m benchmarks.auto_buckets --model mlp-400 --link 1gbit --slower 250mbit

Two ranks train over gloo with our DDP, one thread each. Once the choice is made it takes turns with fixed sizes, in
blocks of steps in another order in every round. A setting has the median of its steps, and as its noise the difference
between the medians of odd and of even blocks. With ``--slower`` the link then gets slower, training goes on until the
choice is made again, and turns are taken again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.auto_training import CAPS_MB, wait_for
from benchmarks.quiet_machine import QUIET_CORES
from benchmarks.swept_training import MODELS, WORLD_SIZE
from overlapscope.lab.network.link import parse_rate
from tests.cluster.shaped_link import LINKS, Ranks, ranks_over

TIME_LIMIT_S: Final = 1800
LABELS: Final = ("auto", "default", *(f"{cap:g}" for cap in CAPS_MB))


def train(ranks: Ranks, model: str, rounds: int, slower: str | None) -> list[list[dict[str, Any]]]:
    """Return what all ranks have seen, by rank: a list of phases."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if slower is not None:
            threading.Thread(target=_slow_down_when_asked, args=(ranks, folder, slower), daemon=True).start()
        arguments = [name, model, str(rounds), "0" if slower is None else "1", *map(str, ranks.carrier_pids)]
        ranks.run(["-m", "benchmarks.auto_training", *arguments], environment, TIME_LIMIT_S)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def _slow_down_when_asked(ranks: Ranks, folder: Path, rate: str) -> None:
    wait_for(folder / "slow-down")
    ranks.set_rate(parse_rate(rate))
    (folder / "slowed").touch()


def table_of(phases: list[dict[str, Any]], title: str) -> Table:
    """Tabulate one phase, as all ranks have seen it: a row for each setting."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("bucket_cap_mb")
    for heading in ("steps", "step, ms", "noise", "over fastest size"):
        table.add_column(heading, justify="right")
    steps_ms = [_steps_ms(phases, number) for number in range(len(LABELS))]
    medians_ms = [float(np.median(of_setting)) for of_setting in steps_ms]
    fastest_ms = min(medians_ms[1:])
    for label, of_setting, median_ms in zip(LABELS, steps_ms, medians_ms, strict=True):
        noise_text = "-"
        if len(of_setting) > 1:
            noise_text = f"{abs(np.median(of_setting[::2]) - np.median(of_setting[1::2])) / median_ms:.1%}"
        over = f"{median_ms / fastest_ms - 1:+.1%}"
        table.add_row(label, str(of_setting.size), f"{median_ms:.1f}", noise_text, over)
    return table


def _steps_ms(phases: list[dict[str, Any]], number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(blocks, steps) of one setting, the blocks that count: the quiet ones, or the quietest."""
    of_ranks = [[block for block in phase["blocks"] if block["number"] == number] for phase in phases]
    ends_ns = np.max([[block["ends_ns"] for block in blocks] for blocks in of_ranks], axis=0)
    cores = np.array([block["cores_of_others"] for block in of_ranks[0]])
    return np.diff(ends_ns)[cores <= max(QUIET_CORES, cores.min())] / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.auto_buckets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, required=True, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--link", choices=LINKS, required=True, metavar="LINK", help=", ".join(LINKS))
    parser.add_argument("--slower", metavar="RATE", help="of the link later on, as tc writes it")
    parser.add_argument("--rounds", type=int, default=6, help="of turns (%(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that links are taken down
    with ranks_over(LINKS[args.link], WORLD_SIZE) as ranks:
        seen = train(ranks, args.model, args.rounds, args.slower)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)
    for number, phases in enumerate(zip(*seen, strict=True)):
        first = phases[0]
        decision = first["decisions"][-1]
        title = f"{args.model}, {args.link if not number else args.slower}: chosen within {first['steps']} steps"
        console.print(table_of(list(phases), title))
        console.print(f"after {decision['after_reductions']} steps: {decision['why']}\n")


if __name__ == "__main__":
    main()
