"""Fingerprints in a file of a fixed size: what is kept of a long job, and what is left of a damaged one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from overlapscope.trace.live_files import (
    FINAL_PASS,
    MAX_PASSES,
    FingerprintFile,
    fingerprints_file,
    read_final_pass,
    read_fingerprint_passes,
)

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


def test_a_sweep_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
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
