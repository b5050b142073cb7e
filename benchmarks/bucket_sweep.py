"""The step time of every bucket size, really measured, for one model over one link: what predictions are held against.

    python -m benchmarks.bucket_sweep FOLDER --model gpt --link 1gbit

Two ranks train over gloo with torch's own DDP, one thread each. Settings that lead to the same buckets are measured
once. A step is timed from the end of the one before to its own end, each the end on the rank that is last. A setting
has the median of its steps, and as its noise the difference between the medians of its odd and its even blocks. Blocks
during which the machine was busy with something else are measured again. Before that, two recordings are made to
predict from, and one of them tells the best plan of all. That plan is among the settings, in torch's DDP as
``bucket_cap_mb_list`` and in ours as ``bucket_plan``; ours with the default is there to compare it with. FOLDER holds

traces/plain      a recording of 30 steps with our DDP and its default buckets
traces/probe      a recording of 30 steps that tries several plans
calibration.json  of ``overlapscope calibrate``
plan.json         the best plan, if it is one that no single size gives
sweep.json        all step times, the buckets, and what the link and the machine were like
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.quiet_machine import wait_until_quiet
from benchmarks.sweep_file import Measured, Sweep
from benchmarks.swept_training import MODELS, WORLD_SIZE, Block, Partition, Setting, Task
from overlapscope.advice.advice import advise
from overlapscope.analysis import Analysis
from overlapscope.bucket_model.plan_file import write_plan
from overlapscope.trace.environment import DETAIL_VARIABLE, TRACE_VARIABLE
from overlapscope.trace.recording import read_trace
from tests.cluster.shaped_link import LINKS, Ranks, check, ranks_over

CAPS_MB: Final = (0.1, 1, 2, 3.5, 5, 7, 10, 15, 25, 50, 100)
ROUNDS, STEPS = 6, 4
RECORDED_STEPS: Final = 30
PROBE_VARIABLE: Final = "OVERLAPSCOPE_PROBE_BUCKETS"
TIME_LIMIT_S: Final = 900
LONGEST_WAIT_S: Final = 15
"""For a quiet machine, before ranks are started."""
MB: Final = 1024**2


def sweep(model: str, link: str, ranks: Ranks, settings: Sequence[Setting], rounds: int, time_limit_s: float) -> Sweep:
    """Measure all settings. Six rounds of ten settings and steps of half a second take 2 minutes, if it is quiet."""
    task = Task(
        model=model,
        settings=tuple(settings),
        rounds=rounds,
        steps=STEPS,
        carrier_pids=ranks.carrier_pids,
        time_limit_s=time_limit_s,
    )
    link_check = check(ranks, LINKS[link])
    with tempfile.TemporaryDirectory() as folder:
        task.write(Path(folder, "task.json"))
        _run(ranks, "benchmarks.swept_training", folder, time_limit_s=time_limit_s + TIME_LIMIT_S)
        seen = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    parameters = tuple((name, each.nbytes) for name, each in MODELS[model]().module.named_parameters())
    alike: dict[tuple[tuple[bool, bool], str], list[Setting]] = {}
    for setting, partition in zip(task.settings, seen[0]["partitions"], strict=True):
        alike.setdefault((setting.wrapper, json.dumps(partition)), []).append(setting)
    blocks_of_ranks = [[Block(*block) for block in rank["blocks"]] for rank in seen]
    measured = [
        _measured(number, tuple(same), json.loads(partition), parameters, blocks_of_ranks)
        for number, ((_, partition), same) in enumerate(alike.items())
    ]
    return Sweep(model=model, link=link, parameters=parameters, link_check=link_check, measured=tuple(measured))


def _measured(
    number: int,
    settings: tuple[Setting, ...],
    buckets: Partition,
    parameters: Sequence[tuple[str, int]],
    blocks_of_ranks: Sequence[Sequence[Block]],
) -> Measured:
    """Return what all ranks say of one partition."""
    own_blocks = [[block for block in blocks if block.number == number] for blocks in blocks_of_ranks]
    ends_ns = np.max([[block.ends_ns for block in blocks] for blocks in own_blocks], axis=0)
    return Measured(
        settings=settings,
        buckets=buckets,
        bucket_bytes=tuple(sum(parameters[index][1] for index in bucket) for bucket in buckets),
        step_ns=np.diff(ends_ns),
        cores_of_others=tuple(block.cores_of_others for block in own_blocks[0]),
    )


def calibrate(ranks: Ranks, path: Path, largest_mb: int) -> None:
    """Time all-reduces of many sizes over the link, in some seconds."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/rendezvous"
        options = ("--init-method", meeting, "--max-mb", str(largest_mb))
        _run(ranks, "instrumented_ddp.calibrate", "-o", str(path.absolute()), *options)


def record(ranks: Ranks, model: str, trace: Path, *, probe_buckets: bool) -> None:
    """Record some steps with our DDP, with the times at which every gradient was ready."""
    variables = {TRACE_VARIABLE: str(trace.absolute()), DETAIL_VARIABLE: "parameters"}
    if probe_buckets:
        variables[PROBE_VARIABLE] = "1"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/rendezvous", model, str(RECORDED_STEPS))
        _run(ranks, "benchmarks.recorded_training", *arguments, variables=variables)


def settings_of_best_plan(folder: Path) -> list[Setting]:
    """Return the best plan by the recording with probes, and our default; nothing if one size gives that plan."""
    advice = advise(Analysis(read_trace(folder / "traces" / "probe")), folder / "calibration.json")
    found = advice.recommendation
    if found.free.buckets == found.best.buckets:
        return []
    plan = folder / "plan.json"
    write_plan(plan, advice.plan_file())
    ours = [Setting(is_ours=True), Setting(bucket_plan=str(plan.absolute()), is_ours=True)]
    if found.free_caps_mb is None:
        return ours
    return [Setting(bucket_cap_mb_list=tuple(found.free_caps_mb)), *ours]


def table_of(sweep: Sweep) -> Table:
    """Tabulate a row for each way to fill the buckets, in the order of their number."""
    fastest_ms = min(each.median_ms for each in sweep.measured)
    size_mb = sum(size for _, size in sweep.parameters) / MB
    table = Table(title=f"{sweep.model} ({size_mb:.1f} MB), {sweep.link}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("bucket_cap_mb")
    for heading in ("buckets", "steps", "step, ms", "noise", "over fastest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("MB of each")
    for each in sorted(sweep.measured, key=lambda each: -len(each.buckets)):
        sizes = [f"{size / MB:.3g}" for size in each.bucket_bytes]
        table.add_row(
            each.label,
            str(len(sizes)),
            str(each.quiet_step_ns.size),
            f"{each.median_ms:.1f}",
            "-" if math.isnan(each.noise) else f"{each.noise:.1%}",
            f"{each.median_ms / fastest_ms - 1:+.1%}",
            " ".join(sizes if len(sizes) <= 6 else [*sizes[:4], "...", sizes[-1]]),
        )
    return table


def _run(
    ranks: Ranks,
    module: str,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> None:
    wait_until_quiet(LONGEST_WAIT_S)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    ranks.run(["-m", module, *arguments], environment, time_limit_s)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bucket_sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, required=True, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--link", choices=LINKS, required=True, metavar="LINK", help=", ".join(LINKS))
    parser.add_argument(
        "--caps", type=float, nargs="*", default=CAPS_MB, metavar="MB", help="instead of the usual ones"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"in which each has {STEPS} steps (default: {ROUNDS})"
    )
    parser.add_argument(
        "--calibrate-mb", type=int, default=64, metavar="MB", help="largest all-reduce of the calibration (default: 64)"
    )
    parser.add_argument(
        "--seconds", type=float, default=240, help="for the sweep, if the machine is not quiet (default: 240)"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that links are taken down
    args.folder.mkdir(parents=True, exist_ok=True)
    traces = args.folder / "traces"
    with ranks_over(LINKS[args.link], WORLD_SIZE) as ranks:
        record(ranks, args.model, traces / "plain", probe_buckets=False)
        record(ranks, args.model, traces / "probe", probe_buckets=True)
        calibrate(ranks, args.folder / "calibration.json", args.calibrate_mb)
        sizes = [Setting(), *(Setting(bucket_cap_mb=cap) for cap in args.caps)]
        settings = [*sizes, *settings_of_best_plan(args.folder)]
        measured = sweep(args.model, args.link, ranks, settings, args.rounds, args.seconds)
        measured.write(args.folder / "sweep.json")
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)
    console.print(table_of(measured))
    link_check = measured.link_check
    console.print(f"{link_check.bytes_per_s / 1e6:.1f} MB/s each way, round trip {link_check.rtt_us:.0f} µs")


if __name__ == "__main__":
    main()
