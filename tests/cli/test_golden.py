"""What every command prints over one fixed recording, and its help, word by word: held by golden files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from overlapscope.cli.main import COMMANDS
from tests.cli.command_line import overlapscope
from tests.synthetic import write_straggling_recording

Golden = Callable[[str, str], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks and 30 steps; rank 1's forward takes 2 ms longer than the others'."""
    folder = tmp_path_factory.mktemp("golden") / "traces"
    return write_straggling_recording(folder, late_us=lambda rank, _: 2_000 * (rank == 1), ranks=3)


@pytest.mark.parametrize("command", ["summary", "stragglers", "recommend", "diagnose"])
def test_a_command_reads_as_its_golden_file(folder: Path, command: str, golden: Golden) -> None:
    ran = overlapscope(command, folder, TZ="UTC")
    golden(f"cli/{command}", ran.stdout.replace(str(folder), "traces"))


def test_a_comparison_reads_as_its_golden_file(folder: Path, golden: Golden) -> None:
    ran = overlapscope("compare", folder, folder, "--base-steps", ":16", "--new-steps", "16:")
    golden("cli/compare", ran.stdout.replace(str(folder), "traces"))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_of_a_command_reads_as_its_golden_file(command: str, golden: Golden) -> None:
    golden(f"help/{command}", overlapscope(command, "--help", COLUMNS="120").stdout)
