"""Run every fault of the laboratory, and say of each verdict in which points it is right.

    python -m benchmarks.fault_table [--ranks 2] [--recorded-stock] [--stock] [FAULT...]
    python -m benchmarks.fault_table --kill
    python -m benchmarks.fault_table --healthy 1000

Prints a Markdown table: of each fault and number of ranks the kind, blame, step, bucket, parameters and line of the
verdict ('yes' if it is right, else what it says; '-' where there is none). 'seconds' are those from the fault to the
first message, and 'message' whether it was right in all points. The message is a watchdog's; where all ranks were
aborted before a watchdog could speak it is the launcher's ('after the end'), as `overlapscope record` prints it. The
other points are those of `overlapscope diagnose` some seconds later, while ranks that hang still hang; 'afterwards' is
whether it is right in all of them once they are gone. With --stock: how the same job ends without us.

--recorded-stock  with torch's own DDP, recorded
--kill            SIGKILL and SIGABRT of every subset of the ranks of a healthy job, all of them at once included
--healthy STEPS   a long training in which nothing is wrong
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.lab import jobs
from overlapscope.lab.catalog import FAULTS, Fault
from overlapscope.lab.jobs import diagnose
from overlapscope.lab.truth import VerdictCheck, check_verdict, find_fault_script
from tests.lab.outcome import Outcome, run_fault
from tests.lab.reports import load_reports
from tests.lab.warm_ranks import WarmRank

POINTS: Final = ("kind", "blamed", "step", "bucket", "parameters", "line")
HEALTHY_TRAINING: Final = Path(__file__).with_name("healthy_training.py")
_KILLED_AFTER_S: Final = 4
_NOTICED_WITHIN_S: Final = 8


def row(fault: Fault, world_size: int, outcome: Outcome, stock: str | None) -> list[str]:
    checks = {check.point: check for check in check_verdict(fault, world_size, outcome.verdict)}
    wrong = outcome.wrong(fault, world_size)
    return [
        fault.name,
        str(world_size),
        *(_cell(checks.get(point)) for point in POINTS),
        "-" if fault.is_healthy else outcome.seconds,
        *(f"**{'; '.join(wrong[what])}**" if what in wrong else "yes" for what in ("message", "afterwards")),
        *([] if stock is None else [stock]),
    ]


def _cell(check: VerdictCheck | None) -> str:
    if check is None:
        return "-"
    return "yes" if check.is_right else f"**{check.said}**"


def stock_ends(fault: Fault, world_size: int) -> str:
    """Return how a job ends that nobody watches."""
    timeout_s = jobs.STOCK_TIMEOUT_S
    with jobs.run_fault_job(
        find_fault_script(fault), world_size, wrapper="torch", timeout_s=timeout_s, start=WarmRank
    ) as job:
        job.wait(patience_s=timeout_s + 5)
        fault_ns = job.fault_ns()
        after = "" if fault_ns is None else f" after {time.monotonic() - fault_ns / 1e9:.0f} s"
        return ", ".join(sorted(set(job.ends()))) + after


def print_table(faults: Sequence[Fault], sizes: Sequence[int], *, wrapper: jobs.Wrapper, with_stock: bool) -> bool:
    """Print the rows as they come. Returns whether all of them are right."""
    print_row(["fault", "ranks", *POINTS, "seconds", "message", "afterwards", *(["stock"] if with_stock else [])])
    print_row(["---"] * (5 + len(POINTS) + with_stock))
    right = total = 0
    for fault in faults:
        if wrapper == "torch" and fault.needs_instrumented_ddp:
            continue
        for world_size in sizes:
            if world_size in fault.world_sizes:
                stock = stock_ends(fault, world_size) if with_stock else None
                outcome = run_fault(fault, world_size, wrapper=wrapper)
                cells = row(fault, world_size, outcome, stock)
                print_row(cells)
                total += 1
                right += "**" not in "".join(cells)
    print(f"\n{right} of {total} rows are right in every point.")
    return right == total


def print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def print_kills(sizes: Sequence[int]) -> bool:
    """Print a row for each subset and signal. Returns whether exactly those killed are blamed in all of them."""
    print_row(["ranks", "killed", "signal", "kind", "blamed", "what it says"])
    print_row(["---"] * 6)
    right = total = 0
    for world_size in sizes:
        for victims in chain.from_iterable(combinations(range(world_size), n) for n in range(1, world_size + 1)):
            for number in (signal.SIGKILL, signal.SIGABRT):
                verdict = verdict_after_kill(world_size, victims, number)
                nobody_is_left = len(victims) == world_size  # to say whom to blame
                is_right = verdict.kind == "killed" and (
                    set(verdict.named) == set(victims) or (nobody_is_left and not verdict.named)
                )
                right, total = right + is_right, total + 1
                emphasis = "" if is_right else "**"
                blamed = " ".join(map(str, verdict.named)) or "nobody"
                said = " ".join([verdict.sentence, *verdict.evidence[-1:]])
                cells = [str(world_size), " ".join(map(str, victims)), number.name, verdict.kind, blamed]
                print_row([*(f"{emphasis}{cell}{emphasis}" for cell in cells), said])
    print(f"\n{right} of {total} rows are right.")
    return right == total


def verdict_after_kill(world_size: int, victims: Sequence[int], number: signal.Signals) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="fault-table-") as temporary:
        trace = Path(temporary, "trace")
        with jobs.run_fault_job(HEALTHY_TRAINING, world_size, trace=trace, start=WarmRank) as job:
            while not all((trace / f"rank_{rank}").exists() for rank in range(world_size)):
                time.sleep(0.05)
            time.sleep(_KILLED_AFTER_S)
            for rank in victims:
                os.kill(job.processes[rank].pid, number)
            job.wait(time_limit_s=time.monotonic() - job.started_s + _NOTICED_WITHIN_S)
            return diagnose(trace)[0]


def print_healthy(steps: int, world_size: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="fault-table-") as temporary:
        trace = Path(temporary, "trace")
        environment = {"OVERLAPSCOPE_LAB_STEPS": str(steps)}
        with jobs.run_fault_job(
            HEALTHY_TRAINING, world_size, trace=trace, extra_environment=environment, start=WarmRank
        ) as job:
            job.wait(time_limit_s=600)
            ends = job.ends()
        reports = load_reports(trace)
        verdict, _ = diagnose(trace)
    print(f"{steps} steps on {world_size} ranks: {', '.join(ends)}; {len(reports)} reports; verdict: {verdict.kind}")
    for report in reports:
        print(f"  rank {report.rank}: {report.verdict.sentence}{' (retracted)' if report.is_retracted else ''}")
    return not reports and verdict.kind == "healthy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [fault.name for fault in FAULTS]
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="as in 'overlapscope lab faults' (default: all)")
    parser.add_argument("--ranks", type=int, action="append", choices=[2, 3, 4], help="may be repeated (default: all)")
    parser.add_argument("--recorded-stock", action="store_true", help="with torch's own DDP, recorded")
    parser.add_argument("--stock", action="store_true", help="also run without us")
    parser.add_argument("--kill", action="store_true", help="kill ranks of a healthy job")
    parser.add_argument("--healthy", type=int, metavar="STEPS", help="a long training in which nothing is wrong")
    args = parser.parse_args()
    if unknown := set(args.faults) - set(names):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    sizes = args.ranks or [2, 3, 4]
    if args.kill:
        sys.exit(0 if print_kills(sizes) else 1)
    if args.healthy:
        sys.exit(0 if print_healthy(args.healthy, sizes[0]) else 1)
    faults = [fault for fault in FAULTS if not args.faults or fault.name in args.faults]
    wrapper: jobs.Wrapper = "torch" if args.recorded_stock else "instrumented"
    sys.exit(0 if print_table(faults, sizes, wrapper=wrapper, with_stock=args.stock) else 1)


if __name__ == "__main__":
    main()
