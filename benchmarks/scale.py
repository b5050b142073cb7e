"""How long large recordings take, and how much memory: read, divided, put together; with processes and with Dask.

    python -m benchmarks.scale                          # 16, 64, 256 and 1,024 ranks of 1,000 steps with 50 buckets
    python -m benchmarks.scale --ranks 10000 --steps 100 --buckets 10
    python -m benchmarks.scale --ranks 256 --dask

Recordings are made up by `overlapscope lab synth`: hosts of eight ranks with clocks of their own. Each is summarized
twice, first from its logs and then from the tables that this has left, its stragglers are looked for, and a few steps
of some ranks are exported for Perfetto. Memory is that of the command and all its processes together, sampled.

--dask   also on a local cluster of two workers, one of which is killed while it reads and one while it divides: it is
         said whether the results are the same
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.breakdown.text import describe_summary
from overlapscope.chunked_analysis import analyze_recording
from overlapscope.lab.synth import estimate_bytes, write_recording
from overlapscope.trace.schema import TABLES_FOLDER
from overlapscope.workers import dask

PROGRAM = str(Path(sys.executable).with_name("overlapscope"))
_SAMPLED_EVERY_S = 0.1
_EXPORTED = ("--steps", "0:20", "--ranks", "0-7")
_KILLED_AFTER = 2
"""Parts or ranges that are done."""


def memory_of(process: psutil.Process) -> int:
    """Return the bytes that a process and all below it have in memory."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.Error:
            continue
    return total


def timed(*arguments: str | Path) -> tuple[float, float, str]:
    """Run a command of ours: seconds, gigabytes at most, and the last line that it printed."""
    begin, most = time.monotonic(), 0
    command = [PROGRAM, *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            try:
                most = max(most, memory_of(psutil.Process(process.pid)))
            except psutil.Error:
                break
            time.sleep(_SAMPLED_EVERY_S)
        if process.wait():
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        seconds = time.monotonic() - begin
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    return seconds, most / 1e9, lines[-1]


def row(folder: Path, ranks: int, steps: int, buckets: int) -> None:
    """Make a recording up and print what it takes."""
    begin = time.monotonic()
    write_recording(folder, ranks, steps, buckets)
    written_s = time.monotonic() - begin
    millions = ranks * steps * buckets / 1e6
    said = ""
    cells = [f"{ranks:,}", f"{millions:.2f}", f"{estimate_bytes(ranks, steps, buckets) / 1e9:.1f}", f"{written_s:.0f}"]
    for command in ("summary", "summary", "stragglers"):
        seconds, gigabytes, last = timed(command, folder)
        cells += [f"{seconds:.1f}", f"{seconds / millions:.2f}", f"{gigabytes:.1f}"]
        said = last if command == "summary" else said
    size = sum(file.stat().st_size for file in (folder / TABLES_FOLDER).rglob("*.parquet"))
    print(f"| {' | '.join(cells)} | {size / 1e9:.1f} | {bytes_per_slice(folder):.0f} |  <!-- {said} -->", flush=True)


def bytes_per_slice(folder: Path) -> float:
    """Export a part of a recording for Perfetto, and return the size of the file per slice."""
    exported = folder / "part.pftrace"
    command = [PROGRAM, "export", str(folder), "-o", str(exported), *_EXPORTED]
    told = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    slices = re.search(r"([0-9,]+) slices?", told)  # FILE: 12,345 slices of 8 ranks
    assert slices is not None, told
    return exported.stat().st_size / int(slices[1].replace(",", ""))


def on_dask(folder: Path) -> None:
    """Run the same on a cluster whose workers die, beside what one process comes to."""
    from distributed import LocalCluster

    from overlapscope.workers import SerialWorkers

    whole = analyze_recording(folder, SerialWorkers(), None, lambda _phase: None)
    _ = whole.summary, whole.cycles
    shutil.rmtree(folder / TABLES_FOLDER)
    begin, killed = time.monotonic(), 0
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1") as cluster:

        def kill_one() -> None:
            nonlocal killed
            worker = next(iter(cluster.workers.values()))
            psutil.Process(worker.pid).kill()
            killed += 1

        def killing() -> Callable[[int, int], None]:
            done = 0

            def progress(_done: int, _of: int) -> None:
                nonlocal done
                done += 1
                if done == _KILLED_AFTER:
                    threading.Thread(target=kill_one).start()

            return progress

        phases = iter([killing(), killing()])
        current = next(phases)

        def begin_phase(_phase: str) -> None:
            nonlocal current
            current = next(phases, current)

        with dask(cluster.scheduler_address) as workers:
            found = analyze_recording(folder, workers, lambda done, of: current(done, of), begin_phase)
            same = found.summary.figures.equals(whole.summary.figures)
            same &= describe_summary(found.summary) == describe_summary(whole.summary)
            if found.cycles is not None and whole.cycles is not None:
                same &= bool((found.cycles.local_ns == whole.cycles.local_ns).all())
                same &= bool((found.cycles.arrival_ns == whole.cycles.arrival_ns).all())
    seconds = time.monotonic() - begin
    print(f"Dask, 2 workers, {killed} killed on the way: {seconds:.1f} s, {'the same' if same else 'NOT THE SAME'}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--buckets", type=int, default=50)
    parser.add_argument("--dask", action="store_true", help="also on a local Dask cluster")
    args = parser.parse_args()
    per = "s | us per all-reduce | GB of memory"
    print(f"| ranks | million all-reduces | GB of logs | written, s | from logs, {per} | from tables, {per} ", end="")
    print(f"| stragglers, {per} | GB of tables | bytes per slice in Perfetto |\n|{'---|' * 15}")
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as temporary:
            row(Path(temporary), ranks, args.steps, args.buckets)
            if args.dask:
                on_dask(Path(temporary))


if __name__ == "__main__":
    main()
