"""The catalog, its scripts and its page in the documentation belong together."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from overlapscope.lab.catalog import FAULT_STEP, FAULTS, Fault
from overlapscope.lab.truth import find_fault_script, find_faulty_lines, read_explanation, read_title

ROOT = Path(__file__).parents[2]

every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def test_every_script_is_in_the_catalog_once() -> None:
    scripts = {path.name for path in (ROOT / "examples" / "faults").glob("*.py")}
    assert sorted(scripts - {"job.py"}) == sorted(fault.script for fault in FAULTS)


@every_fault
def test_a_script_explains_itself(fault: Fault) -> None:
    title, _, explanation = read_explanation(fault).partition("\n\n")
    assert read_title(fault).endswith(".")
    assert "\n" not in title
    assert ("Nothing is wrong" if fault.is_healthy else "What you see:") in " ".join(explanation.split())
    assert fault.is_healthy or "In real life:" in explanation


@every_fault
def test_the_faulty_line_is_marked_if_there_is_one(fault: Fault) -> None:
    assert not (fault.has_line and not find_faulty_lines(fault))
    assert not (fault.is_healthy and find_faulty_lines(fault))


@every_fault
def test_marks_stand_on_statements_of_one_line(fault: Fault) -> None:
    """A frame's line is where its statement begins."""
    tree = ast.parse(find_fault_script(fault).read_text())
    simple = (ast.Assign, ast.Expr, ast.Continue, ast.Return)
    starts = {node.lineno: node for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    for line in find_faulty_lines(fault):
        assert line in starts
        assert not isinstance(starts[line], simple) or starts[line].end_lineno == line


@every_fault
def test_what_is_true_can_be_asked_for(fault: Fault) -> None:
    assert fault.world_sizes
    assert set(fault.world_sizes) <= {2, 3, 4}
    assert not fault.bucket or fault.step is not None
    assert set(fault.blamed(3)) <= {0, 1, 2}
    assert fault.is_healthy is not bool(fault.blamed(3))
    assert fault.blamed(2) in ((), fault.ranks)


def test_scripts_take_their_step_from_the_same_number() -> None:
    assert f"\nFAULT_STEP = {FAULT_STEP}\n" in (ROOT / "examples" / "faults" / "job.py").read_text()


@every_fault
def test_the_documentation_has_a_row_for_it(fault: Fault) -> None:
    if fault.is_healthy:
        row = f"| `{fault.name}` | {read_title(fault)} |"
    else:
        row = f"| `{fault.name}` | {read_title(fault)} | {fault.stock} | {fault.kinds[0]} |"
    assert any(line.startswith(row) for line in (ROOT / "docs" / "faults.md").read_text().splitlines())
