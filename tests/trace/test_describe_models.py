"""What was trained, in a few words."""

from __future__ import annotations

import pytest

from overlapscope.trace.description import describe_models, describe_strategies


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
