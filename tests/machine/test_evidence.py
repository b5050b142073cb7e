"""A condition is told if it sets ranks or times apart; what all had alike explains nothing about one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from overlapscope.machine.conditions import measure_conditions
from overlapscope.machine.evidence import MachineEvidence, contrast, select_telling, summarize_log
from overlapscope.machine.readings import spans_of
from overlapscope.machine.text import tell
from overlapscope.trace.machine_facts import HW_POWER_BRAKE, SW_POWER_CAP
from overlapscope.trace.machine_log import MachineLog, MachineSource, read_machine_log
from tests.machine.said import COOL, HOT, S, counted, gpu, quota, readings, write_machine


def compared(rows, uses, ranks, *pairs) -> tuple[MachineEvidence, ...]:
    spans = spans_of(*((round(begin * S), round(end * S)) for begin, end in pairs))
    found = readings(rows, uses)
    return contrast(measure_conditions(found, spans), found.uses, ranks)


OWN_GPUS = {rank: [f"gpu {rank}"] for rank in range(3)}


def hot(limits_by_rank):
    return [row for rank, limits in enumerate(limits_by_rank) for row in gpu(f"gpu {rank}", limits)]


def test_a_hot_gpu_among_cool_ones_sets_its_rank_apart():
    (one,) = compared(hot([[COOL] * 6, [HOT] * 6, [COOL] * 6]), OWN_GPUS, [1], (0, 6))
    assert (one.ranks, one.condition.kind, one.condition.amount, one.others) == ((1,), "thermal limit", 1, 0)
    assert one.sets_ranks_apart
    assert select_telling([one]) == (one,)


def test_heat_in_the_late_steps_and_not_in_others_sets_these_apart():
    limits = [COOL, COOL, HOT, HOT, COOL, COOL]
    (one,) = compared(hot([limits] * 3), OWN_GPUS, [1], (2, 4))
    assert one.sets_times_apart
    assert not one.sets_ranks_apart
    assert select_telling([one]) == (one,)


def test_heat_on_all_ranks_and_all_the_time_is_no_evidence():
    (one,) = compared(hot([[HOT] * 6] * 3), OWN_GPUS, [1], (2, 4))
    assert one.is_alike
    assert select_telling([one]) == ()


def test_ranks_that_share_a_control_group_are_not_set_apart_by_it():
    rows = quota("cgroup a", [0.6] * 6)
    (one,) = compared(rows, {0: ["cgroup a"], 1: ["cgroup a"]}, [1], (0, 6))
    assert (one.ranks, one.shared_with, one.others) == ((1,), (0,), None)
    assert one.is_alike


def test_a_control_group_of_its_own_sets_a_rank_apart_from_ranks_without_a_quota():
    free = counted("cgroup b", "cpu_periods", [0.0] * 7) + counted("cgroup b", "cpu_throttled_periods", [0.0] * 7)
    (one,) = compared([*quota("cgroup a", [0.6] * 6), *free], {0: ["cgroup b"], 1: ["cgroup a"]}, [1], (0, 6))
    assert one.sets_ranks_apart
    assert one.others == 0


def test_what_is_unknown_of_others_does_not_set_ranks_apart():
    rows = [*gpu("gpu 1", [HOT] * 6), *counted("gpu 0", "temperature_c", [60.0] * 6)]
    (one,) = compared(rows, {0: ["gpu 0"], 1: ["gpu 1"]}, [1], (0, 6))
    assert one.others is None
    assert not one.sets_ranks_apart


def test_what_sets_ranks_apart_comes_first():
    rows = [*hot([[HOT] * 6, [HOT] * 6, [HOT] * 6])]
    for rank, share in enumerate((0.05, 0.9, 0.1)):
        rows += quota(f"cgroup {rank}", [share] * 6)
    uses = {rank: [f"gpu {rank}", f"cgroup {rank}"] for rank in range(3)}
    found = compared(rows, uses, [1], (0, 6))
    assert [one.condition.kind for one in found] == ["CPU quota", "thermal limit"]
    assert [one.condition.kind for one in select_telling(found)] == ["CPU quota"]


def test_a_rank_sums_up_its_file_for_a_diagnosis(tmp_path: Path):
    (tmp_path / "rank_0").mkdir()
    rows = [
        *quota("cgroup a", [0.0] * 100 + [0.8] * 30),
        *counted("cgroup a", "oom_kills", [0, 1], begin_s=5),
        *counted("gpu a", "xid", [79], begin_s=60),
    ]
    write_machine(tmp_path, 0, rows, uses=["process a"])
    state = summarize_log(0, read_machine_log(tmp_path / "rank_0", []))
    assert state.uses == ("process a", "cgroup a", "gpu a")
    (used_up,) = [one for one in state.recent if one.kind == "CPU quota"]
    assert used_up.amount == pytest.approx(0.8)
    assert used_up.elsewhere == 0
    assert {(one.kind, one.amount) for one in state.grave} == {("killed for memory", 1), ("Xid", 1)}


def test_a_rank_without_a_file_has_said_nothing():
    state = summarize_log(0, MachineLog())
    assert (state.uses, state.recent, state.grave) == ((), (), ())


def test_what_could_not_be_read_is_kept_with_its_ranks():
    unread = MachineSource(source="gpu", label="", facts="all", why="no package")
    found = readings([], {})
    found = type(found)([], {0: [unread], 1: [unread]})
    assert found.unreadable == {("gpu", "all", "no package"): [0, 1]}
    assert found.uses == {0: (), 1: ()}


def test_the_sentences(golden):
    said = []
    for limits in ([HOT] * 6, [SW_POWER_CAP] * 6, [HW_POWER_BRAKE] * 6, [COOL, COOL, HOT, HOT, COOL, COOL]):
        rows = hot([[COOL] * 6, limits, [COOL] * 6]) + counted("gpu 1", "power_cap_w", [500.0])
        said += compared(rows, OWN_GPUS, [1], (2, 4))
    said += compared(hot([[HOT] * 6] * 3), OWN_GPUS, [1], (2, 4))
    shared = {0: ["cgroup a", "host a"], 1: ["cgroup a", "host a"], 2: ["host a"]}
    memory = counted("cgroup a", "memory_bytes", [1.0e9] * 7) + counted(
        "cgroup a", "memory_limit_bytes", [1024.0**3] * 7
    )
    said += compared([*quota("cgroup a", [0.6] * 6), *memory], shared, [1], (0, 6))
    said += compared(counted("host a", "memory_pressure_us", np.arange(7) * 0.25e6), shared, [1], (0, 6))
    alone = {0: ["gpu 0", "net 0 eth0", "ib 0 mlx5_0/1", "process 0"], 1: ["gpu 1", "net 1 eth0", "process 1"]}
    facts = (
        *(("gpu 1", fact) for fact in ("nvlink_errors", "pcie_replays", "ecc_corrected", "ecc_uncorrected")),
        *(("net 1 eth0", fact) for fact in ("errors", "drops", "link_changes")),
        *(("ib 0 mlx5_0/1", fact) for fact in ("errors", "discards", "retransmits", "link_downs")),
        *(("cgroup a", fact) for fact in ("memory_limit_hits", "oom_kills")),
        ("host a", "swapped_pages"),
    )
    uses = {rank: (*names, "host a", "cgroup a") for rank, names in alone.items()}
    for source, fact in facts:
        said += compared(counted(source, fact, np.arange(7) * 300.0), uses, [0, 1], (0, 6))
    said += compared(counted("gpu 1", "xid", [13, 79, 999]), uses, [1], (0, 2))
    said += compared(counted("gpu 1", "xid", [79]) + counted("gpu 1", "lost", [1], begin_s=1), uses, [1], (0, 1))
    for fact, limit in (("pcie_width", "max_pcie_width"), ("nvlinks_active", "nvlinks")):
        rows = counted("gpu 1", fact, [8] * 7) + counted("gpu 1", limit, [16])
        said += compared(rows, uses, [1], (0, 6))
    said += compared(counted("process 1", "queued_ns", np.arange(7) * 0.4 * S), uses, [1], (0, 6))
    golden("machine/evidence", "\n".join(tell(one, "of these steps") for one in said))
