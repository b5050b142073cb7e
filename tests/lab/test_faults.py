"""Every fault of the laboratory, in real jobs: the verdict is the truth, and nothing is said where nothing is wrong.

``python -m benchmarks.fault_table --ranks 2`` (or 3, or 4) runs all of them with any number of ranks, and says how soon
the verdict comes. Here it is three ranks, and a fault of each family with two, where nobody may be blamed for a
disagreement, and with four. A few are quick enough for everybody to run.
"""

from __future__ import annotations

import pytest

from overlapscope.lab.catalog import DEFAULT_WORLD_SIZE, FAULTS, Fault
from tests.lab.outcome import run_fault

pytestmark = pytest.mark.cluster

OF_EACH_FAMILY = {"missing-branch", "different-collectives", "interleaved-groups", "killed-in-backward"}
QUICK = {"missing-branch", "killed-in-backward"}
"""Those with which the README's test command holds verdicts to the truth."""

MARKS = {2: pytest.mark.slow, DEFAULT_WORLD_SIZE: pytest.mark.slow, 4: pytest.mark.nightly}

CASES = [
    pytest.param(
        fault,
        world_size,
        id=f"{fault.name}-{world_size}",
        marks=[] if world_size == DEFAULT_WORLD_SIZE and fault.name in QUICK else [MARKS[world_size]],
    )
    for world_size in (2, 3, 4)
    for fault in FAULTS
    if world_size in fault.world_sizes and (world_size == DEFAULT_WORLD_SIZE or fault.name in OF_EACH_FAMILY)
]


@pytest.mark.parametrize(("fault", "world_size"), CASES)
def test_the_verdict_is_the_truth(fault: Fault, world_size: int) -> None:
    """That of the watchdog while it happens, of ``diagnose`` then, and of ``diagnose`` when all processes are gone."""
    assert run_fault(fault, world_size, wrapper="instrumented").wrong(fault, world_size) == {}
