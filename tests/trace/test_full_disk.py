"""A disk that really is full: a tmpfs of 3 MB in a mount namespace of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_training_goes_on_and_the_newest_steps_are_kept(tmp_path: Path) -> None:
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
