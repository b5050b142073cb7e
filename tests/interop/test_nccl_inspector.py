"""Dumps of NCCL's Inspector become a calibration, as ``overlapscope calibrate --inspector`` writes it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from overlapscope.bucket_model.calibration import read_calibration
from overlapscope.cli.main import main
from overlapscope.errors import OverlapScopeError
from overlapscope.interop.nccl_inspector import read_inspector_dumps

MB = 1_000_000


def line(rank: int, number: int, size: int, time_us: Any, *, ranks: int = 2, group: str = "0xab", **perf: Any) -> str:
    """As the plugin writes one (NCCL 2.28, output format v4.0)."""
    content = {
        "header": {"id": group, "rank": rank, "n_ranks": ranks, "nnodes": 2},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": 1_752_867_229_276_385,
            "hostname": f"node{rank}",
            "pid": 438_776,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": number,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": time_us,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": 1.0,
            "coll_busbw_gbs": 1.0,
        }
        | perf,
    }
    return json.dumps(content) + "\n"


def dumps(folder: Path, *files: list[str]) -> list[Path]:
    paths = [folder / f"node{number}.log" for number in range(len(files))]
    for path, lines in zip(paths, files, strict=True):
        path.write_text("".join(lines))
    return paths


def test_an_all_reduce_takes_as_long_as_on_the_rank_that_comes_last(tmp_path: Path) -> None:
    paths = dumps(
        tmp_path,
        [line(0, 0, MB, 900), line(0, 1, 4 * MB, 700), line(0, 2, MB, 210)],
        [line(1, 0, MB, 200), line(1, 1, 4 * MB, 800), line(1, 2, MB, 950)],
    )
    found, left_out = read_inspector_dumps(paths)
    assert [(each.bytes, each.times_ns) for each in found.samples] == [(MB, (200_000, 210_000)), (4 * MB, (700_000,))]
    assert (found.backend, found.hosts, left_out) == ("nccl", ("node0", "node1"), ())


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    of_one = [line(0, 0, MB, 100, ranks=1, group="0x1")]
    others = [line(0, 9, MB, 100, coll="Broadcast"), line(0, 1, MB, 5, coll_timing_source="collective_cpu")]
    paths = dumps(
        tmp_path,
        [*of_one, line(0, 0, MB, 100), *others, line(0, 3, MB, 100), line(0, 4, MB, 100)],
        [line(1, 0, MB, 200), line(1, 4, 2 * MB, 100), line(1, 5, MB, 7)[:40]],
    )
    found, left_out = read_inspector_dumps(paths)
    assert [(each.bytes, each.times_ns) for each in found.samples] == [(MB, (100_000,))]
    assert left_out == (
        "1 other communicator with fewer ranks or all-reduces",
        "2 all-reduces not in the dumps of all ranks, or not of one size",
        "1 all-reduce whose kernel was not timed",
        "1 damaged line",
    )


@pytest.mark.parametrize("time_us", ["nan", -5, "inf", None, "soon"])
def test_what_is_no_time_is_damaged_and_not_a_short_one(tmp_path: Path, time_us: Any) -> None:
    whole = [[line(rank, 0, MB, 100)] for rank in range(2)]
    paths = dumps(tmp_path, *([*lines, line(rank, 1, MB, time_us)] for rank, lines in enumerate(whole)))
    found, left_out = read_inspector_dumps(paths)
    assert [each.times_ns for each in found.samples] == [(100_000,)]
    assert left_out == ("2 damaged lines",)


def test_of_several_communicators_it_is_the_largest(tmp_path: Path) -> None:
    alone = [[line(rank, 0, MB, 50, ranks=4)] for rank in range(4)]
    pair = [[line(rank, 0, MB, 5, group="0x2")] for rank in range(2)]
    assert read_inspector_dumps(dumps(tmp_path, pair[0] + alone[0], pair[1] + alone[1], *alone[2:]))[0].world_size == 4


def test_compressed_dumps_are_read_also_if_they_are_cut_short(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.log.gz" for rank in range(2)]
    for rank, path in enumerate(paths):
        content = gzip.compress("".join(line(rank, number, MB + number, 100) for number in range(2000)).encode())
        path.write_bytes(content[: len(content) // (1 + rank)])
    (*samples,) = read_inspector_dumps(paths)[0].samples
    assert 100 < len(samples) < 2000


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([["{}\n"]], "{folder}/node0.log: not a dump of NCCL's Inspector"),
        ([["hello\n"]], "{folder}/node0.log: not a dump of NCCL's Inspector"),
        ([[]], "{folder}/node0.log: empty"),
        (
            [[line(0, 0, MB, 5)]] * 2,
            "{folder}/node1.log and {folder}/node0.log are both of rank 0 of communicator 0xab",
        ),
        ([[line(0, 0, MB, 5, coll="AllGather")]], "no all-reduce of several ranks is in these dumps"),
        (
            [[line(0, 0, MB, 5, coll_timing_source="collective_cpu")]],
            "no all-reduce of several ranks is in these dumps whose kernel was timed",
        ),
        (
            [[line(rank, 0, MB, 5, ranks=8)] for rank in range(3)],
            "dumps of 3 of 8 ranks were given; an all-reduce takes as long as on the rank that comes last, so give "
            "those of all",
        ),
        ([[line(rank, rank, MB, 5)] for rank in range(2)], "no all-reduce is in the dumps of all ranks"),
    ],
)
def test_what_can_not_be_used_is_one_line(tmp_path: Path, files: list[list[str]], said: str) -> None:
    with pytest.raises(OverlapScopeError) as raised:
        read_inspector_dumps(dumps(tmp_path, *files))
    assert str(raised.value) == said.format(folder=tmp_path)


def test_the_command_prints_a_table_and_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = dumps(tmp_path, [line(0, 0, 10 * MB, 2000)], [line(1, 0, 10 * MB, 1000)])
    output = tmp_path / "traces" / "calibration.json"
    assert main(["calibrate", "-o", str(output), "--inspector", *map(str, paths)]) == 0
    title, heading, row, done = capsys.readouterr().out.splitlines()
    assert title == "all-reduces of 2 ranks on 2 hosts, nccl, in a job that has run"
    assert heading.split() == ["size", "time", "algbw", "busbw", "times"]
    assert row.split() == ["9.54", "MB", "1.00", "ms", "10.000", "GB/s", "10.000", "GB/s", "1"]
    assert done == f"written to {output}"
    assert read_calibration(output).samples[0].times_ns == (1_000_000,)


def test_whoever_imports_one_is_told_what_it_is_good_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = dumps(tmp_path, [line(0, 0, MB, 5)])
    assert main(["import", str(path), "-o", str(tmp_path / "imported")]) == 1
    assert capsys.readouterr().err == (
        f"overlapscope import: {path}: a dump of NCCL's Inspector, in which there are no steps; 'overlapscope "
        "calibrate --inspector FILE ...' takes from such dumps how long all-reduces take\n"
    )
    assert not (tmp_path / "imported").exists()


def test_nothing_is_started_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--nproc", "2", "-o", str(tmp_path / "c.json"), "--inspector", "x.log"]) == 1
    said = "overlapscope calibrate: --inspector: what it reads was measured before; start no ranks as well\n"
    assert capsys.readouterr().err == said
