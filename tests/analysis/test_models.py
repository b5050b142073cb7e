"""What was trained, in a few words."""

from __future__ import annotations

import pytest

from overlapscope.analysis.models import describe_models


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
