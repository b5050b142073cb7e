"""Work that is shared out comes to the same, whoever does it, and also if one of them is killed meanwhile."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.workers import SerialWorkers, Workers, dask, processes
from tests.cli.command_line import overlapscope
from tests.synthetic import write_recording


def square(number: int) -> int:
    return number * number


def square_where_one_dies_once(given: tuple[int, str]) -> int:
    number, folder = given
    if number == 3:
        try:
            (Path(folder) / "has died").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return square(number)


def own_pid(_: int) -> int:
    return os.getpid()


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> int:
    raise ValueError(f"not {number}")


@contextmanager
def dask_cluster() -> Iterator[str]:
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1") as cluster:
        yield cluster.scheduler_address


@contextmanager
def dask_of_two() -> Iterator[Workers]:
    with dask_cluster() as address, dask(address) as workers:
        yield workers


@contextmanager
def here() -> Iterator[Workers]:
    yield SerialWorkers()


DASK = pytest.param(dask_of_two, marks=pytest.mark.slow)


@pytest.mark.parametrize("workers", [here, processes, DASK])
def test_each_argument_gets_its_result(workers) -> None:
    with workers() as pool:
        assert dict(pool.map(square, range(7))) == {place: place * place for place in range(7)}
        assert dict(pool.map(square, [5])) == {0: 25}
        assert dict(pool.map(square, [])) == {}


@pytest.mark.parametrize("workers", [here, processes, DASK])
def test_who_has_rested_goes_on(workers) -> None:
    with workers() as pool:
        for _ in range(2):
            assert dict(pool.map(square, [5])) == {0: 25}
            pool.rest()


def test_processes_that_rest_are_gone() -> None:
    with processes() as pool:
        ((_, pid),) = pool.map(own_pid, [0])
        os.kill(pid, 0)
        pool.rest()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("workers", [here, processes])
def test_what_a_call_raises_is_raised(workers) -> None:
    with workers() as pool, pytest.raises(ValueError, match="not 1"):
        list(pool.map(fail, [1]))


@pytest.mark.parametrize("workers", [processes, DASK])
def test_what_a_killed_worker_was_doing_is_done_by_another(workers, tmp_path: Path) -> None:
    with workers() as pool:
        found = dict(pool.map(square_where_one_dies_once, [(number, str(tmp_path)) for number in range(8)]))
    assert found == {place: place * place for place in range(8)}
    assert (tmp_path / "has died").exists()


def test_if_all_of_them_die_again_and_again_that_is_one_line() -> None:
    with processes() as pool, pytest.raises(OverlapScopeError, match=r"died 3 times: is there too little memory\?"):
        list(pool.map(die, [1, 2]))


def test_without_dask_one_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    ran = overlapscope("fleet", write_recording(tmp_path, steps=3), "--dask", "tcp://127.0.0.1:9")
    says = "overlapscope fleet: --dask needs Dask: pip install 'overlapscope[dask]'\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", says)


@pytest.mark.slow
def test_a_scheduler_that_is_not_there_is_one_line() -> None:
    at = "tcp://127.0.0.1:9"
    with pytest.raises(OverlapScopeError, match=f"--dask {at}: no scheduler answers there"), dask(at):
        pass


@pytest.mark.slow
def test_a_command_says_the_same_with_dask_as_without(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "traces", steps=12)
    with dask_cluster() as address:
        on_dask = overlapscope("summary", folder, "--dask", address)
        fleet = overlapscope("fleet", folder, "--json", "--dask", address)
    assert on_dask.stdout == overlapscope("summary", folder).stdout
    assert fleet.stdout == overlapscope("fleet", folder, "--json", "--no-cache").stdout
    gone = overlapscope("summary", folder, "--dask", address)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr.startswith(f"overlapscope summary: --dask {address}: no scheduler answers there")
