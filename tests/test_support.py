"""docs/support.md says what its data says, and of rows that exist; ``.ci/matrix`` names what exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_project import has_test

ROOT = Path(__file__).parents[1]


def load(path: str) -> ModuleType:
    """Load a script that is in no package, and leave no bytecode beside it."""
    module = ModuleType(f"script_{Path(path).stem}")
    module.__file__ = str(ROOT / path)
    sys.modules[module.__name__] = module  # where dataclasses look
    exec(compile((ROOT / path).read_text(), module.__file__, "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def support() -> ModuleType:
    return load("docs/support.py")


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    return load(".ci/matrix")


def test_the_page_says_what_the_data_says(support: ModuleType) -> None:
    assert support.PAGE.read_text() == support.write_page(support.read_rows(), support.read_results())


def test_the_page_has_the_rows_of_the_matrix_and_those_that_never_ran_are_unknown(support: ModuleType) -> None:
    listed = json.loads(subprocess.run([ROOT / ".ci" / "matrix", "--list"], capture_output=True, check=True).stdout)
    versions = support.PAGE.read_text().partition("## Versions")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `([\w.-]+)` \| \*\*(\w+)\*\*", versions, re.MULTILINE)
    assert [name for name, _ in shown] == [row["name"] for row in listed]
    results = support.read_results()
    ran = {result["row"] for result in results if result["result"] != "left out"}
    assert {name for name, status in shown if status != "unknown"} == ran
    assert {result["row"] for result in results} <= {row["name"] for row in listed}


def test_a_row_is_what_its_latest_result_says(support: ModuleType) -> None:
    ran = {"row": "a", "date": "2026-01-02", "python": "3.12.1", "machine": "Linux", "versions": {"numpy": "2.3"}}
    results = [
        {**ran, "result": "failed", "reason": "1 failed", "tests": {"failed": 1, "passed": 2}},
        {**ran, "result": "passed", "reason": "3 passed", "tests": {"passed": 1003}},
        {"row": "b", "date": "2026-01-02", "result": "left out", "reason": "python3.14 is not installed"},
    ]
    rows = [{"name": name, "python": "3.12", "versions": "-torch numpy"} for name in "abc"]
    page = support.write_page(rows, results)
    assert "| `a` | **tested** | Python 3.12, no torch, numpy | Python 3.12.1, numpy 2.3 | 1,003 passed |" in page
    assert "| `b` | **unknown** | Python 3.12, no torch, numpy |  | python3.14 is not installed |" in page
    assert "| `c` | **unknown** | Python 3.12, no torch, numpy |  | never run |" in page
    assert "**fails**" in support.write_page(rows, results[:1])


def test_the_matrix_leaves_out_tests_that_exist_and_installs_what_tests_need(matrix: ModuleType) -> None:
    assert [name for name in matrix.NEEDS_TORCH.split() if not has_test(name)] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(matrix.FOR_READING.split()) <= {re.split("[^\\w-]", line)[0] for line in extras["test"]}


def test_a_row_installs_its_own_versions_and_those_pinned_of_all_others(matrix: ModuleType, tmp_path: Path) -> None:
    (row,) = (row for row in matrix.ROWS if row.name == "oldest")
    _, install, test = matrix.commands(row, "python3.11", tmp_path, 4)
    pinned = (tmp_path / "constraints.txt").read_text()
    assert "numpy==1.26.*" in install
    assert not re.search("^(numpy|pandas|torch)==", pinned, re.MULTILINE)
    assert re.search("^rich==", pinned, re.MULTILINE)
    assert "--ignore=tests/cluster" in test


def test_a_python_that_is_not_installed_leaves_a_row_out(matrix: ModuleType, tmp_path: Path) -> None:
    found = matrix.attempt(matrix.Row("none", "3.99"), tmp_path, 1)
    assert found["result"] == "left out"
    assert "3.99" in found["reason"]
