"""The step time of every bucket size, really measured, for one model over one link: what predictions are held against.

    python -m benchmarks.bucket_sweep FOLDER --model gpt --link 1gbit [--cap-lists 1,8,16 2,2,40]

Two ranks train over gloo with torch's own DDP, one thread each. Settings that lead to the same buckets are measured
once. A step is timed from the end of the one before to its own end, each the end on the rank that is last. A setting
has the median of its steps, and as its noise the difference between the medians of its odd and its even blocks. Blocks
during which the machine was busy with something else are measured again. FOLDER then holds

sweep.json        all of that, with every single time, the buckets, and what the link and the machine were like
calibration.json  all-reduces of 1 KiB to 64 MiB, alone and two at a time
traces/plain      a recording of 30 steps with our DDP and its default buckets
traces/cap-...    short recordings with other bucket sizes
traces/probe      with --probe-buckets: a recording of 30 steps that tries several plans
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.all_reduce_times import read_samples
from benchmarks.quiet_machine import QUIET_CORES, wait_until_quiet
from benchmarks.shaped_link import LINKS, LinkCheck, Ranks, check, ranks_over
from benchmarks.swept_training import MODELS, Block, Partition, Setting, Task
from overlapscope.trace.environment import DETAIL_VARIABLE, TRACE_VARIABLE

WORLD_SIZE: Final = 2
CAPS_MB: Final = (0.1, 0.5, 1, 2, 3.5, 5, 7, 10, 15, 25, 50, 100)
ROUNDS, STEPS = 6, 4
RECORDED_STEPS: Final = 30
CAPS_OF_RECORDINGS_MB: Final = (0.1, 1, 5, 25, 1000)
RECORDED_STEPS_PER_CAP: Final = 8
PROBE_VARIABLE: Final = "OVERLAPSCOPE_PROBE_BUCKETS"
TIME_LIMIT_S: Final = 900
LONGEST_WAIT_S: Final = 15
"""For a quiet machine, before ranks are started."""
MB: Final = 1024**2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way to fill the buckets."""

    settings: tuple[Setting, ...]
    """All that lead to it."""
    buckets: Partition
    bucket_bytes: tuple[int, ...]
    step_ns: NDArray[np.int64]
    """(blocks, steps): every step's time."""
    cores_of_others: tuple[float, ...]
    """In each block, how many cores were busy with what is not the training."""

    @property
    def label(self) -> str:
        """Its settings, the caps among them as a range."""
        caps = [setting.bucket_cap_mb for setting in self.settings if setting.bucket_cap_mb is not None]
        others = [setting.label for setting in self.settings if setting.bucket_cap_mb is None]
        span = [f"{caps[0]:g}" if len(caps) == 1 else f"{caps[0]:g} to {caps[-1]:g}"] if caps else []
        return "; ".join(others + span)

    @property
    def quiet_step_ns(self) -> NDArray[np.int64]:
        """(blocks, steps) of the blocks that count: the quiet ones; if none was, the quietest."""
        cores = np.array(self.cores_of_others)
        return self.step_ns[cores <= max(QUIET_CORES, cores.min())]

    @property
    def median_ms(self) -> float:
        """The step time."""
        return float(np.median(self.quiet_step_ns)) / 1e6

    @property
    def noise(self) -> float:
        """Difference between the medians of odd and of even blocks, as a share of the median. NaN if there is one."""
        step_ns = self.quiet_step_ns
        if len(step_ns) < 2:
            return math.nan
        return float(abs(np.median(step_ns[::2]) - np.median(step_ns[1::2])) / np.median(step_ns))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All ways to fill the buckets of one model, over one link."""

    model: str
    link: str
    parameters: tuple[tuple[str, int], ...]
    """Name and bytes, by number."""
    link_check: LinkCheck
    measured: tuple[Measured, ...]

    def write(self, path: Path) -> None:
        """To a JSON file, with medians and noise for readers that are not ``read_sweep``."""
        content = {
            "format": "overlapscope bucket sweep",
            "version": 1,
            "world_size": WORLD_SIZE,
            "backend": "gloo",
            "torch": torch.__version__,
            **asdict(self),
            "measured": [
                {
                    "label": each.label,
                    "median_ms": each.median_ms,
                    "noise": each.noise,
                    "settings": [asdict(setting) for setting in each.settings],
                    "bucket_bytes": each.bucket_bytes,
                    "buckets": each.buckets,
                    "step_ns": each.step_ns.tolist(),
                    "cores_of_others": each.cores_of_others,
                }
                for each in self.measured
            ],
        }
        path.write_text(json.dumps(content, indent=1))


def read_sweep(path: Path) -> Sweep:
    """What ``Sweep.write`` has written."""
    content = json.loads(path.read_text())
    measured = [
        Measured(
            settings=tuple(_read_setting(setting) for setting in each["settings"]),
            buckets=each["buckets"],
            bucket_bytes=tuple(each["bucket_bytes"]),
            step_ns=np.array(each["step_ns"]),
            cores_of_others=tuple(each["cores_of_others"]),
        )
        for each in content["measured"]
    ]
    return Sweep(
        model=content["model"],
        link=content["link"],
        parameters=tuple((name, size) for name, size in content["parameters"]),
        link_check=LinkCheck(**content["link_check"]),
        measured=tuple(measured),
    )


def _read_setting(content: dict[str, Any]) -> Setting:
    caps = content["bucket_cap_mb_list"]
    return Setting(bucket_cap_mb=content["bucket_cap_mb"], bucket_cap_mb_list=None if caps is None else tuple(caps))


def sweep(model: str, link: str, ranks: Ranks, settings: Sequence[Setting], time_limit_s: float) -> Sweep:
    """Measure all settings. On a quiet machine it takes 2 minutes for ten of them and steps of half a second."""
    task = Task(
        model=model,
        settings=tuple(settings),
        rounds=ROUNDS,
        steps=STEPS,
        carriers=ranks.carriers,
        time_limit_s=time_limit_s,
    )
    link_check = check(ranks)
    with tempfile.TemporaryDirectory() as folder:
        task.write(Path(folder, "task.json"))
        _run(ranks, "swept_training", folder, time_limit_s=time_limit_s + TIME_LIMIT_S)
        seen = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    parameters = tuple((name, each.nbytes) for name, each in MODELS[model]().module.named_parameters())
    by_partition: dict[str, list[Setting]] = {}
    for setting, partition in zip(task.settings, seen[0]["partitions"], strict=True):
        by_partition.setdefault(json.dumps(partition), []).append(setting)
    blocks_of_ranks = [[Block(*block) for block in rank["blocks"]] for rank in seen]
    measured = [
        _measured(number, tuple(same), json.loads(partition), parameters, blocks_of_ranks)
        for number, (partition, same) in enumerate(by_partition.items())
    ]
    return Sweep(model=model, link=link, parameters=parameters, link_check=link_check, measured=tuple(measured))


def _measured(
    number: int,
    settings: tuple[Setting, ...],
    buckets: Partition,
    parameters: Sequence[tuple[str, int]],
    blocks_of_ranks: Sequence[Sequence[Block]],
) -> Measured:
    """What all ranks say of one partition."""
    own_blocks = [[block for block in blocks if block.number == number] for blocks in blocks_of_ranks]
    ends_ns = np.max([[block.ends_ns for block in blocks] for blocks in own_blocks], axis=0)
    return Measured(
        settings=settings,
        buckets=buckets,
        bucket_bytes=tuple(sum(parameters[index][1] for index in bucket) for bucket in buckets),
        step_ns=np.diff(ends_ns),
        cores_of_others=tuple(block.cores_of_others for block in own_blocks[0]),
    )


def calibrate(ranks: Ranks, path: Path) -> None:
    """Time all-reduces of many sizes over the link, in about 20 s at 1 Gbit/s, and write them to a JSON file."""
    with tempfile.TemporaryDirectory() as folder:
        _run(ranks, "all_reduce_times", folder)
        samples = read_samples(Path(folder), WORLD_SIZE)
    content = {"format": "overlapscope all-reduce samples", "version": 1, "world_size": WORLD_SIZE, "backend": "gloo"}
    path.write_text(json.dumps(content | {"samples": samples}))


def record(
    ranks: Ranks, model: str, steps: int, trace: Path, cap_mb: float | None = None, *, probe_buckets: bool = False
) -> None:
    """Record some steps with our DDP, with the times at which every gradient was ready."""
    variables = {TRACE_VARIABLE: str(trace.absolute()), DETAIL_VARIABLE: "parameters"}
    if probe_buckets:
        variables[PROBE_VARIABLE] = "1"
    caps = [] if cap_mb is None else [str(cap_mb)]
    with tempfile.TemporaryDirectory() as folder:
        _run(ranks, "recorded_training", f"{folder}/rendezvous", model, str(steps), *caps, variables=variables)


def table_of(sweep: Sweep) -> Table:
    """A row for each way to fill the buckets, in the order of their number."""
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
    ranks.run([sys.executable, "-m", f"benchmarks.{module}", *arguments], environment, time_limit_s)


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
    parser.add_argument("--cap-lists", nargs="*", default=[], metavar="MB,MB,...", help="as bucket_cap_mb_list")
    parser.add_argument(
        "--seconds", type=float, default=240, help="for the sweep, if the machine is not quiet (default: 240)"
    )
    parser.add_argument("--probe-buckets", action="store_true", help="record with several bucket plans as well")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that links are taken down
    settings = [
        Setting(),
        *(Setting(bucket_cap_mb=cap) for cap in args.caps),
        *(Setting(bucket_cap_mb_list=tuple(map(float, caps.split(",")))) for caps in args.cap_lists),
    ]
    args.folder.mkdir(parents=True, exist_ok=True)
    traces = args.folder / "traces"
    with ranks_over(LINKS[args.link], WORLD_SIZE) as ranks:
        record(ranks, args.model, RECORDED_STEPS, traces / "plain")
        if args.probe_buckets:
            record(ranks, args.model, RECORDED_STEPS, traces / "probe", probe_buckets=True)
        calibrate(ranks, args.folder / "calibration.json")
        measured = sweep(args.model, args.link, ranks, settings, args.seconds)
        measured.write(args.folder / "sweep.json")
        for cap_mb in CAPS_OF_RECORDINGS_MB:
            record(ranks, args.model, RECORDED_STEPS_PER_CAP, traces / f"cap-{cap_mb:g}", cap_mb)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)
    console.print(table_of(measured))
    link_check = measured.link_check
    console.print(f"{link_check.bytes_per_s / 1e6:.1f} MB/s each way, round trip {link_check.rtt_us:.0f} µs")


if __name__ == "__main__":
    main()
