"""What fits in one's head: functions of a cyclomatic complexity of at most 15, and one class of each name."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("overlapscope", "instrumented_ddp", "dashboards")
MOST = 15

EXCEPTIONS: dict[str, int] = {}
"""Complexity of the functions above it, each a table or a sequence of cases that reads worse in pieces."""


@cache
def parse_sources() -> dict[str, ast.Module]:
    paths = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def test_no_function_is_too_complex_and_no_exception_is_needless() -> None:
    radon = pytest.importorskip("radon.complexity")
    found = {}
    for path, tree in parse_sources().items():
        for block in radon.cc_visit_ast(tree):
            for function in getattr(block, "methods", [block]):
                if function.complexity > MOST:
                    found[f"{path}:{function.name}"] = function.complexity
    assert found == EXCEPTIONS


def test_no_two_classes_have_the_same_name() -> None:
    found = defaultdict(list)
    for path, tree in parse_sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
