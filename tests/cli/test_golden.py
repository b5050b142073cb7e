"""What every command prints over one fixed recording, and its help, word by word: held by golden files."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overlapscope.cli.main import COMMANDS
from tests.cli.command_line import overlapscope
from tests.synthetic import write_straggling_recording

Golden = Callable[[str, str], None]

PROFILE = Path(__file__).parents[1] / "interop" / "data" / "resnet50_ddp_nccl_rank0of2.json.gz"
LAB = ("fault", "run", "figures", "synth", "cluster")


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks and 30 steps; rank 1's forward takes 2 ms longer than the others'."""
    folder = tmp_path_factory.mktemp("golden") / "traces"
    return write_straggling_recording(folder, late_us=lambda rank, _: 2_000 * (rank == 1), ranks=3)


@pytest.mark.parametrize("command", ["summary", "stragglers", "recommend", "diagnose"])
def test_a_command_reads_as_its_golden_file(folder: Path, command: str, golden: Golden) -> None:
    ran = overlapscope(command, folder)
    golden(f"cli/{command}", ran.stdout.replace(str(folder), "traces"))


def test_a_comparison_reads_as_its_golden_file(folder: Path, golden: Golden) -> None:
    ran = overlapscope("compare", folder, folder, "--base-steps", ":16", "--new-steps", "16:")
    golden("cli/compare", ran.stdout.replace(str(folder), "traces"))


def test_a_report_reads_as_its_golden_file(folder: Path, golden: Golden) -> None:
    ran = overlapscope("report", folder, "--format", "md")
    golden("cli/report", re.sub(r"made on .* by OverlapScope .*", "made NOW", ran.stdout))


def test_exports_are_announced_as_in_the_golden_file(folder: Path, tmp_path: Path, golden: Golden) -> None:
    said = []
    for form in ("perfetto", "chrome", "openmetrics", "csv", "parquet"):
        ran = overlapscope("export", folder, "-o", tmp_path / form, "--format", form)
        assert (ran.returncode, ran.stdout) == (0, "")
        said.append(ran.stderr.replace(f"{tmp_path}/", ""))
    golden("cli/export", "".join(said))


def test_an_import_reads_as_its_golden_file(tmp_path: Path, golden: Golden) -> None:
    ran = overlapscope("import", PROFILE, "-o", tmp_path / "traces")
    assert (ran.returncode, ran.stdout) == (0, "")
    golden("cli/import", ran.stderr.replace(f"{tmp_path}/", "").replace(str(PROFILE), PROFILE.name))


def test_the_lab_reads_as_its_golden_file(tmp_path: Path, golden: Golden) -> None:
    synth = ("synth", "--ranks", 2, "--steps", 1, "--buckets", 1, "-o", tmp_path / "planned")
    said = [overlapscope("lab", *arguments).stdout for arguments in (("faults",), ("experiments",), synth)]
    golden("cli/lab", "\n".join(said).replace(f"{tmp_path}/", ""))
    assert overlapscope("lab").stdout == overlapscope("lab", "--help").stdout


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse of Python 3.13 writes options otherwise")
@pytest.mark.parametrize("command", [*sorted(COMMANDS), *(f"lab {name}" for name in LAB)])
def test_the_help_of_a_command_reads_as_its_golden_file(command: str, golden: Golden) -> None:
    golden(f"help/{command.replace(' ', '_')}", overlapscope(*command.split(), "--help", COLUMNS="120").stdout)
