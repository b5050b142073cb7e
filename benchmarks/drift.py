"""What it costs to see that replicas drift apart, how soon it is seen, and that nothing is seen in healthy trainings.

    python -m benchmarks.drift [--models MODEL...] [--steps 1000] [--healthy-steps 1000] [--faults NAME...]

- The CPU time of all that the comparison does on the training thread, as a share of the median step, on two recorded
  ranks over gloo with a compute thread each: of all steps but the first ones, and in a step at most. The first pass,
  which is whole, is given apart. Then fingerprints are switched off and on again every few steps, and a step with them
  is given over one without, by the CPU time of the thread and by wall time: medians of the ratios of neighboring turns,
  and their 90 % intervals. Wall times mean little while other processes use the cores.
- Of each fault of the laboratory in replicas, on three ranks: the steps from the fault to the watchdog's report, and
  what the report says.
- The healthy loops of the tests, with our DDP and with torch's, every parameter compared in every step: how many steps,
  and how many models, parameters and reports there were.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models import LARGE_MODELS, SMALL_MODELS, TINY_MODELS, training_step
from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.replicas.replica import FingerprintedReplica
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.lab import jobs
from overlapscope.lab.catalog import FAULT_STEP, FAULTS, Fault
from overlapscope.lab.truth import find_fault_script
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.process_files import read_reports
from tests.cluster import replicated
from tests.cluster.ranks import run_ranks
from tests.lab.warm_ranks import WarmRank

_WARM_UP_STEPS: Final = 100
_TURN_STEPS: Final = 20
MODELS: Final = TINY_MODELS | SMALL_MODELS | LARGE_MODELS
_KINDS: Final[dict[str, type[TorchDDP]]] = {"ours": DistributedDataParallel, "torch's": TorchDDP}


@dataclass(frozen=True)
class Measured:
    """What fingerprints take one rank, in nanoseconds."""

    step_ns: float
    """Wall time of a step, the median."""
    first_ns: int
    """CPU time of the first pass."""
    spent_ns: tuple[int, ...]
    """CPU time in each step after the first ones."""
    period: int
    """At the end."""
    cpu_ratios: tuple[float, ...]
    """A step with fingerprints over one without, in neighboring turns."""
    wall_ratios: tuple[float, ...]

    def __str__(self) -> str:
        spent_ns = float(np.mean(self.spent_ns))
        return (
            f"step {self.step_ns / 1e3:9.0f} us  fingerprints {spent_ns / 1e3:6.2f} us, {spent_ns / self.step_ns:.3%}, "
            f"in a step at most {max(self.spent_ns) / 1e3:6.0f} us, first {self.first_ns / 1e3:7.0f} us, "
            f"period {self.period:4}; with over without: CPU {median_of(self.cpu_ratios)}, "
            f"wall {median_of(self.wall_ratios)}"
        )


def median_of(ratios: Sequence[float]) -> str:
    """Format the median of some ratios with its 90 % interval, by their ranks."""
    ordered = sorted(ratios)
    margin = max(0, math.floor((len(ordered) - 1.645 * math.sqrt(len(ordered))) / 2))  # as of a binomial distribution
    return f"{np.median(ordered):.4f} ({ordered[margin]:.4f} to {ordered[-1 - margin]:.4f})"


def measure(model: str, steps: int, folder: Path) -> Measured:
    """Measure on one rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    workload = MODELS[model]()
    ddp = DistributedDataParallel(workload.module, trace=folder)
    train, replica = training_step(workload, ddp), ddp._replica
    assert replica is not None
    spent_ns: list[int] = []
    clock_ns = min(-(time.thread_time_ns() - time.thread_time_ns()) for _ in range(1000))
    original = FingerprintedReplica.on_forward_start

    def timed(replica: FingerprintedReplica, *args: Any) -> None:
        time.thread_time_ns()  # after a step the clock itself is slow, the first time
        begin_ns = time.thread_time_ns()
        original(replica, *args)
        spent_ns.append(max(0, time.thread_time_ns() - begin_ns - clock_ns))

    FingerprintedReplica.on_forward_start = timed  # type: ignore[method-assign, assignment]
    step_ns = [timed_step(train)[1] for _ in range(_WARM_UP_STEPS + steps)][_WARM_UP_STEPS:]
    FingerprintedReplica.on_forward_start = original  # type: ignore[method-assign]
    turns = []
    for turn in range(max(2, steps // _TURN_STEPS)):
        ddp._replica = replica if turn % 2 else None
        cpu_ns, wall_ns = zip(*(timed_step(train) for _ in range(_TURN_STEPS)), strict=True)
        turns.append((np.mean(cpu_ns), np.median(wall_ns)))
    ddp._replica = replica
    cpu_ratios, wall_ratios = (
        tuple(float(on[clock] / off[clock]) for off, on in zip(turns[::2], turns[1::2], strict=False))
        for clock in (0, 1)
    )
    spent = tuple(spent_ns[_WARM_UP_STEPS:])
    return Measured(float(np.median(step_ns)), spent_ns[0], spent, replica.period, cpu_ratios, wall_ratios)


def timed_step(train: Callable[[], None]) -> tuple[int, int]:
    """Measure CPU time of this thread, and wall time, of a step."""
    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    train()
    return time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns


def found(fault: Fault) -> str:
    """Run a fault, and say how soon it is reported."""
    with tempfile.TemporaryDirectory() as temporary:
        trace = Path(temporary, "trace")
        with jobs.run_fault_job(find_fault_script(fault), 3, trace=trace, start=WarmRank) as job:
            job.wait(patience_s=fault.patience_s)
        reports = read_reports(find_rank_folders(trace))
        if not reports:
            evidence, _ = read_evidence(trace)
            return f"not reported while it ran; afterwards: {judge(evidence).sentence}"
    began = 0 if fault.name == "other-weights" else FAULT_STEP
    return f"after {(reports[0].step or 0) - began} steps: {reports[0].sentence}"


def train_healthily(name: str, kind: str, steps: int, folder: Path) -> None:
    """Train one loop, on one rank."""
    attach(folder)
    replicated.STEPS = steps
    train = next(train for train in replicated.HEALTHY if train.__name__ == name)
    with replicated.at_any_cost():
        train(_KINDS[kind])


def judged(name: str, kind: str, steps: int) -> str:
    """Run a loop, and say what is said of it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "trace")
        if any(run_ranks(train_healthily, 2, name, kind, steps, folder)):
            return "failed"
        evidence, _ = read_evidence(folder)
        reports = read_reports(find_rank_folders(folder))
        done = min(one.steps_done for one in evidence.ranks.values())
    what = "nothing reported" if not reports else f"REPORTED: {reports[0].sentence}"
    tensors = sum(one.tensors for one in evidence.replicas)
    verdict = judge(evidence)
    return f"{done:5} steps, {len(evidence.replicas)} models, {tensors} parameters: {what}; diagnosed as {verdict.kind}"


def main() -> None:
    drifting = [fault.name for fault in FAULTS if fault.kinds[0] == "replicas differ"]
    loops = [train.__name__ for train in replicated.HEALTHY]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["tiny", *SMALL_MODELS], choices=MODELS, metavar="MODEL")
    parser.add_argument(
        "--steps", type=int, default=1000, help="of each model, and as many again with and without (default: 1000)"
    )
    parser.add_argument("--healthy-steps", type=int, default=1000, help="of each healthy loop (default: 1000)")
    parser.add_argument("--loops", nargs="*", default=loops, choices=loops)
    parser.add_argument("--faults", nargs="*", default=drifting, choices=drifting)
    args = parser.parse_args()
    for model in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            results = run_ranks(measure, 2, model, args.steps, Path(temporary, "trace"))
        for rank, measured in enumerate(results):
            print(f"{model:16} rank {rank}  {measured}", flush=True)
    for name in args.faults:
        print(f"{name:24}{found(next(fault for fault in FAULTS if fault.name == name))}", flush=True)
    for name in args.loops:
        for kind in _KINDS:
            print(f"{name:32}{kind:8}{judged(name, kind, args.healthy_steps)}", flush=True)


if __name__ == "__main__":
    main()
