"""Both kinds of logs on a disk that fills up, while they are written and read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.collective_log import CollectiveLogHeader, CollectiveLogWriter, Signature
from overlapscope.trace.collective_log_reader import CollectiveLogFile
from overlapscope.trace.event_log import EventLogWriter, read_latest_records, read_log
from overlapscope.trace.ring_log import RingLog
from overlapscope.trace.schema import HEADER_BYTES
from tests.trace.logs import PHASE_BEGIN

LOSS = Signature(op="all_reduce", reduce_op="sum", dtype="float32", elements=1)


@dataclass(frozen=True)
class Kind:
    make: Callable[[Path, int], RingLog]
    """With a limit in bytes."""
    store: Callable[[RingLog, int], object]
    latest: Callable[[Path, int], list[int]]
    """The numbers of the latest so many, read from the file."""


def store_record(log: RingLog, number: int) -> None:
    assert isinstance(log, EventLogWriter)
    log.append(PHASE_BEGIN, number, number, number)


def store_entry(log: RingLog, number: int) -> None:
    assert isinstance(log, CollectiveLogWriter)
    log.announce(1, LOSS, now_ns=number, step=number)


def latest_entries(path: Path, count: int) -> list[int]:
    file = CollectiveLogFile(path)
    assert [problem for problem in file.problems if problem.severity == "error"] == []
    return list(file.read(file.latest - count + 1, file.latest)["number"])


KINDS = {
    "events": Kind(
        EventLogWriter, store_record, lambda path, count: list(read_latest_records(path, count)["sequence"])
    ),
    "group": Kind(
        lambda path, limit: CollectiveLogWriter(path, CollectiveLogHeader(name="0", ranks=(0, 1), rank=0), limit),
        store_entry,
        latest_entries,
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def limit_disk(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    fallocate = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        if offset + length > room_bytes:
            raise OSError(28, "No space left on device")
        fallocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)


def test_a_disk_that_fills_up_makes_a_smaller_ring_whose_latest_are_readable_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    path = tmp_path / "log"
    room_bytes = HEADER_BYTES + kind.make(tmp_path / "other", 2**22).chunk_slots * 64 * 3 // 2
    limit_disk(monkeypatch, room_bytes)
    log = kind.make(path, 2**23)
    for number in range(1, log.chunk_slots * 5 // 2):
        kind.store(log, number)
        if number % 1000 == 0:
            assert kind.latest(path, 100) == list(range(number - 99, number + 1))
            assert path.stat().st_blocks * 512 <= room_bytes
    assert log.is_disk_full
    assert log.capacity == log.chunk_slots
    latest = kind.latest(path, 100)
    log.close()
    assert kind.latest(path, 100) == latest == list(range(log.latest - 99, log.latest + 1))
    assert path.stat().st_size == HEADER_BYTES + log.capacity * log.slot_bytes


def test_a_disk_that_is_full_from_the_start_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    limit_disk(monkeypatch, HEADER_BYTES)
    with pytest.raises(OverlapScopeError, match="no space left on the disk"):
        kind.make(tmp_path / "log", 2**20)
    assert not (tmp_path / "log").exists()


def test_a_log_is_never_overwritten(tmp_path: Path, kind: Kind) -> None:
    log = kind.make(tmp_path / "log", 2**20)
    kind.store(log, 1)
    with pytest.raises(OverlapScopeError, match="already holds a recording"):
        kind.make(tmp_path / "log", 2**20)
    assert kind.latest(tmp_path / "log", 10) == [1]


def test_after_the_end_nothing_is_stored_and_nothing_raised(tmp_path: Path, kind: Kind) -> None:
    log = kind.make(tmp_path / "log", 2**20)
    for number in (1, 2, 3):
        kind.store(log, number)
    log.close()
    size = log.path.stat().st_size
    kind.store(log, 4)
    log.close()
    assert log.closed
    assert log.path.stat().st_size == size == HEADER_BYTES + 3 * log.slot_bytes


def test_a_header_says_at_once_how_small_the_ring_has_become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_disk(monkeypatch, HEADER_BYTES + EventLogWriter.chunk_slots * 64)
    log = EventLogWriter(tmp_path / "log")
    for number in range(1, log.chunk_slots + 2):
        store_record(log, number)
    header, _, _ = read_log(log.path)
    assert (header.capacity_records, header.pinned_records) == (log.chunk_slots, log.chunk_slots // 8)


IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
WRITE = """
import json, sys
from pathlib import Path
from overlapscope.trace.event_log import read_log
from overlapscope.trace.event_log import EventLogWriter
from tests.trace.logs import append_numbered

log = EventLogWriter(Path(sys.argv[1]) / "events.log")
append_numbered(log, 90_000)
log.preserve()
full = log.is_disk_full
log.close()
header, records, problems = read_log(log.path)
print(json.dumps({
    "full": full,
    "kept": records["sequence"].tolist(),
    "capacity": header.capacity_records,
    "problems": [p.severity for p in problems],
}))
"""


def can_mount(folder: Path) -> bool:
    command = [*IN_NAMESPACE, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_training_goes_on_and_the_latest_steps_are_kept(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("user namespaces that may mount a tmpfs are not available here")
    script = f'mount -t tmpfs -o size=3m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}"'
    ran = subprocess.run(
        [*IN_NAMESPACE, "sh", "-c", script, WRITE], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["full"]
    assert result["problems"] == ["note"]
    assert 0 < result["capacity"] * 64 < 3 * 1024**2
    pinned = result["capacity"] // 8
    ring = result["capacity"] - pinned
    assert result["kept"] == [*range(1, pinned + 1), *range(90_001 - ring, 90_001)]
