"""How long `overlapscope diagnose` takes, and how much memory, for many ranks with many collectives each.

The ranks are made up and written to disk as logs, in a temporary folder that is removed at the end: steps of ten
buckets, an entry each, and one rank in the middle that leaves out one step's buckets at two thirds of the way
(no_sync on one rank). Printed are seconds and peak memory of the command in a process of its own, and what it says.

    python benchmarks/diagnose.py --ranks 1024 --collectives 100000

needs 64 bytes of disk for each collective of each rank: 6.6 GB for these.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.trace.collective_log import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    HEADER_BYTES,
    CollectiveLogHeader,
    Entries,
    entry_digest,
    group_file,
    hashed_step,
)
from overlapscope.trace.collective_log_reader import compute_entry_checks
from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.schema import EVENTS_FILE, SIGNATURES_FILE, Kind, Phase, pack_body
from tests.ordered import bucket, make_folder

BUCKETS = 10
STEP_NS = 100_000_000
BEGIN_NS = 1_000_000_000
COMMAND = [sys.executable, "-c", "from overlapscope.cli.main import entry_point; entry_point()", "diagnose", "--json"]


def entries_of_rank(collectives: int, left_out_step: int | None) -> Entries:
    """Return what one rank has launched; it has not come to its end."""
    number = np.arange(1, collectives + 1)
    step = (number - 1) // BUCKETS
    if left_out_step is not None:
        step += step >= left_out_step
    rows = np.zeros(collectives, dtype=ENTRY_DTYPE)
    rows["number"] = number
    rows["signature"] = (number - 1) % BUCKETS + 1
    rows["step"] = rows["batch"] = step
    rows["phase"] = Phase.BACKWARD
    rows["hash"] = running_hash(number, step)
    rows["announced_ns"] = BEGIN_NS + number * (STEP_NS // BUCKETS)
    rows["launched_ns"] = rows["announced_ns"] + 10_000
    rows["completed_ns"] = rows["announced_ns"] + 5_000_000
    rows["check"] = compute_entry_checks(rows)
    return rows


def running_hash(number: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Add up as the writer of collective logs does."""
    signatures = [bucket(one) for one in range(BUCKETS)]
    added = [
        entry_digest(signature.hash, n, hashed_step(signature, s, 0))
        for n, s in zip(number.tolist(), step.tolist(), strict=True)
        for signature in [signatures[(n - 1) % BUCKETS]]
    ]
    return np.cumsum(np.array(added, dtype=np.uint64), dtype=np.uint64)


def write_recording(folder: Path, ranks: int, collectives: int) -> None:
    """Write all ranks, of which one leaves out a step."""
    fault_step = collectives // BUCKETS * 2 // 3
    usual = entries_of_rank(collectives, None).tobytes()
    other = entries_of_rank(collectives, fault_step).tobytes()
    signatures = "".join(bucket(number).to_json(number + 1) + "\n" for number in range(BUCKETS))
    for rank in range(ranks):
        rank_dir = make_folder(folder, rank, ranks, host=f"node{rank // 8}")
        (rank_dir / SIGNATURES_FILE).write_text(signatures)
        header = CollectiveLogHeader(
            name="0", ranks=tuple(range(ranks)), rank=rank, description="default_pg", capacity=collectives
        )
        with (rank_dir / group_file(0)).open("wb") as file:
            file.write(header.pack())
            file.write(other if rank == ranks // 2 else usual)
        events = EventLogWriter(rank_dir / EVENTS_FILE, 4096 + 64 * 4096)
        for step in range(collectives // BUCKETS - 100, collectives // BUCKETS):
            begin_ns = BEGIN_NS + step * STEP_NS
            for phase in (Phase.LOOP, Phase.FORWARD, Phase.BACKWARD, Phase.FINALIZE, Phase.OPTIMIZER):
                events.append(pack_body(Kind.PHASE_BEGIN, index=phase), step, begin_ns, begin_ns)
            events.append(pack_body(Kind.STEP), step, begin_ns, begin_ns + STEP_NS)


def main() -> None:
    """Write, diagnose, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where there is room; by default where temporary files go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        free_bytes = shutil.disk_usage(temporary).free
        needed_bytes = args.ranks * (HEADER_BYTES + args.collectives * ENTRY_BYTES + 4096 + 64 * 4096)
        if needed_bytes > 0.9 * free_bytes:
            sys.exit(f"{temporary}: {needed_bytes / 1e9:.1f} GB are needed, {free_bytes / 1e9:.1f} GB are free")
        begin_s = time.monotonic()
        write_recording(Path(temporary), args.ranks, args.collectives)
        print(f"wrote {needed_bytes / 1e9:.1f} GB in {time.monotonic() - begin_s:.1f} s", flush=True)
        for run in ("first", "again"):
            before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            ran = subprocess.run([*COMMAND, temporary], capture_output=True, text=True, check=False)
            seconds, after = time.monotonic() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(
                f"{run}: {seconds:.1f} s (of CPU {cpu_s:.1f} s), peak memory {after.ru_maxrss / 1e6:.2f} GB, "
                f"exit code {ran.returncode}",
                flush=True,
            )
        verdict = json.loads(ran.stdout)["verdict"]
        print(f"{verdict['kind']}, blamed {verdict['blamed']}: {verdict['sentence']}")


if __name__ == "__main__":
    main()
