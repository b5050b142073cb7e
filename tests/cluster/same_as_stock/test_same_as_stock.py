"""Whatever stock's class does, ours does while recording: every scenario, on every rank, to the bit."""

from __future__ import annotations

import pytest

from tests.cluster.ranks import run_ranks
from tests.cluster.same_as_stock import (
    backward_passes,
    buckets,
    buffers,
    checkpointing,
    comm_hooks,
    compiled,
    failures,
    optimizers,
    parameter_hooks,
    parameter_kinds,
    saving,
    several_models,
    static_graph,
    uneven_inputs,
    unused_parameters,
    wrapping,
)
from tests.cluster.same_as_stock.scenarios import differences_from_stock

pytestmark = pytest.mark.cluster

SUBJECTS = (
    backward_passes,
    buckets,
    buffers,
    checkpointing,
    comm_hooks,
    compiled,
    failures,
    optimizers,
    parameter_hooks,
    parameter_kinds,
    saving,
    several_models,
    static_graph,
    uneven_inputs,
    unused_parameters,
    wrapping,
)


@pytest.mark.parametrize(
    ("subject", "name", "ranks"),
    [
        pytest.param(subject.__name__, name, ranks, id=f"{subject.__name__.rpartition('.')[2]}-{name}-{ranks}_ranks")
        for subject in SUBJECTS
        for name, ranks in subject.scenarios
    ],
)
def test_same_as_stock(tmp_path, subject, name, ranks):
    assert run_ranks(differences_from_stock, ranks, subject, name, str(tmp_path / "traces")) == [[]] * ranks
