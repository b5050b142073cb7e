"""Cycles as they would be if all ranks were like the median rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.plots.ideal import compute_ideal
from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.stragglers.cycles import CAUSES, Cycles, build_cycles
from overlapscope.stragglers.replay import Replay
from overlapscope.trace.recording import read_trace
from tests.synthetic import make_rank, write_step

US = 1_000
EVER = (0, 2**62)


def cycles(local_ns, lead_ns, transfer_ns, broadcast_ns=None, begin_ns=(1000,)):
    """Cycles of which local times (by cause: (S, R)), leads (S, R, K) and transfers (S, K) are given."""
    shape = np.shape(lead_ns)[:2]
    own = np.zeros((len(CAUSES), *shape), dtype=np.int64)
    for cause, values in local_ns.items():
        own[CAUSES.index(cause)] = values
    broadcast = np.zeros(shape, dtype=np.int64) if broadcast_ns is None else np.array(broadcast_ns)
    arrival = (own.sum(axis=0) + broadcast)[:, :, None] - np.array(lead_ns)
    end = np.zeros(np.shape(transfer_ns), dtype=np.int64)
    free = np.zeros(shape[0], dtype=np.int64)
    for number in range(end.shape[1]):
        free = end[:, number] = np.maximum(arrival[:, :, number].max(axis=1), free) + np.array(transfer_ns)[:, number]
    return Cycles(
        ranks=np.arange(shape[1]),
        steps=np.arange(5, 5 + shape[0]),
        left_out=0,
        missing_ranks=0,
        buckets=np.arange(end.shape[1]),
        bytes=np.full(end.shape[1], 4),
        begin_ns=np.array(begin_ns),
        local_ns=own,
        lead_ns=np.array(lead_ns),
        arrival_ns=arrival,
        end_ns=end,
        broadcast_ns=broadcast,
        clock_error_ns=0.0,
    )


SLOW_BACKWARD = {
    "bucket_copies": 10,
    "optimizer": 20,
    "data_wait": 5,
    "forward": 100,
    "inter_phase": 10,
    "backward": [[200, 200, 260]],
}
LEADS = [[[100, 0], [100, 0], [130, 0]]]


def test_a_slow_rank_is_replaced_by_the_middle_one():
    ideal = compute_ideal(Replay(cycles(SLOW_BACKWARD, LEADS, [[50, 70]])), *EVER)
    assert ideal.phases.to_numpy().tolist() == [
        [5, "bucket_copies", 1000, 1010],
        [5, "optimizer", 1010, 1030],
        [5, "data_wait", 1030, 1035],
        [5, "forward", 1035, 1135],
        [5, "backward", 1145, 1345],
    ]
    assert ideal.collectives.to_numpy().tolist() == [[5, 0, 1245, 1245, 1295], [5, 1, 1345, 1345, 1415]]
    assert ideal.cycles.to_numpy().tolist() == [[5, 1000, 415, 475]]


def test_an_all_reduce_waits_for_the_one_before_it():
    ideal = compute_ideal(Replay(cycles(SLOW_BACKWARD, LEADS, [[150, 70]])), *EVER)
    assert ideal.collectives.to_numpy().tolist() == [[5, 0, 1245, 1245, 1395], [5, 1, 1345, 1395, 1465]]


def test_a_broadcast_of_buffers_comes_before_forward():
    ideal = compute_ideal(Replay(cycles(SLOW_BACKWARD, LEADS, [[50, 70]], broadcast_ns=[[7, 7, 7]])), *EVER)
    assert ideal.collectives.iloc[0].tolist() == [5, -1, 1035, 1035, 1042]
    assert ideal.phases.iloc[3].tolist() == [5, "forward", 1042, 1142]
    assert ideal.cycles["ideal_ns"].tolist() == [422]


def test_only_cycles_that_are_touched_are_given():
    two = cycles({"backward": [[200, 200], [200, 260]]}, [[[0], [0]]] * 2, [[50]] * 2, begin_ns=(1000, 2000))
    replay = Replay(two)
    assert compute_ideal(replay, 1100, 1200).cycles["step"].tolist() == [5]
    assert compute_ideal(replay, 1100, 2100).cycles["step"].tolist() == [5, 6]
    assert compute_ideal(replay, 1500, 1600).phases.empty


lengths = st.integers(0, 10**9)


@given(
    own=st.lists(st.tuples(lengths, lengths, lengths), min_size=len(CAUSES) - 1, max_size=len(CAUSES) - 1),
    leads=st.lists(st.tuples(lengths, lengths, lengths), min_size=1, max_size=4),
    transfers=st.lists(lengths, min_size=5, max_size=5),
)
def test_the_last_all_reduce_ends_when_the_replay_says(own, leads, transfers):
    lead_ns = np.array([*sorted(leads, reverse=True), (0, 0, 0)]).T[None]
    local_ns = {cause: [values] for cause, values in zip(CAUSES[1:], own, strict=True)}
    ideal = compute_ideal(Replay(cycles(local_ns, lead_ns, [transfers[: lead_ns.shape[2]]])), -(2**62), 2**62)
    begin_ns, ideal_ns = ideal.cycles[["begin_ns", "ideal_ns"]].iloc[0]
    assert ideal.collectives["end_ns"].iloc[-1] == begin_ns + ideal_ns
    assert (ideal.collectives["start_ns"] >= ideal.collectives["arrival_ns"]).all()


@pytest.fixture
def alike(tmp_path):
    """Three ranks that do the same at the same time."""
    for rank in range(3):
        log = make_rank(tmp_path / "traces", rank, world_size=3)
        for step in range(6):
            write_step(log, step, 1_000_000_000 + step * 10_000 * US)
        log.close()
    return read_trace(tmp_path / "traces")


def test_were_all_ranks_alike_the_ideal_lies_on_what_was_recorded(alike):
    found = build_cycles(alike, compute_breakdown(alike))
    assert found is not None
    ideal = compute_ideal(Replay(found), *EVER)
    assert ideal.cycles["step"].tolist() == [1, 2, 3, 4, 5]
    assert ideal.cycles["ideal_ns"].tolist() == ideal.cycles["recorded_ns"].tolist()
    phases = alike.phases[alike.phases["rank"] == 1]
    for cause, start_ns, end_ns in ideal.phases[["cause", "start_ns", "end_ns"]].itertuples(index=False):
        phase = "finalize" if cause == "bucket_copies" else cause
        same = phases[(phases["phase"] == phase) & (phases["start_ns"] <= start_ns) & (phases["end_ns"] >= end_ns)]
        assert len(same) == 1
    recorded = alike.collectives[(alike.collectives["rank"] == 1) & (alike.collectives["step"] > 0)]
    names = ["step", "bucket", "start_ns", "end_ns"]
    assert ideal.collectives[names].to_numpy().tolist() == recorded[names].to_numpy().tolist()
    assert ideal.collectives["arrival_ns"].tolist() == recorded["launch_ns"].tolist()
