"""Sentences about what the machine said of the ranks of a verdict."""

from __future__ import annotations

from overlapscope.machine.evidence import MachineEvidence
from overlapscope.machine.text import tell


def recent(one: MachineEvidence) -> str:
    """Say what a rank was under when it was last heard from."""
    return tell(one, "of the last half minute")


def grave(one: MachineEvidence) -> str:
    """Say what happened on a machine while the job ran."""
    return tell(one, "of the time")
