"""What it costs to see that replicas drift apart, how soon it is seen, and that nothing is seen in healthy trainings.

    python -m benchmarks.drift [--models MODEL...] [--steps 200] [--healthy-steps 1000] [--faults NAME...]

- The CPU time of all that the comparison does on the training thread, as a share of the median step, on two recorded
  ranks over gloo. The first passes, which are whole, are given apart: they are taken once.
- Of each fault of the laboratory in replicas, on three ranks: the steps from the fault to the watchdog's report, and
  what the report says.
- The healthy loops of the tests, with our DDP and with torch's, every parameter compared in every step: how many steps,
  and how many models, parameters and reports there were.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
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

_WHOLE_PASSES: Final = 5
"""Steps until the first period is in force."""
MODELS: Final = TINY_MODELS | SMALL_MODELS | LARGE_MODELS
_KINDS: Final[dict[str, type[TorchDDP]]] = {"ours": DistributedDataParallel, "torch's": TorchDDP}


def measure(model: str, steps: int, folder: Path) -> tuple[float, float, float, int]:
    """On one rank: microseconds of a step and of its fingerprints, of a whole pass, and the period at the end."""
    torch.manual_seed(0)
    workload = MODELS[model]()
    ddp = DistributedDataParallel(workload.module, trace=folder)
    train = training_step(workload, ddp)
    spent_ns: list[int] = []
    clock_ns = min(-(time.thread_time_ns() - time.thread_time_ns()) for _ in range(1000))
    original = FingerprintedReplica.on_forward_start

    def timed(replica: FingerprintedReplica, *args: Any) -> None:
        time.thread_time_ns()  # after a step the clock itself is slow, the first time
        begin_ns = time.thread_time_ns()
        original(replica, *args)
        spent_ns.append(time.thread_time_ns() - begin_ns - clock_ns)

    FingerprintedReplica.on_forward_start = timed  # type: ignore[method-assign]
    ends_ns = [time.perf_counter_ns()]
    for _ in range(steps + _WHOLE_PASSES):
        train()
        ends_ns.append(time.perf_counter_ns())
    step_us = float(np.median(np.diff(ends_ns)[_WHOLE_PASSES:])) / 1e3
    assert ddp._replica is not None
    period = ddp._replica._schedule.period
    return step_us, sum(spent_ns[_WHOLE_PASSES:]) / steps / 1e3, min(spent_ns[1 : _WHOLE_PASSES - 1]) / 1e3, period


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
    """One loop, on one rank."""
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
    parser.add_argument("--steps", type=int, default=200, help="of each model (default: 200)")
    parser.add_argument("--healthy-steps", type=int, default=1000, help="of each healthy loop (default: 1000)")
    parser.add_argument("--loops", nargs="*", default=loops, choices=loops)
    parser.add_argument("--faults", nargs="*", default=drifting, choices=drifting)
    args = parser.parse_args()
    for model in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            results = run_ranks(measure, 2, model, args.steps, Path(temporary, "trace"))
        for rank, (step_us, cost_us, pass_us, period) in enumerate(results):
            print(
                f"{model:16} rank {rank}  step {step_us:9.1f} us  fingerprints {cost_us:7.2f} us, "
                f"{cost_us / step_us:.3%}  all at once {pass_us:9.1f} us  period {period}",
                flush=True,
            )
    for name in args.faults:
        print(f"{name:24}{found(next(fault for fault in FAULTS if fault.name == name))}", flush=True)
    for name in args.loops:
        for kind in _KINDS:
            print(f"{name:32}{kind:8}{judged(name, kind, args.healthy_steps)}", flush=True)


if __name__ == "__main__":
    main()
