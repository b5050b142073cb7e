"""Draw the figures of experiments from their results, as SVG and PNG, and say what holds in them.

    overlapscope lab figures experiments/ -o figures/

FOLDER is what 'overlapscope lab run -o' was given, or one experiment in it. It needs nothing but results.parquet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from overlapscope import pages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="results of one experiment or of several")
    parser.add_argument(
        "-o", "--output", type=Path, help="write pictures into this folder (default: only say what holds)"
    )


def run(args: argparse.Namespace) -> int:
    """Draw the figures and print their findings."""
    from overlapscope.lab.experiments.registry import find_experiment_results, read_experiment
    from overlapscope.lab.experiments.results import read_results

    folders = find_experiment_results([args.folder])
    if not folders:
        read_results(args.folder)  # raises the reason
    for folder in folders:
        experiment, rows = read_experiment(folder)
        figure = experiment.draw(rows)
        print(f"{experiment.title}{f' ({experiment.figure})' if experiment.figure else ''}")
        if experiment.paper:
            print(f"  The paper: {experiment.paper}")
        for sentence in figure.here:
            print(f"  Here: {sentence}")
        for reason in figure.left_out:
            print(f"  Left out: {reason}")
        if args.output is not None and figure.charts:
            for path in pages.write_pictures(args.output, experiment.name, experiment.title, figure):
                print(f"  Written: {path}")
    return 0
