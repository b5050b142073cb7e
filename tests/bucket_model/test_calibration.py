"""What a calibration says, and the file it is kept in."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def test_a_file_that_can_not_be_used_is_one_line(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    damages = {
        "no_json": "{",
        "a_list": "[]",
        "version": json.dumps(GOOD | {"version": 2}),
        "no_samples": json.dumps(GOOD | {"samples": []}),
        "one_host": json.dumps(GOOD | {"hosts": ["a"]}),
        "no_time": json.dumps(GOOD | {"samples": [{"bytes": 1024, "times_ns": [0]}]}),
        "negative_time": json.dumps(GOOD | {"pairs": [{"bytes": 1024, "times_ns": [-1]}]}),
        "no_times": json.dumps(GOOD | {"samples": [{"bytes": 1024, "times_ns": []}]}),
    }
    said = []
    for name in ("missing", *damages):
        file = tmp_path / f"{name}.json"
        if name in damages:
            file.write_text(damages[name])
        with pytest.raises(OverlapScopeError) as raised:
            read_calibration(file)
        said.append(str(raised.value))
    calibration = Calibration(backend="gloo", device="cpu", hosts=("a", "b"), samples=())
    with pytest.raises(OverlapScopeError) as raised:
        write_calibration(tmp_path / "nowhere" / "c.json", calibration)
    golden("sentences/calibration", "\n".join([*said, str(raised.value)]).replace(f"{tmp_path}/", ""))
