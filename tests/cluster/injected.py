"""Recorded trainings of four ranks in which a known thing is wrong, and whether a finding says what it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from overlapscope.lab.network.hosts import INTERFACE, Hosts
from overlapscope.stragglers.stragglers import Finding
from tests.cluster.faults import Fault, GcPauses, Pause, SlowCompute, SlowData, SlowLink, to_json
from tests.cluster.processes import METHOD, Method, Program, run_together

WORLD_SIZE: Final = 4
STEPS: Final = 150
TIME_LIMIT_S: Final = 120
CASES: Final[dict[str, tuple[Fault, ...]]] = {
    "none": (),
    "slow_compute": (SlowCompute(rank=1),),
    "slow_data": (SlowData(rank=2),),
    "pause": (Pause(rank=3),),
    "gc_pauses": (GcPauses(rank=3),),
    "slow_compute_and_slow_data": (SlowCompute(rank=1), SlowData(rank=2)),
    "slow_link": (SlowLink(rank=2),),
    "gc_pauses_and_slow_link": (GcPauses(rank=3), SlowLink(rank=1)),
    "slow_compute_later": (SlowCompute(rank=0, from_step=80),),
}


def train(
    faults: Sequence[Fault], folder: Path, hosts: Hosts | None = None, steps: int = STEPS, method: Method = METHOD
) -> None:
    """Record one training, a rank on each host or all of them on this one."""
    delays = to_json([fault for fault in faults if not isinstance(fault, SlowLink)])
    interface = INTERFACE if hosts else "lo"
    environment = os.environ | {"WORLD_SIZE": str(WORLD_SIZE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    arguments = ["-m", "tests.cluster.straggling", str(folder), "--steps", str(steps), "--faults", delays]
    with tempfile.TemporaryDirectory() as rendezvous:
        arguments += ["--rendezvous", f"{rendezvous}/file"]
        programs = [
            Program(arguments, environment | {"RANK": str(rank)}, hosts.namespaces[rank] if hosts else None)
            for rank in range(WORLD_SIZE)
        ]
        run_together(programs, TIME_LIMIT_S, method)


def names(finding: Finding, fault: Fault) -> bool:
    """Whether a finding has the rank, the cause, and the pattern with its period, of a fault."""
    blamed = (finding.link.rank,) if finding.link else finding.ranks
    pattern = (finding.pattern.kind, finding.pattern.period)
    return (blamed, finding.cause, pattern) == (
        (fault.rank,),
        fault.cause,
        (fault.pattern, getattr(fault, "every", None)),
    )
