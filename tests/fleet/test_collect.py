"""Runs of a fleet: found, read once, kept in the user's cache and nowhere else, and never lost in silence."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dashboards.runs import summarize_run
from overlapscope.errors import OverlapScopeError
from overlapscope.fleet import collect
from overlapscope.fleet.collect import drop_copies, find_locations, read_runs
from overlapscope.fleet.fleet_run import FleetRun, read_run
from overlapscope.fleet.result_cache import find_cache_folder
from overlapscope.lab.synth import SyntheticRun, write_recording
from overlapscope.trace.folders import resolve_recording_path
from overlapscope.trace.json_files import from_json, to_json
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import TABLES_FOLDER
from overlapscope.workers import SerialWorkers
from tests.synthetic import write_recording as write_small

DUMPS = Path(__file__).parents[1] / "data" / "flight_recorder" / "hang_3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with a late rank on the second of two hosts."""
    folder = tmp_path_factory.mktemp("fleet")
    run = SyntheticRun(slow_rank=9, hosts=("left", "right"), model="Net", seed=1)
    write_recording(folder / "late", 16, 80, 3, run=run)
    return folder


def read(*places: Path, cache: Path | None = None) -> dict[str, FleetRun]:
    return {run.name: run for run in read_runs(find_locations(places).runs, SerialWorkers(), cache)}


def test_of_a_run_it_is_kept_who_was_late_where_and_the_figures_of_the_table_of_runs(folder: Path) -> None:
    run = read(folder)["late"]
    assert (run.hosts[8:10], run.devices[9], run.world_size) == (("right", "right"), "cuda:1", 16)
    assert run.model.startswith("Net, ")
    assert run.late_ranks == {9}
    assert len(run.compared) == 16
    assert run.figures is not None
    shown = summarize_run(folder / "late")
    assert vars(run.figures).items() <= vars(shown).items()
    assert run.figures.step_ns is not None
    assert from_json(FleetRun, to_json(run)) == run


def test_reading_leaves_nothing_beside_the_recording_and_private_files_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copied = shutil.copytree(folder / "late", tmp_path / "runs" / "late", ignore=shutil.ignore_patterns(TABLES_FOLDER))
    before = sorted(copied.rglob("*"))
    read(copied, cache=find_cache_folder())
    assert sorted(copied.rglob("*")) == before
    (kept,) = (tmp_path / "overlapscope" / "fleet").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def test_what_is_known_is_not_read_again_until_it_changes_or_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = write_small(tmp_path / "run", steps=9), tmp_path / "cache"
    times = []

    def counted(name: str, path: Path) -> FleetRun:
        times.append(name)
        return read_run(name, path)

    monkeypatch.setattr(collect, "read_run", counted)
    first = read(folder, cache=cache)
    assert read(folder, cache=cache) == first
    assert len(times) == 1
    (kept,) = cache.iterdir()
    for damaged in (b"", b"[]", b"{}", kept.read_bytes()[:-9], kept.read_bytes().replace(b'"read"', b'"raed"')):
        kept.write_bytes(damaged)
        assert read(folder, cache=cache) == first
    assert len(times) == 6
    shutil.rmtree(folder / "rank_1")
    assert read(folder, cache=cache) != first
    assert len(times) == 7


def test_dumps_live_runs_and_what_can_not_be_read_are_told_apart(tmp_path: Path) -> None:
    shutil.copytree(DUMPS, tmp_path / "dumps")
    (tmp_path / "broken" / "rank_0").mkdir(parents=True)
    job = write_small(tmp_path / "job", steps=3)
    write_small(job / "restart_1", steps=9)
    runs = read(tmp_path)
    assert {name: run.state for name, run in runs.items()} == {"dumps": "read", "broken": "unreadable", "job": "read"}
    assert runs["broken"].reason
    assert runs["dumps"].figures is not None
    assert runs["dumps"].figures.is_fault
    assert runs["job"].figures is not None
    assert runs["job"].figures.steps == 9  # of the latest attempt


def test_copies_of_a_run_count_once(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(folder / "late", tmp_path / name)
    runs, copies = drop_copies([*read(tmp_path, folder).values()])
    assert (len(runs), copies) == (1, 2)


def test_a_run_whose_reader_dies_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    class DyingWorkers(SerialWorkers):
        def map(self, function: Callable[[Any], Any], arguments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
            yield 0, function(arguments[0])
            raise OverlapScopeError("a process died")

    for name in ("first", "second"):
        write_small(tmp_path / name, steps=3)
    first, second = read_runs(find_locations([tmp_path]).runs, DyingWorkers(), None)
    assert (first.state, second.state) == ("read", "unreadable")
    assert "memory" in second.reason


@pytest.mark.parametrize("place", ["nowhere", "empty", "file"])
def test_where_there_is_no_run_it_is_said(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OverlapScopeError, match=place):
        find_locations([tmp_path / place])


def test_runs_below_a_url_are_those_with_tables(tmp_path: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    for name in ("one", "two", "two/restart_1"):
        folder = write_small(tmp_path / name, steps=9)
        read_trace(folder)
        filesystem.put(f"{folder / TABLES_FOLDER}/", f"/fleet/{name}/{TABLES_FOLDER}/", recursive=True)
    try:
        runs = read(resolve_recording_path("memory://fleet"))
        assert sorted(Path(run.path).name for run in runs.values()) == ["one", "restart_1"]
        assert {run.state for run in runs.values()} == {"read"}
        assert json.dumps([run.code for run in runs.values()]) == '["", ""]'
    finally:
        filesystem.rm("/fleet", recursive=True)
