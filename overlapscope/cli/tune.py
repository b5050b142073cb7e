"""Find the settings of DistributedDataParallel that make a training's steps shortest, by running it.

    overlapscope tune -o tuning/ -- torchrun --nproc-per-node 2 train.py

The script needs no changes. It is recorded as it is first, with all-reduces of many sizes timed at its start. From that
the step with other bucket sizes is predicted, and the two or three most promising settings are run: bucket sizes,
gradient_as_bucket_view and, with --allow-compression, gradients sent in half of their bytes. Then the fastest of them
and the script's own settings are run again. All are compared as 'overlapscope compare' does. What is printed is the
setting as code, with its measured gain, or that you should keep what you have. Nothing more is run once no setting can
gain 1 % any more.

Each run starts the training from its beginning, and ends it with SIGTERM after --steps steps. So give a command that
may be started several times, and that overwrites nothing you need. Results of the training don't change, except that
compression rounds gradients. What the script sets itself is named, and stays; only its bucket size is replaced.

Every run is a recording in the folder, with what the training printed in output.log. Ctrl-C ends the training and
leaves them. All ranks must be started by the command, and see the folder.

Exits with 0 if the training was measured, also if nothing is to be set, and with 1 if it could not be. With --json the
output is one JSON object, which docs/json.md describes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from overlapscope.cli import child_process, recording_folder
from overlapscope.cli.arguments import parse_positive_int, strip_dashes
from overlapscope.cli.reading import print_report
from overlapscope.cli.tuning_runs import RunFailed, RunInterrupted, TuningRuns, clear_runs, has_runs
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval
from overlapscope.trace.ddp_trial import DDPSetting, Trial

if TYPE_CHECKING:
    from overlapscope.analysis import Analysis
    from overlapscope.tuning.candidates import Choice, PromisingSetting
    from overlapscope.tuning.verdict import Run, Trained

_NO_GAIN: Final = Interval(value=0.0, low=0.0, high=0.0)
DEFAULT_FOLDER: Final = Path("tuning")
_DEFAULT_STEPS: Final = 100
_MIN_STEPS: Final = 20


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "-o", "--output", type=Path, default=DEFAULT_FOLDER, help="folder for the runs (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="replace the runs of an earlier tuning in that folder")
    parser.add_argument(
        "--steps",
        type=parse_positive_int,
        default=_DEFAULT_STEPS,
        metavar="N",
        help="number of steps of each run; more show smaller gains (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-compression",
        action="store_true",
        help="also try a communication hook that sends gradients as bf16, or as fp16 without NCCL; it rounds them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("training", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="command to run")


def run(args: argparse.Namespace) -> int:
    """Run the trainings and print the outcome."""
    command = strip_dashes(args.training)
    if not command:
        raise OverlapScopeError("no command to run; give one after '--', as in 'overlapscope tune -- torchrun ...'")
    child_process.find_program(command[0])
    if args.steps < _MIN_STEPS:
        raise OverlapScopeError(f"--steps {args.steps}: give {_MIN_STEPS} or more; the first three are a warm-up")
    if args.force:
        clear_runs(args.output)
    elif has_runs(args.output):
        raise OverlapScopeError(f"{args.output}: already holds recordings; give another folder with -o, or --force")
    recording_folder.create_empty_folder(args.output)
    try:
        return _Tuning(TuningRuns(args.output, command, args.steps), args).run()
    except RunInterrupted as interrupted:
        _print_status(f"interrupted; what was recorded is in {args.output}")
        return 128 + interrupted.number


def _print_status(text: str) -> None:
    print(f"overlapscope tune: {text}", file=sys.stderr, flush=True)


class _Tuning:
    """One tuning: the runs, one after the other."""

    def __init__(self, runs: TuningRuns, args: argparse.Namespace) -> None:
        self._runs = runs
        self._folder: Path = args.output
        self._allows_compression: bool = args.allow_compression
        self._as_json: bool = args.json
        self._number = 0

    def run(self) -> int:
        from overlapscope.report.tuning import build_tuning_report
        from overlapscope.tuning.verdict import Trained, decide, find_fastest, find_favorite, needs_another_pair

        analysis = self._train(DDPSetting(), is_first=True)
        _check(analysis)
        choice = self._choose(analysis)
        base = Trained(setting=DDPSetting(), predicted=None, runs=(self._read(analysis),))
        tried: list[Trained] = []
        if not choice.is_hopeless:
            tried += (self._try(base, size) for size in choice.sizes)
            for addition in choice.additions:
                fastest = find_fastest(base, tried)
                tried.append(self._try(base, addition.on(fastest.setting, fastest.predicted or _NO_GAIN)))
        while (favorite := find_favorite(base, tried)) is not None and needs_another_pair(base, favorite):
            tried[tried.index(favorite)] = self._repeat(favorite)
            base = self._repeat(base)
        outcome = decide(base, tried)
        print_report(build_tuning_report(self._folder, choice, base, tried, outcome), as_json=self._as_json)
        return 0

    def _choose(self, analysis: Analysis) -> Choice:
        """Choose what to run, and say so."""
        from overlapscope.advice.advice import advise
        from overlapscope.tuning import text
        from overlapscope.tuning.candidates import choose_candidates

        choice = choose_candidates(analysis, advise(analysis), allows_compression=self._allows_compression)
        if not choice.is_hopeless:
            _print_status("to be run, with the predicted change of the step:")
            for sentence in text.describe_plans(choice):
                _print_status(f"  {sentence}")
        return choice

    def _try(self, base: Trained, candidate: PromisingSetting) -> Trained:
        """Run a candidate for the first time."""
        from overlapscope.tuning.text import describe_change
        from overlapscope.tuning.verdict import Trained, measure_gain

        trained = Trained(setting=candidate.setting, predicted=candidate.gain)
        try:
            trained = self._repeat(trained)
        except OverlapScopeError as error:
            _print_status(f"left out: {error}")
            return replace(trained, failure=str(error))
        _print_status(describe_change(measure_gain(base, trained)))
        return trained

    def _repeat(self, trained: Trained) -> Trained:
        """Run a setting once more."""
        return trained.with_run(self._read(self._train(trained.setting)))

    def _read(self, analysis: Analysis) -> Run:
        from overlapscope.compare.side import STEP, ComparisonSide, StepChoice
        from overlapscope.tuning.verdict import Run

        return Run(number=self._number, steps_ns=ComparisonSide.of(analysis, StepChoice()).parts_ns()[STEP])

    def _train(self, setting: DDPSetting, *, is_first: bool = False) -> Analysis:
        """Run the training once with a setting."""
        from overlapscope.tuning.text import format_setting

        self._number += 1
        name = format_setting(setting)
        _print_status(f"run {self._number}: {name}")
        with Progress() as progress:
            progress.begin(f"run {self._number}: {name}")
            trial = Trial(setting=setting, calibrates=is_first)
            try:
                return self._runs.run(name, trial, progress.count, probes=is_first)
            except RunFailed as error:
                raise RunFailed(f"run {self._number} ({name}): {error}") from None


def _check(analysis: Analysis) -> None:
    """Check that settings can be tried, and that all ranks are seen.

    Raises:
        OverlapScopeError: they can't, or are not.
    """
    trace = analysis.trace
    expected = int(trace.run.get("world_size") or len(trace.ranks))
    if len(trace.ranks) < expected:
        raise OverlapScopeError(
            f"{trace.path}: {len(trace.ranks)} of {expected} ranks recorded here; start all ranks by one command, and "
            "give a folder that all hosts share"
        )
