"""The readiness board: what hooks store outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.live_files import (
    READY,
    GradientReadyFile,
    find_models_with_ready_file,
    read_is_ready,
    read_ready_times_ns,
)

S = 1_000_000_000

DIE_AFTER_STORING = """
import os, signal, sys
from pathlib import Path
from overlapscope.trace.live_files import GradientReadyFile
board = GradientReadyFile(Path(sys.argv[1]), model=0, parameters=3)
board.ready_ns[1] = 123456789012345
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_time_outlives_the_process_that_stored_it(tmp_path):
    died = subprocess.run(
        [sys.executable, "-c", DIE_AFTER_STORING, tmp_path], cwd=Path(__file__).parents[2], timeout=60
    )
    assert died.returncode == -signal.SIGKILL
    assert list(read_ready_times_ns(tmp_path, 0, [])) == [0, 123456789012345, 0]


def test_models_have_boards_of_their_own(tmp_path):
    GradientReadyFile(tmp_path, 0, 1).ready_ns[0] = 5 * S
    GradientReadyFile(tmp_path, 1, 2).ready_ns[0] = 7 * S
    assert list(read_ready_times_ns(tmp_path, 0, [])) == [5 * S]
    assert list(read_ready_times_ns(tmp_path, 1, [])) == [7 * S, 0]


def test_a_board_that_is_missing_or_cut_short_tells_what_it_can(tmp_path):
    assert list(read_ready_times_ns(tmp_path, 0, [])) == []
    GradientReadyFile(tmp_path, 0, 2).ready_ns[0] = 5 * S
    os.truncate(tmp_path / "gradients_0.bin", 13)
    assert list(read_ready_times_ns(tmp_path, 0, [])) == [5 * S]


def test_a_board_that_is_there_is_not_overwritten(tmp_path):
    GradientReadyFile(tmp_path, 0, 1)
    with pytest.raises(OverlapScopeError, match=r"gradients_0\.bin: can't be created"):
        GradientReadyFile(tmp_path, 0, 1)


def test_it_tells_what_has_come_with_a_time_or_without(tmp_path):
    GradientReadyFile(tmp_path, 0, 3).ready_ns[0] = 123456789
    GradientReadyFile(tmp_path, 12, 2).ready_ns[1] = READY
    assert find_models_with_ready_file(tmp_path) == [0, 12]
    assert read_is_ready(tmp_path, 0, []) == (True, False, False)
    assert read_is_ready(tmp_path, 12, []) == (False, True)
    assert list(read_ready_times_ns(tmp_path, 12, [])) == [0, 0], "no time is known"
    assert read_is_ready(tmp_path, 3, []) == ()


def test_a_number_that_no_hook_stores_is_damage(tmp_path):
    """One damaged byte makes neither "has come" of "has not", nor the reverse."""
    GradientReadyFile(tmp_path, 0, 2).ready_ns[0] = READY
    path = tmp_path / "gradients_0.bin"
    content = path.read_bytes()
    for place in range(16):
        for change in (1, 0x40, 0xFF):
            damaged = bytearray(content)
            damaged[place] ^= change
            path.write_bytes(damaged)
            problems = []
            has_come = read_is_ready(tmp_path, 0, problems)
            assert has_come == ()
            assert [problem.severity for problem in problems] == ["error"]
