"""Rank 0 of an experiment: it decides which trial is next, and stores the results."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from agent import RESULT_FILE, Rank
from progress import TrialProgress
from workloads import NEED_SKLEARN, WORKLOADS

from instrumented_ddp.collectives.backends import require_device_per_rank
from instrumented_ddp.strategies.registry import STRATEGIES
from overlapscope import __version__
from overlapscope.analysis import Analysis
from overlapscope.breakdown.text import describe_summary
from overlapscope.bucket_model.calibration import busbw_gb_per_s
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.registry import get_experiment
from overlapscope.lab.experiments.results import Conditions, Results
from overlapscope.lab.experiments.trial import ExperimentTrial, list_remaining
from overlapscope.trace.recording import read_trace

_BYTES_PER_ELEMENT: Final = 4
_LINK_CHECK: Final = ((1024, 1), (4 * 1024**2, 1))
"""Bytes and number of all-reduces: one dominated by latency, and one by bandwidth."""
_MEASURED_MODELS: Final = ("convnet", "transformer")


def lead(rank: Rank, args: argparse.Namespace) -> int:
    """Run all trials of an experiment that have not been done. Returns the exit code.

    Raises:
        OverlapScopeError: The experiment can't be run as requested.
    """
    experiment = get_experiment(args.name)
    options = parse_options(args, rank.size)
    trials = experiment.trials(options)
    if any(trial.model in NEED_SKLEARN for trial in trials) and find_spec("sklearn") is None:
        raise OverlapScopeError(
            f"{' and '.join(NEED_SKLEARN)} need scikit-learn, which is missing; pip install 'overlapscope[examples]', "
            "or give --model transformer"
        )
    results = Results(args.output / experiment.name)
    work = _TrialRunner(rank, experiment, results)
    if not list_remaining(trials, results.done):
        print(f"all {len(trials)} trials had been done", flush=True)
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        results.check(work.measure_conditions(options.backend))
        work.run(trials)
    except KeyboardInterrupt:
        kept = len([trial for trial in trials if trial.key in results.done])
        print(
            f"\noverlapscope lab: interrupted; {kept} of {len(trials)} trials are kept, and the same command goes on",
            file=sys.stderr,
        )
        return 130
    return 0


def parse_options(args: argparse.Namespace, ranks: int) -> ExperimentOptions:
    """Convert the arguments to options of the experiment.

    Raises:
        OverlapScopeError: There is no such model or strategy, or too few ranks or devices.
    """
    for what, given, known in (("model", args.model, WORKLOADS), ("strategy", args.strategy, STRATEGIES)):
        for name in given or ():
            if name not in known:
                raise OverlapScopeError(f"{name}: no such {what}; there are {', '.join(known)}")
    if args.backend == "nccl" and not torch.cuda.is_available():
        raise OverlapScopeError("no CUDA device found here, and nccl needs one; give --backend gloo")
    if ranks < 2:
        raise OverlapScopeError("an experiment needs at least 2 ranks; there is one")
    backend = args.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    require_device_per_rank(backend)
    return ExperimentOptions(
        models=tuple(args.model or _MEASURED_MODELS),
        ranks=ranks,
        backend=backend,
        strategies=tuple(args.strategy or STRATEGIES),
        steps=args.steps,
        repetitions=args.repetitions,
        seed=args.seed,
    )


class _TrialRunner:
    """Runner of trials, one after the other."""

    def __init__(self, rank: Rank, experiment: Experiment, results: Results) -> None:
        self._rank, self._experiment, self._results = rank, experiment, results
        self._conditions: Conditions | None = None

    def measure_conditions(self, backend: str) -> Conditions:
        """Measure the link and note the other conditions."""
        folder = self._results.folder / "link-check"
        result, failure = self._run_script("all_reduces.py", folder, self._rank.size, backend, {"series": _LINK_CHECK})
        shutil.rmtree(folder, ignore_errors=True)
        if failure:
            raise OverlapScopeError(f"ranks can't reduce anything together over {backend}: {failure}")
        latency_ns, bandwidth_ns = result["times_ns"]
        self._conditions = Conditions(
            hosts=self._rank.hosts(),
            device=torch.cuda.get_device_name() if backend == "nccl" else "cpu",
            versions={"overlapscope": __version__, "python": platform.python_version(), "torch": torch.__version__},
            link_latency_ns=latency_ns,
            link_bytes_per_s=busbw_gb_per_s(_LINK_CHECK[1][0], bandwidth_ns, self._rank.size) * 1e9,
            argv=("overlapscope", "lab", "run", *sys.argv[1:]),
        )
        return self._conditions

    def run(self, trials: list[ExperimentTrial]) -> None:
        """Run the trials that are left."""
        assert self._conditions is not None
        with TrialProgress(trials, self._results.done) as progress:
            for trial in list_remaining(trials, self._results.done):
                progress.begin(trial)
                measured, failure = self._measure(trial)
                self._results.add(trial, self._conditions, measured, failure)
                progress.end(trial, measured, failure)

    def _measure(self, trial: ExperimentTrial) -> tuple[dict[str, Any], str]:
        """Run a trial; return what was measured, or why it failed."""
        folder = self._results.recording(trial)
        shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted trial
        if not trial.model:
            count = trial.total_elements // trial.tensor_elements
            series = [(trial.tensor_elements * _BYTES_PER_ELEMENT, count)]
            result, failure = self._run_script("all_reduces.py", folder, trial.ranks, trial.backend, {"series": series})
            return ({} if failure else {"step_ns": result["times_ns"][0]}), failure
        settings = json.loads(trial.key)
        result, failure = self._run_script(
            "train.py", folder, trial.ranks, trial.backend, settings, detail=trial.detail
        )
        if failure:
            return {}, failure
        try:
            analysis = _analyze(folder)
            observed = self._experiment.observe(analysis) if self._experiment.observe else {}
        except OverlapScopeError as error:
            return {}, str(error)
        return {**_make_columns(analysis), **result, **observed}, ""

    def _run_script(
        self, script: str, folder: Path, ranks: int, backend: str, settings: dict[str, Any], detail: str | None = None
    ) -> tuple[dict[str, Any], str]:
        """Run a script on some ranks; return its result, or why it failed."""
        order = self._rank.send_order(
            script=script,
            folder=str(folder.absolute()),
            ranks=ranks,
            backend=backend,
            settings=settings,
            detail=detail,
        )
        self._rank.run_order(order)
        failure = self._rank.failure_of(order)
        self._rank.collect_recordings(order)
        return ({} if failure else json.loads((folder / RESULT_FILE).read_text())), failure


def _analyze(recording: Path) -> Analysis:
    """Analyze the recording of a trial.

    Raises:
        OverlapScopeError: The recording can't be read, or has no step that all ranks have finished and that can be
            compared.
    """
    analysis = Analysis(read_trace(recording))
    if not analysis.summary.steps:
        raise OverlapScopeError(f"{recording}: {describe_summary(analysis.summary)}")
    return analysis


def _make_columns(analysis: Analysis) -> dict[str, Any]:
    """Compute the columns of a row: the mean step and its blocks, which sum to it, hidden communication, and all steps.

    Returns:
        step_ns, a column for each of ``BLOCKS``, hidden_ns, and steps_ns: a list with the time of each counted step.
    """
    summary = analysis.summary
    counted = summary.figures[summary.is_steady]
    return {
        "step_ns": summary.mean.step.value,
        **{f"{name}_ns": mean.value for name, mean in summary.mean.blocks.items()},
        "hidden_ns": summary.hidden.value,
        "steps_ns": counted.groupby("step")["step_time_ns"].mean().tolist(),
    }


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
