"""Dumps that the installed torch writes, of real ranks over gloo."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from overlapscope.diagnosis.flight_recorder import read_dumps
from overlapscope.diagnosis.judge import judge
from tests.cluster.flight_recorder_job import run
from tests.cluster.ranks import CONTEXT, TIME_LIMIT_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(
        not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch has no recorder for gloo"
    ),
]


@pytest.mark.parametrize(
    ("scenario", "kind", "blamed", "number"),
    [("subgroups", "healthy", (), None), ("hang", "stuck", (1,), 4), ("odd", "different collectives", (1,), 4)],
)
def test_are_read_and_judged(
    tmp_path: Path, scenario: str, kind: str, blamed: tuple[int, ...], number: int | None
) -> None:
    ranks = [CONTEXT.Process(target=run, args=(rank, 3, scenario, tmp_path)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIME_LIMIT_S)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    for suffix in ("", ".json"):
        dumps = tmp_path / f"dumps{suffix}"
        dumps.mkdir()
        for rank in range(3):
            dump = (tmp_path / f"trace_{rank}{suffix}").rename(dumps / f"trace_{rank}{suffix}")
            os.utime(dump, (time.time() + 60, time.time() + 60))  # as if they had waited for a minute
        evidence, problems = read_dumps(dumps)
        assert [problem.severity for problem in problems] == ["note"]
        verdict = judge(evidence)
        assert (verdict.kind, verdict.blamed, verdict.number) == (kind, blamed, number)
        if kind != "healthy" and not suffix:
            site = verdict.call_sites[0]
            assert (Path(site.file).name, site.function) == ("flight_recorder_job.py", scenario)
