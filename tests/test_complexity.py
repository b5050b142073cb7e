"""A function can be held in one's head: its cyclomatic complexity, as radon counts it, is at most 15."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("overlapscope", "instrumented_ddp", "dashboards")
MOST = 15

EXCEPTIONS = {
    "dashboards/plots/step_drawing.py:draw_step": 17,
}
"""Functions above it, each a table or a sequence of cases that reads worse in pieces, with what it may have."""


def test_no_function_is_too_complex() -> None:
    radon = pytest.importorskip("radon.complexity")
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for block in radon.cc_visit(path.read_text()):
            for function in getattr(block, "methods", [block]):
                if function.complexity > MOST:
                    found[f"{path.relative_to(ROOT)}:{function.name}"] = function.complexity
    assert {name: number for name, number in found.items() if number > EXCEPTIONS.get(name, MOST)} == {}
