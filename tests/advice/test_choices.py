"""What ``bucket_cap_mb="auto"`` has decided, in sentences."""

from __future__ import annotations

from typing import Any

import pytest

from overlapscope.advice.auto_choices import describe_auto_choices

WHY = "bucket_cap_mb=2 is 20 % faster than bucket_cap_mb=None"


def model(state: str, *steps: int, **more: Any) -> dict[str, Any]:
    decisions = [{"step": step, "why": WHY, "trials": [], "chosen": 1} for step in steps]
    return {"model": 0, "class": "GPT", "auto": {"state": state, "decisions": decisions, **more}}


def test_every_decision_is_a_sentence() -> None:
    assert describe_auto_choices({"models": [model("decided", 56, 640)]}) == [
        f'bucket_cap_mb="auto": from step 56 on, {WHY}.',
        f'bucket_cap_mb="auto": from step 640 on, {WHY}.',
    ]


def test_of_several_models_each_is_named() -> None:
    other = model("impossible", why="all-reduce needs at least 2 ranks") | {"model": 1}
    assert describe_auto_choices({"models": [model("decided", 56), other]}) == [
        f'model 0 (GPT): bucket_cap_mb="auto": from step 56 on, {WHY}.',
        'model 1 (GPT): bucket_cap_mb="auto": nothing was chosen: all-reduce needs at least 2 ranks.',
    ]


@pytest.mark.parametrize("state", ["waiting", "measuring", "trying"])
def test_a_short_training_has_none_yet(state: str) -> None:
    (said,) = describe_auto_choices({"models": [model(state)]})
    assert said == 'bucket_cap_mb="auto": nothing was chosen yet: that takes about 60 steps, outside join().'


@pytest.mark.parametrize("run", [{}, {"models": []}, {"models": [{"model": 0}]}, {"models": [{"auto": {"x": 1}}]}])
def test_where_nothing_was_to_be_chosen_there_is_nothing_to_say(run: dict[str, Any]) -> None:
    assert describe_auto_choices(run) == []
