"""Every fault of the laboratory, in real jobs: the verdict is the truth, and nothing is said where nothing is wrong.

``python -m benchmarks.fault_table --ranks 2`` (or 3, or 4) runs all of them with any number of ranks, and says how soon
the verdict comes. Here it is three ranks, and a fault of each family with two, where nobody may be blamed for a
disagreement, and with four. A few are quick enough for everybody to run; what repeats another's kind runs at night.
"""

from __future__ import annotations

import pytest

from overlapscope.lab.catalog import DEFAULT_WORLD_SIZE, FAULTS, Fault
from tests.lab.outcome import run_fault

pytestmark = pytest.mark.cluster

OF_EACH_FAMILY = {"missing-branch", "different-collectives", "interleaved-groups", "killed-in-backward"}
QUICK = {"missing-branch", "killed-in-backward"}
"""Those with which the README's test command holds verdicts to the truth."""

AT_NIGHT = {
    *("reordered-parameters", "different-find-unused", "different-static-graph"),
    *("caught-in-backward", "frozen-in-training", "no-sync-on-one-rank"),
    *("flipped-bit", "other-learning-rate", "other-optimizer-state", "state-after-join"),
    *("different-sizes", "different-dtypes", "asynchronous-error", "evaluation-with-barrier", "group-on-one-rank"),
    *("caught-exception", "dead-data-worker", "killed-for-memory"),
    *("different-bucket-caps", "slow-checkpoint", "other-names", "accumulated-gradients", "closure", "jitter"),
    *("own-statistics", "scaled-loss", "stopped-in-backward", "missing-branch", "wrong-world-size"),
    *("different-accumulation", "different-broadcast-buffers", "different-roots", "missing-member"),
    *("swapped-layers", "two-models", "unused-branch"),
}
"""Those of whose kind, and of whose way to be recognized, another one is run before."""


def mark(fault: Fault, world_size: int) -> list[pytest.MarkDecorator]:
    """Say when a fault is run."""
    if world_size == DEFAULT_WORLD_SIZE and fault.name in QUICK:
        return []
    return [pytest.mark.nightly if world_size != DEFAULT_WORLD_SIZE or fault.name in AT_NIGHT else pytest.mark.slow]


CASES = [
    pytest.param(fault, world_size, id=f"{fault.name}-{world_size}", marks=mark(fault, world_size))
    for world_size in (2, 3, 4)
    for fault in FAULTS
    if world_size in fault.world_sizes and (world_size == DEFAULT_WORLD_SIZE or fault.name in OF_EACH_FAMILY)
]


@pytest.mark.parametrize(("fault", "world_size"), CASES)
def test_the_verdict_is_the_truth(fault: Fault, world_size: int) -> None:
    """That of the watchdog while it happens, of ``diagnose`` then, and of ``diagnose`` when all processes are gone."""
    assert run_fault(fault, world_size, wrapper="instrumented").wrong(fault, world_size) == {}
