"""The scripts of the laboratory: their paths, and the explanations in their docstrings."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from overlapscope.lab.catalogue import Fault

_MARKS: Final = ("# <- the fault", "# <- seen here")
"""Comments that mark the faulty line, and lines at which a process can notice it."""


def find_fault_script(fault: Fault) -> Path:
    """Return the path of a fault's script."""
    return _examples() / "faults" / fault.script


def find_experiment_script(name: str) -> Path:
    """Return the path of a script of the experiments."""
    return _examples() / "experiments" / name


def read_explanation(fault: Fault) -> str:
    """Return the script's explanation: the fault in one line, how it happens, what you see."""
    source = find_fault_script(fault).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def read_title(fault: Fault) -> str:
    """Return the fault in one line."""
    return read_explanation(fault).partition("\n")[0].replace("``", "")


def find_faulty_lines(fault: Fault) -> tuple[int, ...]:
    """Return the numbers of the marked lines, which a correct verdict may point to."""
    source = find_fault_script(fault).read_text(encoding="utf-8")
    return tuple(number for number, line in enumerate(source.splitlines(), 1) if any(mark in line for mark in _MARKS))


def _examples() -> Path:
    """Return the folder ``examples``: inside the package if installed, next to it in a clone."""
    spec = find_spec("instrumented_ddp")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    installed = package / "examples"
    return installed if installed.exists() else package.parent / "examples"
