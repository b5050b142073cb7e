"""Bucket plans as files: what is written is read, and what can't be right is said in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlapscope.bucket_model.plan_file import PlanFile, PlannedParameter, read_plan, write_plan
from overlapscope.errors import OverlapScopeError


def parameter(name: str, dtype: str = "float32") -> PlannedParameter:
    return PlannedParameter(name=name, shape=(4, 2), dtype=dtype, bytes=32)


PLAN = PlanFile(
    parameters=(parameter("a"), parameter("b"), parameter("c")),
    buckets=(("c",), ("b", "a")),
    bucket_cap_mb_list=(0.5, 25.0),
    predicted={"step_time_ns": 1000.0},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for plan in (PLAN, replace(PLAN, bucket_cap_mb_list=None, predicted={})):
        write_plan(tmp_path / "plan.json", plan)
        assert read_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_names_become_the_numbers_of_a_model() -> None:
    assert PLAN.numbered([parameter("b"), parameter("a"), parameter("c")]) == ((2,), (0, 1))


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ([parameter("a"), parameter("b"), parameter("c"), parameter("d")], "lacks d"),
        ([parameter("a"), parameter("b")], "has c, which"),
        ([parameter("a"), parameter("b", "bfloat16"), parameter("c")], "4×2 float32, but here it is 4×2 bfloat16"),
    ],
)
def test_a_plan_of_another_model_is_refused(parameters: list[PlannedParameter], what: str) -> None:
    with pytest.raises(OverlapScopeError, match=what):
        PLAN.numbered(parameters)


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "plan.json"
    write_plan(path, PLAN)
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": "something"}, "not a bucket plan"),
        ({"version": 2}, "version 2 of the bucket plan is unknown"),
        ({"parameters": [{"name": "a"}]}, "damaged bucket plan"),
        ({"parameters": 3}, "damaged bucket plan"),
        ({"buckets": [["a", 3]]}, "has 3, which the plan's parameters lack"),
        ({"buckets": [["a"], ["b", "a"]]}, "a is in bucket 0 and in bucket 1"),
        ({"buckets": [["a"], ["b"]]}, "c is in no bucket"),
        ({"buckets": [["a", "b", "c"], []]}, "bucket 1 of the plan is empty"),
        ({"buckets": [["a", "b", "x"]]}, "has x, which the plan's parameters lack"),
        ({"buckets": [["a", ["b"]]]}, "damaged bucket plan"),
        ({"predicted": 5}, "damaged bucket plan"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(OverlapScopeError, match=what) as refused:
        read_plan(path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_types_are_not_mixed_in_a_bucket(tmp_path: Path) -> None:
    mixed = replace(PLAN, parameters=(parameter("a"), parameter("b", "bfloat16"), parameter("c")))
    write_plan(tmp_path / "plan.json", mixed)
    with pytest.raises(OverlapScopeError, match=r"mixes b \(bfloat16\) and a \(float32\)"):
        read_plan(tmp_path / "plan.json")


def test_no_file_and_no_json_are_said(tmp_path: Path) -> None:
    with pytest.raises(OverlapScopeError, match="can't read the bucket plan"):
        read_plan(tmp_path / "missing.json")
    (tmp_path / "plan.json").write_bytes(b"\xff{")
    with pytest.raises(OverlapScopeError, match="not a bucket plan"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(OverlapScopeError, match="can't write"):
        write_plan(tmp_path / "missing" / "plan.json", PLAN)
