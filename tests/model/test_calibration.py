"""What a calibration says, and the file it is kept in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.model.calibration import (
    AllReduceSample,
    Calibration,
    algbw_gb_per_s,
    busbw_gb_per_s,
    read_calibration,
    write_calibration,
)

samples = st.builds(
    AllReduceSample,
    bytes=st.integers(1, 2**30),
    in_flight=st.just(1),
    times_ns=st.lists(st.integers(1, 2**40), min_size=1, max_size=5).map(tuple),
)


def calibration_of(*measured: tuple[int, int, int]) -> Calibration:
    """Of (bytes, in flight, time)."""
    return Calibration(
        backend="gloo",
        device="cpu",
        hosts=("a", "b"),
        samples=tuple(AllReduceSample(bytes=b, in_flight=f, times_ns=(t,)) for b, f, t in measured),
    )


@given(st.lists(samples, min_size=1, max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, measured: list[AllReduceSample]) -> None:
    file = tmp_path_factory.mktemp("calibration") / "calibration.json"
    calibration = Calibration(backend="nccl", device="H200", hosts=("a", "a", "b"), samples=tuple(measured))
    write_calibration(file, calibration)
    assert read_calibration(file) == calibration
    assert json.loads(file.read_text())["world_size"] == 3


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert algbw_gb_per_s(10**9, 1e9) == 1
    assert busbw_gb_per_s(10**9, 1e9, world_size=2) == 1
    assert busbw_gb_per_s(10**9, 1e9, world_size=4) == 1.5


def test_measurements_alone_are_listed_one_by_one() -> None:
    sizes, times_ns = calibration_of((1024, 1, 10), (1024, 2, 15), (2048, 1, 20)).alone()
    np.testing.assert_array_equal(sizes, [1024, 2048])
    np.testing.assert_array_equal(times_ns, [10, 20])


@pytest.mark.parametrize(("pair_ns", "saved", "lanes"), [(200, 0.0, 1), (100, 0.5, 2), (120, 0.4, 2), (170, 0.15, 1)])
def test_two_small_ones_together_tell_how_many_run_at_a_time(pair_ns: int, saved: float, lanes: int) -> None:
    large = [(2**20, 1, 10_000), (2**20, 2, 20_000)]  # they share the link, however many run at a time
    calibration = calibration_of((1024, 1, 100), (1024, 2, pair_ns), *large)
    assert calibration.saved_by_two == pytest.approx(saved)
    assert calibration.lanes == lanes


def test_where_no_pairs_were_measured_one_runs_at_a_time() -> None:
    assert np.isnan(calibration_of((1024, 1, 100)).saved_by_two)
    assert calibration_of((1024, 1, 100)).lanes == 1


GOOD = {
    "format": "overlapscope calibration",
    "version": 1,
    "backend": "gloo",
    "device": "cpu",
    "hosts": ["a", "b"],
    "samples": [{"bytes": 1024, "in_flight": 1, "times_ns": [5]}],
}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read (No such file or directory)"),
        ("{", "is no calibration; make one with 'overlapscope calibrate'"),
        ("[]", "is no calibration; make one with 'overlapscope calibrate'"),
        (json.dumps(GOOD | {"version": 2}), "has version 2, but 1 is needed; make it again"),
        (json.dumps(GOOD | {"samples": []}), "is damaged; make it again with 'overlapscope calibrate'"),
        (json.dumps(GOOD | {"hosts": ["a"]}), "is damaged; make it again with 'overlapscope calibrate'"),
        (
            json.dumps(GOOD | {"samples": [{"bytes": 1024, "in_flight": 1, "times_ns": [0]}]}),
            "is damaged; make it again with 'overlapscope calibrate'",
        ),
        (
            json.dumps(GOOD | {"samples": [{"bytes": 1024, "in_flight": 1, "times_ns": []}]}),
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
    with pytest.raises(OverlapScopeError, match=r"nowhere/c.json: can't be written \(No such file"):
        write_calibration(tmp_path / "nowhere" / "c.json", calibration_of((1024, 1, 1)))
