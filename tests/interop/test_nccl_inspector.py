"""Dumps of NCCL's Inspector become a calibration, as ``overlapscope calibrate --inspector`` writes it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
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
    assert [what.split()[0] for what in left_out] == ["1", "2", "1", "1"]


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


UNUSABLE = (
    [["{}\n"]],
    [["hello\n"]],
    [[]],
    [[line(0, 0, MB, 5)]] * 2,
    [[line(0, 0, MB, 5, coll="AllGather")]],
    [[line(0, 0, MB, 5, coll_timing_source="collective_cpu")]],
    [[line(rank, 0, MB, 5, ranks=8)] for rank in range(3)],
    [[line(rank, rank, MB, 5)] for rank in range(2)],
)


def test_what_can_not_be_used_is_one_line(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    said = []
    for files in UNUSABLE:
        with pytest.raises(OverlapScopeError) as raised:
            read_inspector_dumps(dumps(tmp_path, *files))
        said.append(str(raised.value).replace(f"{tmp_path}/", ""))
    golden("refused/inspector", "\n".join(said))


def test_the_command_prints_a_table_and_writes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    paths = dumps(tmp_path, [line(0, 0, 10 * MB, 2000)], [line(1, 0, 10 * MB, 1000)])
    output = tmp_path / "traces" / "calibration.json"
    assert main(["calibrate", "-o", str(output), "--inspector", *map(str, paths)]) == 0
    golden("cli/calibrate", capsys.readouterr().out.replace(f"{tmp_path}/", ""))
    assert read_calibration(output).samples[0].times_ns == (1_000_000,)


def test_whoever_imports_one_is_told_what_it_is_good_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = dumps(tmp_path, [line(0, 0, MB, 5)])
    assert main(["import", str(path), "-o", str(tmp_path / "imported")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"overlapscope import: {path}: ")
    assert "'overlapscope calibrate --inspector FILE ...'" in said
    assert not (tmp_path / "imported").exists()
