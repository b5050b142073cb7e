"""What a light step holds, and one that is not recorded."""

from __future__ import annotations

import pytest
import torch

from overlapscope.trace.recording_modes import RecordingMode, is_full_step, write_control
from tests.instrumented_ddp.recording.lone_training import backward, make_model, recorded


@pytest.fixture(autouse=True)
def _every_gradient_is_recorded(monkeypatch):
    monkeypatch.setenv("OVERLAPSCOPE_DETAIL", "parameters")


def test_a_light_step_has_phases_and_buckets_and_neither_copies_nor_gradients(traces):
    traces.mkdir(exist_ok=True)
    write_control(traces, [], RecordingMode(from_step=0, every=2, detail="parameters"))
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        backward(model)
        optimizer.step()
    trace = recorded(model, traces)
    assert (
        set(trace.copies["step"])
        == set(trace.gradients["step"])
        == set(filter(lambda step: is_full_step(step, 2), range(6)))
    )
    assert set(trace.steps["step"]) == set(trace.phases["step"]) == {*range(6)}
    buckets = trace.collectives.query("bucket >= 0")
    assert set(buckets["step"]) == {*range(6)}
    assert buckets["ready_ns"].notna().all()
    assert buckets["end_ns"].notna().all()
