"""Reports of Nsight Systems become the recordings that a trace of torch.profiler of the same steps becomes."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from overlapscope.interop.nsight import read_report
from overlapscope.trace.communication import read_imported_communication
from overlapscope.trace.recording import Trace, read_trace
from tests.cli.command_line import overlapscope
from tests.interop.nsight_report import Report, export

DATA = Path(__file__).parent / "data"
RESNET = DATA / "resnet50_ddp_nccl_rank0of2.json.gz"
RANGES_ONLY = DATA / "nsight_2022_4_nvtx_rank0.sqlite"
"""Made by Nsight Systems 2022.4.2 of a process that pushes the ranges of three steps, without a device."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(RESNET, tmp_path_factory.mktemp("report") / "rank0.sqlite")


def imported(folder: Path, *files: Path) -> Trace:
    ran = overlapscope("import", *files, "-o", folder)
    assert ran.returncode == 0, ran.stderr
    return read_trace(folder)


@pytest.fixture(scope="module")
def both(report: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    folder = tmp_path_factory.mktemp("imported")
    return imported(folder / "nsight", report), imported(folder / "kineto", RESNET)


@pytest.mark.parametrize("table", ["steps", "phases", "copies"])
def test_steps_are_those_of_torch_profiler(both: tuple[Trace, Trace], table: str) -> None:
    nsight, kineto = (getattr(trace, table) for trace in both)
    assert len(nsight) > 2
    pd.testing.assert_frame_equal(nsight, kineto)


def test_collectives_are_those_of_torch_profiler(both: tuple[Trace, Trace]) -> None:
    nsight, kineto = (trace.collectives for trace in both)
    names = ["step", "bucket", "op", "elements", "ready_ns", "start_ns", "end_ns"]
    pd.testing.assert_frame_equal(nsight[names], kineto[names])
    # Ours are launched when torch.distributed is called, which takes a while until it says what it was called with.
    earlier_ns = kineto["launch_ns"] - nsight["launch_ns"]
    assert earlier_ns.between(0, 300_000).all()


def test_the_element_type_is_known_of_gradients_only(both: tuple[Trace, Trace]) -> None:
    """NCCL says bytes, and PyTorch elements: of eight bytes each they may be whole numbers, but no gradient is one."""
    nsight, kineto = (trace.collectives for trace in both)
    of_bucket = nsight["bucket"] >= 0
    names = ["dtype", "bytes"]
    pd.testing.assert_frame_equal(nsight.loc[of_bucket, names], kineto.loc[of_bucket, names])
    assert set(kineto.loc[~of_bucket, "dtype"]) == {"float32", "int64"}
    assert set(nsight.loc[~of_bucket, "dtype"]) == {"unknown"}


def test_where_it_comes_from_is_said(both: tuple[Trace, Trace]) -> None:
    nsight, kineto = both
    assert nsight.run["imported"]["from"] == "Nsight Systems"
    assert nsight.run["started_unix_ns"] == kineto.run["started_unix_ns"]
    assert nsight.ranks.loc[0, ["host", "device"]].tolist() == ["node7", "NVIDIA A100"]


def test_communication_of_kernels_is_that_of_torch_profiler(report: Path, tmp_path: Path) -> None:
    first_lines = {
        overlapscope("import", file, "-o", tmp_path / file.stem).stderr.splitlines()[0].partition(f"{file}: ")[2]
        for file in (report, RESNET)
    }
    assert len(first_lines) == 1


def test_sizes_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    file = export(RESNET, tmp_path / "rank0.sqlite", has_sizes=False)
    ran = overlapscope("import", file, "-o", tmp_path / "traces")
    assert "record_shapes=True" in ran.stderr
    assert set(read_trace(tmp_path / "traces").collectives["bytes"]) == {0}


def test_processes_of_one_report_are_told_by_their_devices(tmp_path: Path, report: Path) -> None:
    second = export(RESNET, tmp_path / "other.sqlite", process=4712, device=1)
    together = tmp_path / "node.sqlite"
    shutil.copy(report, together)
    with closing(sqlite3.connect(together)) as database:
        database.execute("ATTACH ? AS other", (str(second),))
        database.execute("UPDATE other.StringIds SET id = id + 100000")
        for table, ids in (
            ("StringIds", ()),
            ("TARGET_INFO_GPU", ()),
            ("NVTX_EVENTS", ("textId",)),
            ("CUPTI_ACTIVITY_KIND_RUNTIME", ("nameId",)),
            ("CUPTI_ACTIVITY_KIND_KERNEL", ("demangledName", "shortName")),
            ("CUPTI_ACTIVITY_KIND_MEMCPY", ()),
            ("CUPTI_ACTIVITY_KIND_MEMSET", ()),
        ):
            for name in ids:
                database.execute(f"UPDATE other.{table} SET {name} = {name} + 100000")
            database.execute(f"INSERT INTO main.{table} SELECT * FROM other.{table}")
        database.commit()
    trace = imported(tmp_path / "traces", together)
    assert trace.ranks["rank"].tolist() == [0, 1]
    for name in ("steps", "phases", "collectives"):
        first, other = (getattr(trace, name).query(f"rank == {rank}").reset_index(drop=True) for rank in (0, 1))
        pd.testing.assert_frame_equal(first.drop(columns="rank"), other.drop(columns="rank"))


def test_what_was_lost_is_said(tmp_path: Path, report: Path) -> None:
    shutil.copy(report, tmp_path / "rank0.sqlite")
    with closing(sqlite3.connect(tmp_path / "rank0.sqlite")) as database:
        for text in ("Not all CUDA events were collected: 12 lost.", "Number of NVTX events: 4,000."):
            database.execute("INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 2, 0, ?)", (text,))
        database.commit()
    ran = overlapscope("import", tmp_path / "rank0.sqlite", "-o", tmp_path / "traces")
    assert "Not all CUDA events were collected: 12 lost." in ran.stderr
    assert "Number of NVTX events" not in ran.stderr


def test_a_report_that_nsight_systems_itself_has_written_is_read(tmp_path: Path) -> None:
    (profile,) = read_report(RANGES_ONLY)
    assert profile.spans["kind"].value_counts().to_dict() == {
        "step": 3, "forward": 3, "autograd": 12, "copy_in": 12, "copy_out": 12, "optimizer": 3
    }  # fmt: skip
    trace = imported(tmp_path / "traces", RANGES_ONLY)
    assert trace.steps["step"].tolist() == [4, 5, 6]
    assert trace.ranks["device"].tolist() == ["cpu"]


UNREADABLE = (
    ("rank0.nsys-rep", b"report"),
    ("rank0.sqlite", b"SQLite format 3\x00" + bytes(200)),
    ("rank0.sqlite", b"SQLite format 3\x00"),
)
INCOMPLETE = ((), ("DistributedDataParallel.forward, op_id = 1",))
"""Ranges of reports in which all, or the steps of an optimizer are missing."""


def test_what_can_not_be_read_is_told_in_one_line(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    said = []
    for name, content in UNREADABLE:
        (tmp_path / name).write_bytes(content)
        said.append(refusal(tmp_path, tmp_path / name))
    for case, ranges in enumerate(INCOMPLETE):
        with Report(tmp_path / f"rank{case}.sqlite3") as report:
            for number, name in enumerate(ranges):
                report.range(name, 1 << 24, (10 * number, 10 * number + 5))
        said.append(refusal(tmp_path, tmp_path / f"rank{case}.sqlite3"))
    golden("refused/import_nsight", "".join(said))


def refusal(folder: Path, file: Path) -> str:
    """Return what the import of a file says, which is one line and leaves no folder."""
    ran = overlapscope("import", file, "-o", folder / "traces")
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert not (folder / "traces").exists()
    return ran.stderr.replace(f"{folder}/", "")


def test_a_report_without_ddp_gives_its_communication(tmp_path: Path, report: Path) -> None:
    shutil.copy(report, tmp_path / "rank0.sqlite")
    with closing(sqlite3.connect(tmp_path / "rank0.sqlite")) as database:
        for column in ("text", "(SELECT value FROM StringIds WHERE id = textId)"):
            database.execute(f"DELETE FROM NVTX_EVENTS WHERE {column} LIKE 'DistributedDataParallel.forward%'")
        database.commit()
    ran = overlapscope("import", tmp_path / "rank0.sqlite", "-o", tmp_path / "traces")
    assert ran.returncode == 0
    assert "nsys profile" not in ran.stderr  # the report has what that option adds
    found = read_imported_communication(read_trace(tmp_path / "traces").run)
    assert found is not None
    assert found.steps == 3
    assert {one.op: one.count for one in found.groups} == {"all_reduce": 15, "broadcast": 6}


def test_a_database_of_something_else_is_told(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "rank0.sqlite")) as database:
        database.execute("CREATE TABLE NVTX_EVENTS (start TEXT)")
        database.commit()
    assert "rank0.sqlite" in refusal(tmp_path, tmp_path / "rank0.sqlite")
