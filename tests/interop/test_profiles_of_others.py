"""Profiles that others have published: of 2021 to 2026, of NCCL, RCCL and gloo, with their known numbers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from overlapscope.breakdown.breakdown import compute_breakdown, tabulate_breakdown
from overlapscope.cli.main import main
from overlapscope.interop.communication import compute_overlap, find_collective_spans
from overlapscope.interop.kineto import read_profile
from overlapscope.interop.trace_files import find_trace_files
from overlapscope.interop.training import convert_profile
from overlapscope.trace.communication import ImportedCommunication, read_imported_communication
from overlapscope.trace.recording import Trace, read_trace

DATA = Path(__file__).parent / "data"
DLRM = DATA / "dlrm_2023"
"""Eight ranks, NCCL: ``record_param_comms`` has no names, and "External id" of a kernel is its correlation."""


def imported(folder: Path, *files: Path) -> Trace:
    assert main(["import", *map(str, files), "-o", str(folder)]) == 0
    return read_trace(folder)


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return imported(tmp_path_factory.mktemp("dlrm") / "traces", DLRM)


def communication_of(trace: Trace) -> ImportedCommunication:
    found = read_imported_communication(trace.run)
    assert found is not None
    return found


def test_collectives_without_names_are_named_by_their_annotations(dlrm: Trace) -> None:
    reduced = dlrm.collectives.sort_values(["rank", "bucket"])
    assert reduced["elements"].tolist() == [394_241, 112, 226_960] * 8
    assert set(reduced["dtype"]) == {"float32"}
    time_ns = (reduced["end_ns"] - reduced["start_ns"]).astype("int64").groupby(reduced["rank"]).sum()
    # But for the drift of the clocks that they are aligned with.
    assert (time_ns / 1000).tolist() == pytest.approx([1799, 1830, 1685, 1772, 234, 195, 1735, 1357], abs=3)


def test_a_profile_of_2022_has_its_collectives() -> None:
    profile = read_profile(DATA / "dlrm_2022_rank3of8_cut.json.gz")
    counts = find_collective_spans(profile)["op"].value_counts().to_dict()
    assert counts == {"all_to_all": 42, "all_reduce": 18}
    spans = convert_profile(profile).communication
    assert spans["is_bucket"].sum() == 18
    assert spans.loc[spans["is_bucket"], "bytes"].iloc[:3].tolist() == [4 * 45_310_188, 4 * 267_040, 4 * 4_432_073]


def test_clocks_are_aligned_by_the_ends_of_kernels(dlrm: Trace) -> None:
    """They agree within 7 us, where arrivals leave hundreds open."""
    assert dlrm.aligned_ranks == tuple(range(8))
    assert 0 < dlrm.clock_error_ns < 40_000
    ends_ns = dlrm.collectives.pivot_table(index="bucket", columns="rank", values="end_ns", aggfunc="first")
    assert (ends_ns.max(axis=1) - ends_ns.min(axis=1)).max() < 20_000


def test_who_starts_last_is_told_by_group_and_operation(dlrm: Trace) -> None:
    found = {one.op: one for one in communication_of(dlrm).groups}
    assert {op: (one.count, one.is_bucket) for op, one in found.items()} == {
        "all_to_all": (5, False),
        "all_reduce": (3, True),
    }
    # Rank 7 was the last to start 5 of 8.
    assert found["all_to_all"].last_ranks == {"7": (4, 5), "5": (1, 5)}
    assert found["all_reduce"].last_ranks == {"7": (1, 3), "5": (1, 3), "4": (1, 3)}
    assert found["all_to_all"].wait_ns == pytest.approx(4.70e6, rel=0.01)


def test_of_gradients_is_said_where_there_is_other_communication(
    dlrm: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["summary", str(dlrm.path)])
    assert "communication of gradients is hidden" in " ".join(capsys.readouterr().out.split())


def test_kernels_launched_before_the_profile_are_no_part_of_its_first_step(tmp_path: Path) -> None:
    """968 of them ran until 30.08 ms: with these the first step would have taken 49 ms, and 38 % would be exposed."""
    trace = imported(tmp_path / "traces", DATA / "resnet_mi300_rank0of8.json.gz")
    figures = tabulate_breakdown(compute_breakdown(trace))
    assert (figures["step_time_ns"] / 1e6).round(2).tolist() == [18.98, 18.98, 18.55]
    assert figures["exposed_ns"].sum() / figures["step_time_ns"].sum() == pytest.approx(0.58, abs=0.005)


def test_a_rank_of_a_larger_world_is_summarized_with_a_note(tmp_path: Path) -> None:
    trace = imported(tmp_path / "traces", DATA / "resnet_mi300_rank0of8.json.gz")
    assert trace.errors == []
    assert "1-7" in str(trace.problems[0])
    assert main(["summary", str(trace.path)]) == 0


def test_archives_and_folders_are_read(tmp_path: Path, dlrm: Trace) -> None:
    trace = imported(tmp_path / "traces", DATA / "dlrm_two_ranks.tar.gz")
    assert trace.ranks["rank"].tolist() == [0, 1]
    assert dlrm.ranks["rank"].tolist() == list(range(8))  # of a folder
    assert all(one.wait_ns is None for one in communication_of(trace).groups)  # the last may be one of the others


def test_names_in_an_archive_lead_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with ZipFile(tmp_path / "evil.zip", "w") as archive:
        for name in ("../../../a.pt.trace.json", "../b.pt.trace.json", f"{tmp_path}/c.pt.trace.json", "x/../../d.json"):
            archive.writestr(name, "{}")
    with find_trace_files([tmp_path / "evil.zip"]) as (files, _):
        assert len(files) == 4
        assert all(file.path.resolve().is_relative_to(scratch) for file in files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.zip", "scratch"]


@pytest.mark.parametrize(
    ("worker", "compute", "overlap_us", "exposed_us"),
    [
        ("gpu_worker0", 101, 70, 39),
        ("gpu_worker1", 70, 54, 44),
        ("cpu_worker0", 121, 74, 35),
        ("cpu_worker1", 100, 64, 34),
    ],
)
def test_gloo_runs_on_the_host(worker: str, compute: int, overlap_us: int, exposed_us: int) -> None:
    profile = read_profile(DATA / f"golden_gloo_{worker}.json")
    found = compute_overlap(profile)
    assert (found.hidden_ns, found.exposed_ns) == (overlap_us * 1000, exposed_us * 1000)
    assert convert_profile(profile).busy.compute_ns == compute * 1000


def test_a_profile_without_ddp_gives_its_communication(tmp_path: Path) -> None:
    trace = imported(tmp_path / "traces", *(DATA / f"golden_nccl_worker{rank}.json" for rank in range(2)))
    found = communication_of(trace)
    assert (found.steps, len(trace.steps)) == (0, 0)
    assert {one.op: (one.time_ns, one.exposed_ns) for one in found.groups} == {
        "all_reduce": ((1_556_000 + 1_058_000) / 2, (1_427_000 + 1_058_000) / 2),
        "broadcast": ((16_000 + 31_000) / 2, (16_000 + 22_000) / 2),
    }
    assert all(one.wait_ns is None for one in found.groups)  # one collective of an unknown group may be two


def test_groups_are_told_apart_by_their_members(tmp_path: Path) -> None:
    """Two groups of two ranks with one description; rank 3 is 200 us late for its own, and nobody is in the other."""
    for rank in range(4):
        late_us = 200 * (rank == 3)
        group = {"Process Group Name": "tp", "Process Group Description": "tensor", "Group size": 2}
        group["Process Group Ranks"] = str([0, 1] if rank < 2 else [2, 3])
        call = {
            "Collective name": "_allgather_base",
            "In msg nelems": 100,
            "dtype": "BFloat16",
            "External id": 7,
            **group,
        }
        events = [
            {"cat": "user_annotation", "name": "ProfilerStep#3", "tid": 1, "ts": 0, "dur": 1000},
            {"cat": "cpu_op", "name": "record_param_comms", "tid": 1, "ts": 10, "dur": 5, "args": call},
            *(
                {
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "tid": 1,
                    "ts": 11,
                    "dur": 1,
                    "args": {"correlation": n},
                }
                for n in (1, 2)
            ),
            {
                "cat": "kernel",
                "name": "ncclDevKernel_AllGather_RING_LL",
                "tid": 20,
                "ts": 100 + late_us,
                "dur": 400 - late_us,
                "args": {"stream": 20, "correlation": 1, "External id": 7},
            },
            {"cat": "kernel", "name": "gemm", "tid": 7, "ts": 450, "dur": 100, "args": {"stream": 7, "correlation": 2}},
        ]
        header = {"distributedInfo": {"rank": rank, "world_size": 4, "backend": "nccl"}}
        content = {**header, "traceEvents": [{"ph": "X", "pid": 1, **event} for event in events]}
        (tmp_path / f"{rank}.json").write_text(json.dumps(content))
    found = communication_of(imported(tmp_path / "traces", *(tmp_path / f"{rank}.json" for rank in range(4))))
    assert found.steps == 1
    (one,) = found.groups
    assert (one.group, one.op, one.count, one.bytes, one.ranks) == ("tensor", "all_gather", 1, 200, 4)
    assert one.time_ns == (400_000 * 3 + 200_000) / 4
    assert one.exposed_ns == one.time_ns - 50_000
    assert one.last_ranks == {"3": (1, 1)}
    assert one.wait_ns == 200_000 / 4


def test_of_a_process_that_was_profiled_again_the_latest_profile_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``tensorboard_trace_handler`` writes them, zipped with their folder."""
    with ZipFile(tmp_path / "logs.zip", "w") as archive:
        for rank, time in ((0, 1000), (0, 900), (1, 1001), (1, 901)):
            content = json.loads((DATA / f"golden_nccl_worker{rank}.json").read_text())
            content |= {"distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": time * 10**15}
            archive.writestr(f"logs/node{rank}_{40 + rank}.{time}.pt.trace.json", json.dumps(content))
        archive.writestr("logs/events.out.tfevents.7", b"")
    trace = imported(tmp_path / "traces", tmp_path / "logs.zip")
    assert trace.ranks["host"].tolist() == ["node0", "node1"]
    assert trace.run["started_unix_ns"] == 10**18
    said = capsys.readouterr().err
    assert "2 earlier profiles" in said
    assert "begins 1,000,000 s after" in said  # of rank 1's, which is of another run then


def test_what_gloo_makes_of_an_all_reduce_is_called_what_it_is(tmp_path: Path) -> None:
    """Its annotations are on threads of its own, and those of a reduce-scatter say all-reduce."""
    events = [
        {"cat": "cpu_op", "name": f"c10d::{op}", "tid": 1, "ts": ts, "dur": 5}
        for op, ts in (("_reduce_scatter_base_", 10), ("allreduce_", 20), ("_allgather_base_", 30))
    ]
    events += [
        {"cat": "user_annotation", "name": f"gloo:{op}", "tid": tid, "ts": ts, "dur": dur}
        for op, tid, ts, dur in (("all_reduce", 2, 12, 20), ("all_reduce", 3, 22, 5), ("all_gather", 3, 33, 40))
    ]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [{"ph": "X", "pid": 1, **one} for one in events]}))
    spans = find_collective_spans(read_profile(tmp_path / "rank0.json"))
    times_us = ((spans["end_ns"] - spans["start_ns"]) // 1000).tolist()
    assert dict(zip(spans["op"], times_us, strict=True)) == {"reduce_scatter": 20, "all_reduce": 5, "all_gather": 40}
