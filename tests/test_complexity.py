"""What fits in one's head: functions of a cyclomatic complexity of at most 15, and one class of each name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for name in ("overlapscope", "instrumented_ddp", "dashboards") for path in (ROOT / name).rglob("*.py")]
MOST = 15

EXCEPTIONS: dict[str, int] = {}
"""Complexity of the functions above it, each a table or a sequence of cases that reads worse in pieces."""


def test_no_function_is_too_complex_and_no_exception_is_needless() -> None:
    radon = pytest.importorskip("radon.complexity")
    found = {}
    for path in SOURCES:
        for block in radon.cc_visit(path.read_text()):
            for function in getattr(block, "methods", [block]):
                if function.complexity > MOST:
                    found[f"{path.relative_to(ROOT)}:{function.name}"] = function.complexity
    assert found == EXCEPTIONS


def test_no_two_classes_have_the_same_name() -> None:
    found = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
