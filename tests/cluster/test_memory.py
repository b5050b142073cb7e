"""A recording keeps nothing of a step in memory, in C and in Python, of our DDP and of torch's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from instrumented_ddp.native import IS_NATIVE, NATIVE_VARIABLE
from tests.cluster import recorded_memory

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
LEAST_BYTES_KEPT = 32
"""The smallest piece of memory that malloc gives away. What has been freed may wait
for its next use, so that memory in use goes up and down by some ten thousand bytes also without a recording."""


@pytest.mark.parametrize("wrapper", ["ours", "stock"])
@pytest.mark.parametrize(
    "native",
    [
        pytest.param("1", marks=pytest.mark.skipif(not IS_NATIVE, reason="no code in C")),
        "0",
    ],
)
def test_steps_leave_nothing_in_memory(wrapper: str, native: str, tmp_path: Path) -> None:
    variables = {NATIVE_VARIABLE: native, "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", recorded_memory.__name__, wrapper, str(tmp_path)],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    measured = json.loads(ended.stdout.splitlines()[-1])
    assert measured["is_native"] == (native == "1")
    # What is kept for a while, of so many steps at most, is there after the first thousand.
    first, *_, last = more = measured["bytes_more"]
    assert last - first < LEAST_BYTES_KEPT / 2 * recorded_memory.STEPS * (len(more) - 1)
