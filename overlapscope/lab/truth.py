"""Point-by-point comparison of a verdict with the catalog of faults."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.verdict import Verdict
from overlapscope.lab.catalog import Fault

# The scripts of the laboratory: their paths, and the explanations in their docstrings.

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


@dataclass(frozen=True, kw_only=True)
class VerdictCheck:
    """Comparison of one point of a verdict with the expected one."""

    point: str
    expected: str
    said: str
    is_right: bool

    def __str__(self) -> str:
        return f"{self.point} {self.said}" if self.is_right else f"{self.point} {self.said}, expected {self.expected}"


def check_verdict(fault: Fault, world_size: int, verdict: Verdict) -> tuple[VerdictCheck, ...]:
    """Compare the relevant points: always kind and ranks; step, bucket, parameters and line if the fault has them."""
    kind = VerdictCheck(
        point="kind",
        expected=" or ".join(fault.kinds),
        said=verdict.kind,
        is_right=verdict.kind in fault.kinds,
    )
    checks = [kind, _ranks(fault, world_size, verdict)]
    if fault.step is not None:
        checks.append(_step(fault.step, verdict))
    if fault.bucket is not None:
        checks.append(_compare_index("bucket", fault.bucket, verdict.bucket))
    if fault.parameters:
        checks.append(_parameters(fault, verdict))
    if fault.has_line:
        checks.append(_line(fault, verdict))
    return tuple(checks)


def _ranks(fault: Fault, world_size: int, verdict: Verdict) -> VerdictCheck:
    expected = fault.blamed(world_size)
    # What all ranks do alike may be blamed on all of them or on none.
    is_right = set(verdict.named) == set(expected) or (
        len(expected) == world_size and not verdict.named and verdict.is_fault
    )
    return VerdictCheck(point="blamed", expected=_numbers(expected), said=_numbers(verdict.named), is_right=is_right)


def _compare_index(point: str, expected: int, said: int | None) -> VerdictCheck:
    return VerdictCheck(point=point, expected=str(expected), said=str(said), is_right=said == expected)


def _step(expected: int, verdict: Verdict) -> VerdictCheck:
    said = str(verdict.step) if verdict.last_step is None else f"{verdict.step} to {verdict.last_step}"
    is_right = verdict.step is not None and verdict.step <= expected <= (verdict.last_step or verdict.step)
    return VerdictCheck(point="step", expected=str(expected), said=said, is_right=is_right)


def _parameters(fault: Fault, verdict: Verdict) -> VerdictCheck:
    said, expected = set(verdict.parameters), set(fault.parameters)
    # If models differ, the first difference is enough; if gradients are never ready, all of them must be named.
    is_right = bool(said) and (said <= expected if verdict.kind == "models differ" else said == expected)
    return VerdictCheck(
        point="parameters",
        expected=" ".join(fault.parameters),
        said=" ".join(verdict.parameters) or "none",
        is_right=is_right,
    )


def _line(fault: Fault, verdict: Verdict) -> VerdictCheck:
    lines = find_faulty_lines(fault)
    sites = verdict.call_sites
    ranks = [rank for rank in verdict.named if rank in sites] or list(sites)
    said = sorted({(Path(sites[rank].file).name, sites[rank].line) for rank in ranks})
    return VerdictCheck(
        point="line",
        expected=" or ".join(f"{fault.script}:{line}" for line in lines),
        said=" ".join(f"{file}:{line}" for file, line in said) or "none",
        is_right=any(file == fault.script and line in lines for file, line in said),
    )


def _numbers(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks)) or "nobody"
