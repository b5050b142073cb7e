"""What a calibration says, and the file it is kept in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.bucket_model.calibration import (
    AllReduceSample,
    Calibration,
    algbw_gb_per_s,
    busbw_gb_per_s,
    read_calibration,
    write_calibration,
)
from overlapscope.errors import OverlapScopeError

samples = st.builds(
    AllReduceSample,
    bytes=st.integers(1, 2**30),
    times_ns=st.lists(st.integers(1, 2**40), min_size=1, max_size=5).map(tuple),
)


@given(st.lists(samples, min_size=1, max_size=5), st.lists(samples, max_size=3))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, measured: list[AllReduceSample], pairs: list[AllReduceSample]
) -> None:
    file = tmp_path_factory.mktemp("calibration") / "calibration.json"
    calibration = Calibration(
        backend="gloo", device="cpu", hosts=("a", "a", "b"), samples=tuple(measured), pairs=tuple(pairs)
    )
    write_calibration(file, calibration)
    assert read_calibration(file) == calibration
    assert json.loads(file.read_text())["world_size"] == 3


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert algbw_gb_per_s(10**9, 1e9) == 1
    assert busbw_gb_per_s(10**9, 1e9, world_size=2) == 1
    assert busbw_gb_per_s(10**9, 1e9, world_size=4) == 1.5


GOOD = {
    "format": "overlapscope calibration",
    "version": 1,
    "backend": "gloo",
    "device": "cpu",
    "hosts": ["a", "b"],
    "samples": [{"bytes": 1024, "times_ns": [5]}],
}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read (No such file or directory)"),
        ("{", "not a calibration; make one with 'overlapscope calibrate'"),
        ("[]", "not a calibration; make one with 'overlapscope calibrate'"),
        (json.dumps(GOOD | {"version": 2}), "has version 2, but 1 is needed; make it again"),
        (json.dumps(GOOD | {"samples": []}), "is damaged; make it again with 'overlapscope calibrate'"),
        (json.dumps(GOOD | {"hosts": ["a"]}), "is damaged; make it again with 'overlapscope calibrate'"),
        (
            json.dumps(GOOD | {"samples": [{"bytes": 1024, "times_ns": [0]}]}),
            "is damaged; make it again with 'overlapscope calibrate'",
        ),
        (
            json.dumps(GOOD | {"pairs": [{"bytes": 1024, "times_ns": [-1]}]}),
            "is damaged; make it again with 'overlapscope calibrate'",
        ),
        (
            json.dumps(GOOD | {"samples": [{"bytes": 1024, "times_ns": []}]}),
            "is damaged; make it again with 'overlapscope calibrate'",
        ),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "calibration.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OverlapScopeError) as raised:
        read_calibration(file)
    assert str(raised.value) == f"{file}: {said}"


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    calibration = Calibration(backend="gloo", device="cpu", hosts=("a", "b"), samples=())
    with pytest.raises(OverlapScopeError, match=r"nowhere/c.json: can't be written \(No such file"):
        write_calibration(tmp_path / "nowhere" / "c.json", calibration)
