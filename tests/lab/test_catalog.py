"""The catalog, its scripts and its page in the documentation belong together."""

from __future__ import annotations

import ast
from pathlib import Path

from overlapscope.lab.catalog import FAULT_STEP, FAULTS
from overlapscope.lab.truth import find_fault_script, find_faulty_lines, read_explanation, read_title

ROOT = Path(__file__).parents[2]


def test_every_script_is_in_the_catalog_once() -> None:
    scripts = {path.name for path in (ROOT / "examples" / "faults").glob("*.py")}
    assert sorted(scripts - {"job.py"}) == sorted(fault.script for fault in FAULTS)


def test_a_script_explains_itself() -> None:
    for fault in FAULTS:
        title, _, explanation = read_explanation(fault).partition("\n\n")
        assert read_title(fault).endswith("."), fault.name
        assert "\n" not in title, fault.name
        says = "Nothing is wrong" if fault.is_healthy else "What you see:"
        assert says in " ".join(explanation.split()), fault.name
        assert fault.is_healthy or "In real life:" in explanation, fault.name


def test_the_faulty_line_is_marked_if_there_is_one() -> None:
    assert [fault.name for fault in FAULTS if fault.has_line and not find_faulty_lines(fault)] == []
    assert [fault.name for fault in FAULTS if fault.is_healthy and find_faulty_lines(fault)] == []


def test_marks_stand_on_statements_of_one_line() -> None:
    """A frame's line is where its statement begins."""
    simple = (ast.Assign, ast.Expr, ast.Continue, ast.Return)
    for fault in FAULTS:
        tree = ast.parse(find_fault_script(fault).read_text())
        starts = {node.lineno: node for node in ast.walk(tree) if isinstance(node, ast.stmt)}
        for line in find_faulty_lines(fault):
            assert line in starts, fault.name
            assert not isinstance(starts[line], simple) or starts[line].end_lineno == line, fault.name


def test_what_is_true_can_be_asked_for() -> None:
    for fault in FAULTS:
        assert fault.world_sizes, fault.name
        assert set(fault.world_sizes) <= {2, 3, 4}, fault.name
        assert not fault.bucket or fault.step is not None, fault.name
        assert set(fault.blamed(3)) <= {0, 1, 2}, fault.name
        assert fault.is_healthy is not bool(fault.blamed(3)), fault.name
        assert fault.blamed(2) in ((), fault.ranks), fault.name


def test_scripts_take_their_step_from_the_same_number() -> None:
    assert f"\nFAULT_STEP = {FAULT_STEP}\n" in (ROOT / "examples" / "faults" / "job.py").read_text()


def test_the_documentation_has_a_row_for_each() -> None:
    lines = (ROOT / "docs" / "faults.md").read_text().splitlines()
    for fault in FAULTS:
        row = f"| `{fault.name}` | {read_title(fault)} |"
        row += "" if fault.is_healthy else f" {fault.stock} | {fault.kinds[0]} |"
        assert any(line.startswith(row) for line in lines), fault.name
