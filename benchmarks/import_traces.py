"""How quickly traces of torch.profiler are imported, and with how much memory, beside HolisticTraceAnalysis.

    python -m benchmarks.import_traces [--mb 50 200] [--ranks 1 4] [--hta VENV/bin/python]

Traces are made of one that a ResNet-50 has left on two A100s: its steps again and again, one after the other, until a
file is so large. ``import`` is ``overlapscope import``, from the start of its process to its end. With ``--hta``, a
Python that has HolisticTraceAnalysis, the same files are read by it, and its overlap of communication and compute
computed, in turns with ours. MB are of JSON, 10^6 bytes; CPU time is of all processes that take part; memory the most
that one has.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parents[1] / "tests/interop/data/resnet50_ddp_nccl_rank0of2.json.gz"
HTA: Final = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files=dict(enumerate(sys.argv[1:])))
analysis.get_comm_comp_overlap(visualize=False)
"""
PROGRAM: Final = "from overlapscope.cli.main import entry_point; entry_point()"
MEASURE: Final = """
import json, os, resource, subprocess, sys
ended = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
use = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([ended.returncode, use.ru_utime + use.ru_stime, use.ru_maxrss * 1024, ended.stderr[-500:]], file)
"""
NUMBERS: Final = ("correlation", "External id", "Record function id", "Ev Idx")
"""What is told apart by them."""


def write_trace(path: Path, size_bytes: int, rank: int, ranks: int) -> int:
    """Write a trace of about this size; returns its exact size."""
    content = json.loads(gzip.decompress(SOURCE.read_bytes()))
    events = content.pop("traceEvents")
    content["distributedInfo"] |= {"rank": rank, "world_size": ranks}
    times = [event["ts"] for event in events if event["ph"] == "X" and event["cat"] != "Trace"]
    lasts_us = max(times) - min(times) + 1e6
    with path.open("w") as file:
        file.write(json.dumps(content)[:-1] + ', "traceEvents": [\n')
        copy = 0
        while file.tell() < size_bytes:
            for event in events:
                args = event.get("args", {})
                moved = event | {"ts": round(event["ts"] + copy * lasts_us, 3)}
                numbered = {name: args[name] + 1_000_000 * copy for name in NUMBERS if name in args}
                if str(event.get("name", "")).startswith("ProfilerStep#"):
                    moved["name"] = f"ProfilerStep#{int(event['name'].partition('#')[2]) + 3 * copy}"
                file.write(json.dumps(moved | ({"args": args | numbered} if args else {})) + ",\n")
            copy += 1
        file.seek(file.tell() - 2)
        file.write("\n]}")
        return file.tell()


def measured(command: Sequence[str], folder: Path) -> tuple[float, float, float]:
    """Measure wall seconds, CPU seconds and MB of memory of a command."""
    result = folder / "measured.json"
    started_s = time.monotonic()
    subprocess.run([sys.executable, "-c", MEASURE, str(result), *command], check=True, env={**os.environ})
    wall_s = time.monotonic() - started_s
    code, cpu_s, memory_bytes, said = json.loads(result.read_text())
    if code != 0:
        raise SystemExit(f"{command[0]} has failed:\n{said}")
    return wall_s, cpu_s, memory_bytes / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[50, 200], help="of each rank's file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--hta", metavar="PYTHON", help="a Python that has HolisticTraceAnalysis")
    args = parser.parse_args()
    print(f"{'':>14} {'MB':>6} {'ranks':>5} {'wall':>8} {'CPU':>8} {'MB/CPU-s':>9} {'memory':>9}")
    for mb in args.mb:
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                files = [folder / f"rank{rank}.json" for rank in range(ranks)]
                total_mb = sum(write_trace(file, int(mb * 1e6), rank, ranks) for rank, file in enumerate(files)) / 1e6
                commands = {
                    "import": [sys.executable, "-c", PROGRAM, "import", *map(str, files), "-o", f"{folder}/out"]
                }
                if args.hta:
                    commands["HTA"] = [args.hta, "-c", HTA, *map(str, files)]
                for name, command in commands.items():
                    wall_s, cpu_s, memory_mb = measured(command, folder)
                    rate = f"{total_mb / cpu_s:9.1f}"
                    print(
                        f"{name:>14} {mb:6.0f} {ranks:5} {wall_s:6.1f} s {cpu_s:6.1f} s {rate} {memory_mb:6.0f} MB",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
