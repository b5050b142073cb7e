"""A writer that is killed loses at most the record it was writing.

The writer counts, in memory shared with the test, each record before it appends it and again after. SIGKILL leaves
both counts, which no Python buffer can falsify.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlapscope.trace.event_log import read_log
from tests.trace.logs import bytes_for

KILLS = 8
WRITE_UNTIL_KILLED = """
import mmap, struct, sys
from pathlib import Path
from overlapscope.trace.event_log import EventLogWriter
from tests.trace.logs import PHASE_BEGIN

log_path, counts_path, limit_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with open(counts_path, "r+b") as file:
    counts = mmap.mmap(file.fileno(), 16)
log = EventLogWriter(log_path, limit_bytes)
number = 0
while True:
    number += 1
    counts[0:8] = number.to_bytes(8, "little")
    log.append(PHASE_BEGIN, number & 0xFFFFFFFF, number, number + 5)
    counts[8:16] = number.to_bytes(8, "little")
"""


def kill_while_writing(folder: Path, limit_bytes: int, delay_s: float) -> tuple[int, int]:
    """Kill a writer a while after its first record; returns how many records it had begun and stored."""
    counts_path = folder / "counts"
    counts_path.write_bytes(bytes(16))
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, folder / "log", counts_path, str(limit_bytes)]
    with counts_path.open("r+b") as file, mmap.mmap(file.fileno(), 16) as counts:
        child = subprocess.Popen(command, cwd=Path(__file__).parents[2])
        try:
            while not any(counts[8:16]):
                assert child.poll() is None, "the writer died by itself"
                time.sleep(0.001)
            time.sleep(delay_s)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
        return int.from_bytes(counts[:8], "little"), int.from_bytes(counts[8:], "little")


@pytest.mark.parametrize("attempt", range(KILLS))
def test_a_killed_writer_leaves_whole_consecutive_records_up_to_its_last(tmp_path: Path, attempt: int) -> None:
    chance = random.Random(attempt)
    # A small ring has wrapped many times by then, a large one is still being filled.
    capacity = chance.choice([80, 5000, 4_000_000])
    begun, stored = kill_while_writing(tmp_path, bytes_for(capacity), delay_s=chance.uniform(0, 0.05))
    assert stored <= begun <= stored + 1

    header, records, problems = read_log(tmp_path / "log")
    numbers = records["sequence"].tolist()
    assert not header.closed
    assert not [problem for problem in problems if problem.severity == "error"]
    assert records["start_ns"].tolist() == numbers
    assert (records["end_ns"] - 5).tolist() == numbers
    assert numbers[-1] in (stored, begun)
    if stored <= capacity:
        assert numbers == list(range(1, numbers[-1] + 1))
    else:
        pinned = capacity // 8
        assert numbers[:pinned] == list(range(1, pinned + 1))
        latest = numbers[pinned:]
        assert latest == list(range(latest[0], latest[-1] + 1))
        # The slot that was being overwritten at death holds neither record.
        assert capacity - pinned - 1 <= len(latest) <= capacity - pinned
