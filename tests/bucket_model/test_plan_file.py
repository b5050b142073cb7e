"""Bucket plans as files: what is written is read, and what can't be right is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
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


def written(folder: Path, number: int, **changes: Any) -> Path:
    path = folder / f"plan_{number}.json"
    write_plan(path, PLAN)
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "parameters",
    [
        [parameter("a"), parameter("b"), parameter("c"), parameter("d")],
        [parameter("a"), parameter("b")],
        [parameter("a"), parameter("b", "bfloat16"), parameter("c")],
    ],
)
def test_a_plan_of_another_model_is_refused(parameters: list[PlannedParameter]) -> None:
    with pytest.raises(OverlapScopeError, match="make a plan for this model"):
        PLAN.numbered(parameters)


def test_a_damaged_plan_is_refused_in_one_line(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    damages: list[dict[str, Any]] = [
        {"format": "something"},
        {"version": 2},
        {"parameters": [{"name": "a"}]},
        {"parameters": 3},
        {"buckets": [["a", 3]]},
        {"buckets": [["a", ["b"]]]},
        {"buckets": [["a"], ["b", "a"]]},
        {"buckets": [["a"], ["b"]]},
        {"buckets": [["a", "b", "c"], []]},
        {"predicted": 5},
        {"parameters": [asdict(parameter("a", "int8")), asdict(parameter("b")), asdict(parameter("c"))]},
    ]
    paths = [written(tmp_path, number, **changes) for number, changes in enumerate(damages)]
    paths += [tmp_path / "missing.json", tmp_path / "no_json.json"]
    paths[-1].write_bytes(b"\xff{")
    said = []
    for path in paths:
        with pytest.raises(OverlapScopeError) as refused:
            read_plan(path)
        said.append(str(refused.value))
        assert said[-1].startswith(str(path))
        assert "\n" not in said[-1]
    with pytest.raises(OverlapScopeError) as refused:
        write_plan(tmp_path / "missing" / "plan.json", PLAN)
    golden("sentences/plan_file", "\n".join([*said, str(refused.value)]).replace(f"{tmp_path}/", ""))
