"""The scripts of the laboratory: where they are, and what they say about themselves."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from overlapscope.lab.catalogue import Fault

_MARKS: Final = ("# <- the fault", "# <- seen here")
"""Marks of the faulty line, and of lines at which a process can notice it."""


def script_of(fault: Fault) -> Path:
    """The script of one fault."""
    return _examples() / "faults" / fault.script


def experiment_script(name: str) -> Path:
    """A script of the experiments."""
    return _examples() / "experiments" / name


def explanation_of(fault: Fault) -> str:
    """The script's own explanation: the fault in one line, how it happens, what you see."""
    source = script_of(fault).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def title_of(fault: Fault) -> str:
    """The fault in one line."""
    return explanation_of(fault).partition("\n")[0].replace("``", "")


def faulty_lines(fault: Fault) -> tuple[int, ...]:
    """The numbers of the marked lines, which a right verdict may point to."""
    source = script_of(fault).read_text(encoding="utf-8")
    return tuple(number for number, line in enumerate(source.splitlines(), 1) if any(mark in line for mark in _MARKS))


def _examples() -> Path:
    """``examples``: inside the package once installed, beside it in a clone."""
    spec = find_spec("instrumented_ddp")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    installed = package / "examples"
    return installed if installed.exists() else package.parent / "examples"
