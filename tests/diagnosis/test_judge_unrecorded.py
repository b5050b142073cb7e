"""A rank whose recording ended before it did: nobody is accused of what was not recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import (
    Liveness,
    ModelParameters,
    UnreadyParameter,
)
from overlapscope.diagnosis.judge import judge
from tests.diagnosis.jobs import (
    HELD_UP,
    entry,
    group,
    idle,
    job,
    rank,
    trained,
)
from tests.ordered import all_reduce


@pytest.mark.parametrize("phase", ["loop", "forward", "backward", None])
@pytest.mark.parametrize("liveness", ["sleeping", "running", "ended", "unknown"])
@pytest.mark.parametrize("is_live", [True, False])
def test_nobody_is_accused_of_what_was_not_recorded(phase: str | None, liveness: Liveness, is_live: bool) -> None:
    unready = (UnreadyParameter(model=0, name="a", module="A", bucket=0),)
    model = ModelParameters(model=0, class_name="Net", parameters=(("a", (2,), "float32"), ("b", (2,), "float32")))
    lost = rank(1, liveness, phase=phase, step=1, unrecorded_because="disk", unready=unready, models=(model,))
    others = [idle(rank(n, step=2), 60) for n in (0, 2)]
    verdict = judge(job(others[0], idle(lost, 60), others[1], groups=[HELD_UP], is_live=is_live))
    assert (verdict.kind, verdict.blamed) == ("cannot tell", ())


def test_a_job_that_was_recorded_in_part_is_not_called_healthy() -> None:
    lost = rank(1, "ended", unrecorded_because="disk")
    order = group({0: trained(9), 1: trained(6), 2: trained(9)})
    verdict = judge(job(rank(0, "ended"), lost, rank(2, "ended"), groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("cannot tell", ())


def test_what_was_recorded_of_a_rank_still_counts() -> None:
    lost = rank(1, "ended", unrecorded_because="disk")
    order = group({0: trained(9), 1: (*trained(3), entry(4, all_reduce())), 2: trained(9)}, first_divergence=4)
    verdict = judge(job(rank(0), lost, rank(2), groups=[replace(order, divergence="signature")]))
    assert (verdict.number, verdict.blamed) == (4, (1,))
