"""Record runs in which a known thing is wrong, and compare what is found with the truth.

    python -m benchmarks.injected_faults FOLDER [CASE...]

Four ranks train over gloo with tests/cluster/straggling.py, whose compute is emulated so that a small machine can run
it. Each case is recorded twice, one right after the other: without its faults into FOLDER/CASE.healthy, and with them
into FOLDER/CASE, where truth.json tells what is wrong. Both are then judged as `overlapscope stragglers` does. Cases
that FOLDER holds already are judged and not recorded again. What a fault costs is known in two ways:

extra_ns_per_step   how long it held up its rank, measured inside that rank around the delay. Of a slow link only the
                    comparison is honest: median cycle with it, in the steps that no other fault strikes, less median
                    cycle without it. (Medians, because a stalled machine holds up single transfers for long.)
saved_ns_per_step   by how much steps would be shorter without this fault alone. All ranks wait for the last one, so a
                    delay on one rank hides under a longer one on another

Cases with a slow link run on a cluster of four network namespaces, which needs root. There the kernel's own threads
carry the packets, and where they have to wait for a processor, single transfers take some 80 ms longer: those are
found as well, as transient, and are said not to be injected.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.analysis import Analysis
from overlapscope.lab.network.hosts import make_cluster
from overlapscope.stragglers.finding import Finding
from overlapscope.stragglers.text import name_culprit
from overlapscope.trace.recording import read_trace
from tests.cluster.faults import Fault, SlowLink
from tests.cluster.injected import CASES, STEPS, WORLD_SIZE, names, train

SKIPPED_STEPS: Final = 5
"""At the beginning: buckets are rebuilt, memory is touched for the first time."""
TABLE_WIDTH: Final = 150


def record(case: str, folder: Path, steps: int) -> None:
    """Record one case, its faults and beside it without them, and write its truth."""
    faults = CASES[case]
    healthy = folder.with_name(f"{folder.name}.healthy")
    links = [fault for fault in faults if isinstance(fault, SlowLink)]
    if links:
        with make_cluster(WORLD_SIZE) as hosts:
            train((), healthy, hosts, steps)
            for link in links:
                hosts.limit_rate(link.rank, link.rate)
            train(faults, folder, hosts, steps)
    else:
        train((), healthy, steps=steps)
        train(faults, folder, steps=steps)
    truth = truth_of(faults, folder, healthy, steps)
    (folder / "truth.json").write_text(json.dumps({"case": case} | truth, indent=1))


def truth_of(faults: Sequence[Fault], folder: Path, healthy: Path, steps: int) -> dict[str, Any]:
    """Return what is wrong in a recording, and what it cost."""
    measured = measured_delays(folder)
    delays_ns = {fault: delays_by_step(fault, measured, steps) for fault in faults}
    cycles_ns, healthy_cycles_ns = cycles(folder), cycles(healthy)
    undisturbed_ns = cycles_ns[sum(delays_ns.values()) == 0] if faults else cycles_ns
    truths = []
    for fault, local_ns in delays_ns.items():
        if isinstance(fault, SlowLink):
            extra_ns = saved_ns = float(np.median(undisturbed_ns) - np.median(healthy_cycles_ns))
        else:
            others = [other for other in faults if other is not fault]
            extra_ns, saved_ns = local_ns.mean(), held_up(faults, delays_ns) - held_up(others, delays_ns)
        struck = [step for step in range(SKIPPED_STEPS, steps) if fault.strikes(step)]
        truths.append(
            asdict(fault)
            | {"kind": fault.kind, "cause": fault.cause, "pattern": fault.pattern}
            | {"extra_ns_per_step": extra_ns, "saved_ns_per_step": saved_ns}
            | {"steps": struck, "extra_ns": [int(each) for each in local_ns if each]}
        )
    return {
        "world_size": WORLD_SIZE,
        "steps": steps,
        "skipped_steps": SKIPPED_STEPS,
        "step_time_ns": summary(cycles_ns),
        "healthy_step_time_ns": summary(healthy_cycles_ns),
        "healthy": healthy.name,
        "faults": truths,
    }


def measured_delays(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks say they were held up."""
    files = (folder / f"truth_rank_{rank}.json" for rank in range(WORLD_SIZE))
    return [delay for file in files for delay in json.loads(file.read_text())]


def delays_by_step(fault: Fault, measured: Sequence[dict[str, Any]], steps: int) -> np.ndarray:
    """Return the nanoseconds that a fault held up its rank, for each step that counts; zeros if it is not of a rank."""
    by_step_ns = np.zeros(steps, dtype=np.int64)
    for delay in measured:
        if (delay["kind"], delay["rank"]) == (fault.kind, fault.rank):
            by_step_ns[delay["steps"]] = delay["extra_ns"]
    return by_step_ns[SKIPPED_STEPS:]


def held_up(faults: Sequence[Fault], delays_ns: dict[Fault, np.ndarray]) -> float:
    """Return the mean nanoseconds by which these faults make a step longer: by those of the rank that has most."""
    of_ranks = (sum(delays_ns[fault] for fault in faults if fault.rank == rank) for rank in range(WORLD_SIZE))
    return float(np.max(np.broadcast_arrays(*of_ranks), axis=0).mean())


def cycles(folder: Path) -> np.ndarray:
    """Return the nanoseconds from step to step on rank 0, for each step that counts."""
    steps = read_trace(folder).steps.query(f"rank == 0 and step >= {SKIPPED_STEPS}").sort_values("step")
    return (steps["end_ns"] - steps["start_ns"]).to_numpy()


def summary(nanoseconds: np.ndarray) -> dict[str, float]:
    """Return median and mean."""
    return {"median": float(np.median(nanoseconds)), "mean": float(nanoseconds.mean())}


@dataclass(frozen=True)
class Judgment:
    """A fault, or one of the findings that no fault explains, and what was said of it."""

    fault: str
    truth_ns: float
    finding: Finding | None

    @property
    def error(self) -> float:
        """Return the error of the saving that was found, as a share of the truth."""
        return self.finding.saving.step.value / self.truth_ns - 1 if self.finding and self.truth_ns else math.nan


def judge(faults: Sequence[Fault], folder: Path) -> list[Judgment]:
    """Compare the findings in a recording with the faults that were injected into it."""
    stragglers = Analysis(read_trace(folder)).stragglers
    findings = list(stragglers.findings) if stragglers else []
    truths = json.loads((folder / "truth.json").read_text())["faults"] if faults else []
    judgments = []
    for fault, truth in zip(faults, truths, strict=True):
        right = next((finding for finding in findings if names(finding, fault)), None)
        if right is not None:
            findings.remove(right)
        what = f"rank {fault.rank}: {fault.cause}, {fault.pattern}"
        judgments.append(Judgment(what, truth["extra_ns_per_step"], right))
    return judgments + [Judgment("nothing", 0.0, finding) for finding in findings]


def rows_of(case: str, faults: Sequence[Fault], folder: Path) -> Iterator[tuple[str, ...]]:
    """Return a row for each fault and each finding, of a recording."""
    judgments = judge(faults, folder)
    if not judgments:
        yield case, "nothing", "", "nothing", "", ""
    for judgment in judgments:
        finding = judgment.finding
        said, cost, error = "NOT FOUND", "", ""
        if finding is not None:
            said = f"{name_culprit(finding)}: {finding.cause}, {finding.pattern.kind}"
            cost = f"{finding.saving.step.value / 1e6:.2f}"
            cost += f" ({finding.saving.step.low / 1e6:.2f} to {finding.saving.step.high / 1e6:.2f})"
            error = f"{100 * judgment.error:+.1f} %" if judgment.truth_ns else "not injected"
        yield case, judgment.fault, f"{judgment.truth_ns / 1e6:.2f}", said, cost, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where recordings go")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (%(default)s)")
    args = parser.parse_args()
    table = Table("case", "truth", "ms a step", "found", "ms a step", "error", box=SIMPLE_HEAD)
    for case in track(args.cases or CASES, console=Console(stderr=True)):
        folder = args.folder / case
        if not (folder / "truth.json").exists():
            record(case, folder, args.steps)
        healthy = rows_of(f"{case}, healthy", (), folder.with_name(f"{case}.healthy"))
        for row in (*healthy, *rows_of(case, CASES[case], folder)):
            table.add_row(*row)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)


if __name__ == "__main__":
    main()
