"""The models, strategies and clocks of a recording in a few words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlapscope.trace.description import describe_clocks, describe_models, describe_strategies
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
    assert describe_clocks(read_trace(tmp_path)) == "aligned to ±12 µs"


def test_ranks_that_are_not_aligned_are_counted(tmp_path: Path) -> None:
    write_ranks(tmp_path, ["a", "a", "b"])
    assert describe_clocks(read_trace(tmp_path)) == "1 of 3 ranks not aligned"
