"""Every benchmark runs to its end, at a tiny size: its figures mean nothing here, but they can be had.

Those that take more than some seconds do so at night only; in CI they parse their arguments. For them all processes may
be forked from a server that has imported torch already.
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.browser.chromium import CHROMIUM
from tests.cluster.warm_process import WarmProcess
from tests.gpu.device import needs_a_device

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 300

STARTED_BY_OTHERS = {
    *("auto_training", "device_training", "healthy_training", "recorded_training", "swept_training", "timed_training"),
    *("sharded_training", "tuned_training"),
}
SWEPT = {
    "bucket_sweep": "FOLDER --model tiny --link loopback --caps 0.2 0.5 1 --rounds 2 --seconds 1 --calibrate-mb 1",
    "bucket_advice": "FOLDER --searches 1",
    "bucket_page": "FOLDER/traces/probe --moves 3",
}
"""One after the other: a sweep, and what is made of it."""
AT_NIGHT = {
    "device_step_time": "--device cpu --models tiny --seconds 0 --steps 2 --ways ours-recorded",
    "collective_ends": "--steps 2",
    "compare": "FOLDER --pairs 1 --steps 25 --link loopback",
    "step_time": "--models tiny --rounds 1 --steps 3 --threads",
    "drift": "--models tiny --steps 10 --healthy-steps 6 --loops with_own_buffers --faults other-weights",
    "clock_recovery": "--runs 1 --seconds 2",
    "coherence": "--recordings 6 --workers 2",
    "all_reduces": "--link loopback --mb 0.1 --repetitions 1",
    "app": "--sizes 2x20 --users 2 --moves 1",
    "auto_buckets": "--model tiny --link loopback --rounds 1",
    "chaos": "--seed 284 --folder FOLDER",
    "damage": "FOLDER --faults uneven-data --cases 4",
    "fleet": "--runs 9 --ranks 8 --steps 20 --folder FOLDER",
    "healthy_recordings": "FOLDER --recordings 1 --steps 6 --busy 1",
    "injected_faults": "FOLDER none slow_data --steps 25",
    "intervals": "--recordings 4 --steps 12 --jobs 1",
    "live_app": "--hours 0.01 --seconds 2 --seed 1",
    "sharded_advice": "--models tiny --ranks 2 --link loopback --rounds 1 --steps 2",
    "sharded_overhead": "--model tiny --link loopback --rounds 1 --steps 2",
    "scale": "--ranks 4 --steps 40 --buckets 3 --dask",
    "prediction_honesty": "FOLDER --models tiny --links loopback --rounds 1 --seconds 1",
    "recorder": "--rounds 1 --steps 3",
    "thousand_ranks": "--ranks 16 --steps 30 --times 1 --seconds 0.1",
    "tune": "FOLDER --models tiny --link loopback --steps 20 --rounds 1 --seconds 1",
    "tuning_power": "--tunings 2 --steps 30",
    "fleet_chance": "--fleets 2 --with-cause 1",
    "import_traces": "--mb 1 --ranks 3",
    "links": "--samples 1",
    "plan_search": "--plans 10 --parameters 20 --cycles 2 --ranks 2",
    "rounds": "--turns 1",
    "timeline": "--spans 2000 --ranks 2 --seconds 0.2",
}
IN_CI = {
    "collective_hooks": "--rounds 1 --collectives 20",
    "collective_log": "--pairs 1",
    "diagnose": "--ranks 4 --collectives 2000",
    "false_alarms": "--recordings 2 --ranks 2 --steps 30 --delay 0.1",
    "fault_table": "--ranks 2 failed-rank",
    "watchdog": "--models tiny --pairs 1 --starts 1 --block-s 0.1 --warm-up-s 0.1",
}
IN_BROWSER = {"app", "bucket_page", "live_app", "thousand_ranks", "timeline"}


def run(name: str, arguments: str, folder: Path) -> str:
    """What a benchmark has printed."""
    if name in IN_BROWSER and not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    command = ["-m", f"benchmarks.{name}", *arguments.replace("FOLDER", str(folder)).split()]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "BENCHMARKS_PATIENCE_S": "0",
        "BENCHMARKS_START": "forkserver",
    }
    with tempfile.TemporaryFile() as output:
        benchmark = WarmProcess(command, environment, output, folder=ROOT, leads_group=True)
        try:
            with suppress(TimeoutError):  # and say what it has printed by then
                benchmark.wait(TIME_LIMIT_S)
            code = benchmark.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(benchmark.pid, signal.SIGKILL)  # which also ends what it has started
        output.seek(0)
        printed = output.read().decode()
    assert code == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CI)
def test_it_runs(name: str, tmp_path: Path) -> None:
    assert run(name, IN_CI[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("device_step_time", marks=needs_a_device)])
def test_it_runs_on_a_device(name: str, tmp_path: Path) -> None:
    assert run(name, "--models tiny gpt2-small --seconds 0 --steps 2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*AT_NIGHT, *SWEPT])
def test_it_says_what_it_measures(name: str, tmp_path: Path) -> None:
    assert run(name, "--help", tmp_path).startswith("usage:")


@pytest.mark.nightly
@pytest.mark.parametrize("name", AT_NIGHT)
def test_it_runs_at_night(name: str, tmp_path: Path) -> None:
    assert run(name, AT_NIGHT[name], tmp_path)


@pytest.mark.nightly
def test_what_is_swept_can_be_judged_and_shown(tmp_path: Path) -> None:
    for name, arguments in SWEPT.items():
        assert run(name, arguments, tmp_path)


def test_none_is_left_out() -> None:
    benchmarks = ROOT / "benchmarks"
    modules = {path.stem for path in benchmarks.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    programs = modules | {path.parent.name for path in benchmarks.glob("*/__main__.py")}
    assert programs == IN_CI.keys() | AT_NIGHT.keys() | SWEPT.keys() | STARTED_BY_OTHERS
