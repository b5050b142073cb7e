"""Files that a running rank rewrites: what is stored outlives its process, and damage is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.live_files import (
    FINAL_PASS,
    MAX_PASSES,
    READY,
    FingerprintFile,
    GradientReadyFile,
    find_models_with_ready_file,
    fingerprints_file,
    pack_liveness,
    read_alive_file,
    read_final_pass,
    read_fingerprint_passes,
    read_is_ready,
    read_ready_times_ns,
)

S = 1_000_000_000

DIE_AFTER_STORING = """
import os, signal, sys
from pathlib import Path
from overlapscope.trace.live_files import GradientReadyFile
file = GradientReadyFile(Path(sys.argv[1]), model=0, parameters=3)
file.ready_ns[1] = 123456789012345
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_time_outlives_the_process_that_stored_it(tmp_path):
    died = subprocess.run(
        [sys.executable, "-c", DIE_AFTER_STORING, tmp_path], cwd=Path(__file__).parents[2], timeout=60
    )
    assert died.returncode == -signal.SIGKILL
    assert list(read_ready_times_ns(tmp_path, 0, [])) == [0, 123456789012345, 0]


def test_each_model_has_a_file(tmp_path):
    GradientReadyFile(tmp_path, 0, 1).ready_ns[0] = 5 * S
    GradientReadyFile(tmp_path, 1, 2).ready_ns[0] = 7 * S
    assert list(read_ready_times_ns(tmp_path, 0, [])) == [5 * S]
    assert list(read_ready_times_ns(tmp_path, 1, [])) == [7 * S, 0]


def test_a_file_that_is_missing_or_truncated_tells_what_it_can(tmp_path):
    assert list(read_ready_times_ns(tmp_path, 0, [])) == []
    GradientReadyFile(tmp_path, 0, 2).ready_ns[0] = 5 * S
    os.truncate(tmp_path / "gradients_0.bin", 13)
    assert list(read_ready_times_ns(tmp_path, 0, [])) == [5 * S]


def test_an_existing_file_is_not_overwritten(tmp_path):
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
    for offset in range(16):
        for change in (1, 0x40, 0xFF):
            damaged = bytearray(content)
            damaged[offset] ^= change
            path.write_bytes(damaged)
            problems = []
            has_come = read_is_ready(tmp_path, 0, problems)
            assert has_come == ()
            assert [problem.severity for problem in problems] == ["error"]


TENSORS = 3


def add(file: FingerprintFile, first: int, period: int = 1) -> None:
    steps = np.full(TENSORS, first, dtype="<u4").tobytes()
    file.add(period, first, steps, np.arange(first, first + TENSORS, dtype="<i8").tobytes())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = FingerprintFile(tmp_path, 0, TENSORS)
    for first in range(0, 40, 4):
        add(file, first, period=4)
    found = read_fingerprint_passes(tmp_path, 0, TENSORS)
    assert found["first"].tolist() == list(range(0, 40, 4))
    assert set(found["period"]) == {4}
    assert found["values"][3].tolist() == [12, 13, 14]
    assert found["steps"][3].tolist() == [12, 12, 12]
    assert (file.passes == found).all()


def test_what_is_there_at_the_end_is_read_apart(tmp_path: Path) -> None:
    file = FingerprintFile(tmp_path, 0, TENSORS)
    for first in range(MAX_PASSES):
        add(file, first)
    assert not len(read_final_pass(tmp_path, 0, TENSORS))
    add(file, MAX_PASSES, FINAL_PASS)
    (last,) = read_final_pass(tmp_path, 0, TENSORS)
    assert last["first"] == MAX_PASSES
    assert FINAL_PASS not in read_fingerprint_passes(tmp_path, 0, TENSORS)["period"]
    assert FINAL_PASS not in file.passes["period"]


def test_a_long_job_is_dense_at_its_end_and_reaches_back_to_its_beginning(tmp_path: Path) -> None:
    file, job = FingerprintFile(tmp_path, 0, TENSORS), 20_000
    for first in range(job):
        add(file, first)
    found = read_fingerprint_passes(tmp_path, 0, TENSORS)["first"].astype(int)
    assert len(found) == MAX_PASSES
    assert found[0] == 0
    assert found[-100:].tolist() == list(range(job - 100, job))
    ago = job - found
    assert (np.diff(found) <= 1 + ago[:-1] / 16).all()


def test_what_is_pinned_stays(tmp_path: Path) -> None:
    file = FingerprintFile(tmp_path, 0, TENSORS)
    for first in range(1000):
        add(file, first)
    file.pin()
    for first in range(1000, 10_000):
        add(file, first)
    found = set(read_fingerprint_passes(tmp_path, 0, TENSORS)["first"].tolist())
    assert set(range(900, 1000)) <= found
    assert set(range(9_900, 10_000)) <= found


def test_a_pass_that_is_not_complete_is_left_out(tmp_path: Path) -> None:
    file = FingerprintFile(tmp_path, 0, TENSORS)
    for first in range(10):
        add(file, first)
    path = tmp_path / fingerprints_file(0)
    whole = path.read_bytes()
    size = len(whole) // MAX_PASSES
    for byte in range(3 * size, 4 * size):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 16]) + whole[byte + 1 :])
        assert read_fingerprint_passes(tmp_path, 0, TENSORS)["first"].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    path.write_bytes(whole[: 5 * size + 7])
    assert len(read_fingerprint_passes(tmp_path, 0, TENSORS)) == 5
    assert len(read_fingerprint_passes(tmp_path, 1, TENSORS)) == 0


def test_what_was_written_is_read_and_zeros_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "alive.bin").write_bytes(pack_liveness(5, 0, 7))
    problems: list[Problem] = []
    assert read_alive_file(tmp_path / "alive.bin", problems) == (5, None, 7)
    assert read_alive_file(tmp_path / "missing", problems) == (None, None, None)
    assert problems == []


def test_a_damaged_liveness_file_is_unknown_and_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "alive.bin"
    for offset in range(32):
        content = bytearray(pack_liveness(5, 6, 7))
        content[offset] ^= 0x10
        path.write_bytes(content)
        problems: list[Problem] = []
        assert read_alive_file(path, problems) == (None, None, None)
        assert [str(problem).partition(";")[0] for problem in problems] == [f"{path}: damaged"]
