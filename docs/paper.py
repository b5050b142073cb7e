"""Repeat the paper's experiments on hosts joined by slow links, made on this machine, and write docs/paper.md.

    sudo .venv/bin/python docs/paper.py [FOLDER]

Needs Linux, root, `pip install -e '.[test]'` and an idle machine: on two cores it takes about three hours. Recordings
and results go into FOLDER; whatever ends it, the same command goes on where it was, and with more --repetitions only
those that are new are measured. Pictures and results are written to docs/paper/. Read all of it before you commit it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pandas as pd

from dashboards.experiment_figures import write_pictures
from overlapscope.lab.experiments.charts import has_interval
from overlapscope.lab.experiments.registry import EXPERIMENTS, read_experiment
from overlapscope.lab.experiments.results import RESULTS_FILE, describe_conditions
from overlapscope.lab.experiments.strategies import DEFAULT, STRATEGIES, compare_with_default
from overlapscope.lab.network.link import parse_rate
from overlapscope.text import format_bandwidth, format_interval_ns, format_ns

MINUS: Final = "\N{MINUS SIGN}"
DOCS: Final = Path(__file__).parent
PAPER: Final = "https://arxiv.org/abs/2006.15704"
PICTURES: Final = DOCS / "paper"
OVERLAPSCOPE: Final = Path(sys.executable).parent / "overlapscope"


def measure(name: str, args: argparse.Namespace) -> int:
    """Run one experiment on hosts of its own. Returns the exit code; it has said itself what is wrong."""
    network = ["--hosts", str(args.hosts), "--rate", args.rate]
    options = ["--steps", str(args.steps), "--repetitions", str(args.repetitions), "-o", str(args.folder.absolute())]
    for model in args.model:
        options += ["--model", model]
    command = [OVERLAPSCOPE, "lab", "cluster", *network, "--", OVERLAPSCOPE, "lab", "run", name, *options]
    return subprocess.run(list(map(str, command))).returncode


def text_of(folder: Path, args: argparse.Namespace) -> str:
    """Write the pictures, and return the page, of the experiments that have results."""
    PICTURES.mkdir(exist_ok=True)
    parts = [
        "# The paper's experiments, here\n",
        f"What [PyTorch Distributed: Experiences on Accelerating Data Parallel Training]({PAPER}) found on up to 256 "
        f"GPUs, and what holds on {args.hosts} hosts with a rank each, joined at "
        f"{format_bandwidth(parse_rate(args.rate))}, that are [made on one machine](cluster.md) and share its cores. "
        "`docs/paper.py` measures all of it and writes this page; [Experiments](experiments.md) says how to do the "
        "same where you train. Intervals are of 90 %.\n",
    ]
    for experiment in EXPERIMENTS:
        own = folder / experiment.name
        if (own / RESULTS_FILE).exists():
            parts += _section(own)
    return "\n".join(parts)


def _section(folder: Path) -> Iterator[str]:
    experiment, rows = read_experiment(folder)
    figure = experiment.draw(rows)
    name = experiment.name
    yield f"## {experiment.title}\n"
    for picture in PICTURES.glob(f"{name}.*"):
        picture.unlink()
    write_pictures(PICTURES, name, experiment.title, figure)
    (PICTURES / f"{name}.svg").unlink()  # the page shows the other one
    shutil.copy(folder / RESULTS_FILE, PICTURES / f"{name}.parquet")
    if experiment.paper:
        yield f"**The paper** ({experiment.figure}). {experiment.paper}\n"
    yield "**Here.**\n"
    yield from (f"- {sentence}" for sentence in figure.here)
    yield f"\n![{experiment.title}](paper/{name}.png)\n"
    if experiment is STRATEGIES:
        yield from _table(rows[rows["failure"] == ""])
    if figure.left_out:
        yield "Left out:\n"
        yield from (f"- {reason}" for reason in figure.left_out)
        yield ""
    yield f"{figure.note} Measured with {describe_conditions(rows)} [Results](paper/{name}.parquet).\n".lstrip()


def _table(rows: pd.DataFrame) -> Iterator[str]:
    yield "| model | strategy | step | over the default |"
    yield "|---|---|---|---|"
    for where, name, step, difference in compare_with_default(rows):
        interval = f" ({format_interval_ns(step)})" if has_interval(step) else ""
        share = "" if name == DEFAULT else f"{100 * difference.value:+.1f} %"
        if share and has_interval(difference):
            share += f" ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
        yield f"| {where} | `{name}` | {format_ns(step.value)}{interval} | {share.replace('-', MINUS)} |"
    yield ""


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [experiment.name for experiment in EXPERIMENTS]
    parser.add_argument("folder", nargs="?", type=Path, default=Path("experiments"), help="(%(default)s)")
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="NAME", help="some experiments")
    parser.add_argument("--hosts", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--rate", default="1gbit", help="(%(default)s)")
    parser.add_argument("--model", action="append", default=[], help="instead of convnet and transformer")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="(%(default)s)")
    return parser.parse_args()


def main() -> int:
    """Measure, and write the page. Returns the exit code."""
    args = parse_arguments()
    code = next(filter(None, (measure(name, args) for name in args.only)), 0)
    if not code:
        (DOCS / "paper.md").write_text(text_of(args.folder, args), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
