"""The models, strategies and clocks of a recording in a few words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlapscope.trace.description import describe_auto_choices, describe_clocks, describe_models, describe_strategies
from overlapscope.trace.json_files import write_json
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import CLOCK_FILE, RANK_FILE, rank_folder
from tests.synthetic import make_rank


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ([], ""),
        (["GPT"], "GPT"),
        (["Generator", "Discriminator"], "Generator, Discriminator"),
        (["Net"] * 13 + ["Head"], "Net ×13, Head"),
    ],
)
def test_classes_are_named_once(classes: list[str], said: str) -> None:
    assert describe_models({"models": [{"class": name} for name in classes]}) == said


@pytest.mark.parametrize(
    ("strategies", "said"),
    [((), ""), (("overlapped", None), ""), (("ring", "ring"), "ring"), (("ring", "overlapped", "tree"), "ring, tree")],
)
def test_strategies_are_named_unless_they_are_the_usual_one(strategies: tuple[str | None, ...], said: str) -> None:
    models = [{"ddp_arguments": {} if one is None else {"strategy": one}} for one in strategies]
    assert describe_strategies({"models": models}) == said
    assert describe_strategies({}) == ""


def auto_model(state: str, *steps: int, **more: Any) -> dict[str, Any]:
    decisions = [{"step": step, "why": f"reason {step}", "trials": [], "chosen": 1} for step in steps]
    return {"model": 0, "class": "GPT", "auto": {"state": state, "decisions": decisions, **more}}


def test_what_auto_chose_is_said_of_each_model(golden: Callable[[str, str], None]) -> None:
    runs = [
        [auto_model("decided", 56, 640)],
        [auto_model("decided", 56), auto_model("impossible", why="it has one rank") | {"model": 1}],
        [auto_model("measuring")],
    ]
    said = [describe_auto_choices({"models": models}) for models in runs]
    assert [len(each) for each in said] == [2, 2, 1]
    golden("sentences/auto_choices", "\n".join(sentence for each in said for sentence in each))


@pytest.mark.parametrize("run", [{}, {"models": []}, {"models": [{"model": 0}]}, {"models": [{"auto": {"x": 1}}]}])
def test_where_nothing_was_to_be_chosen_there_is_nothing_to_say(run: dict[str, Any]) -> None:
    assert describe_auto_choices(run) == []


def write_ranks(folder: Path, boots: list[str]) -> None:
    for rank, boot in enumerate(boots):
        make_rank(folder, rank, world_size=len(boots)).close()
        path = rank_folder(folder, rank) / RANK_FILE
        write_json(path, json.loads(path.read_text()) | {"boot_id": boot})


def test_ranks_of_one_boot_share_a_clock(tmp_path: Path) -> None:
    write_ranks(tmp_path, ["a", "a"])
    assert describe_clocks(read_trace(tmp_path)) == "one shared clock"


def test_ranks_that_are_aligned_are_so_to_within_an_error(tmp_path: Path) -> None:
    write_ranks(tmp_path, ["a", "b"])
    burst = {"reference": "a", "best": [[0, 11_500, 23_000]]}
    (rank_folder(tmp_path, 1) / CLOCK_FILE).write_text(json.dumps(burst) + "\n")
    assert describe_clocks(read_trace(tmp_path)) == "aligned to ±11.5 µs"


def test_ranks_that_are_not_aligned_are_counted(tmp_path: Path) -> None:
    write_ranks(tmp_path, ["a", "a", "b"])
    assert describe_clocks(read_trace(tmp_path)) == "1 of 3 ranks not aligned"
