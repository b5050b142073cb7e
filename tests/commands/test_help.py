"""Help, the version, and what a command line is refused for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from overlapscope import __version__
from tests.commands.command_line import REPOSITORY, overlapscope

HEAVY = ("torch", "pandas", "pyarrow", "panel", "bokeh", "rich")


def test_help_names_every_command_with_a_line() -> None:
    ran = overlapscope("--help")
    assert ran.returncode == 0
    for command in ("calibrate", "demo", "diagnose", "lab", "record", "serve", "stragglers", "summary"):
        assert f"    {command}" in [line.rstrip()[: 4 + len(command)] for line in ran.stdout.splitlines()]
    assert "overlapscope demo" in ran.stdout.splitlines()[-2] + ran.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "command", ["calibrate", "demo", "diagnose", "lab", "record", "serve", "stragglers", "summary"]
)
def test_help_of_a_command_is_the_docstring_of_its_module(command: str) -> None:
    ran = overlapscope(command, "--help")
    assert ran.returncode == 0
    source = (REPOSITORY / "overlapscope" / "commands" / f"{command}.py").read_text()
    assert source.startswith(f'"""{ran.stdout.split(chr(10) * 2)[1].splitlines()[0]}')


def test_help_loads_nothing_heavy() -> None:
    """Whatever it takes to show a recording is loaded only when one is shown."""
    program = (
        "import sys\n"
        "from overlapscope.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.stderr == "[]\n"


def test_the_version() -> None:
    assert overlapscope("--version").stdout == f"overlapscope {__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("fly",), ("summary",), ("record", "--detail", "all", "--", "python")])
def test_a_command_line_that_makes_no_sense_exits_with_2_and_usage(arguments: tuple[str, ...]) -> None:
    ran = overlapscope(*arguments)
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: overlapscope")


@pytest.mark.parametrize("command", ["summary", "stragglers", "serve"])
def test_a_folder_that_is_not_there_is_one_line_and_exit_code_1(tmp_path: Path, command: str) -> None:
    ran = overlapscope(command, tmp_path / "nowhere")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr == (
        f"overlapscope {command}: {tmp_path}/nowhere: no such folder; "
        f"record one with 'overlapscope record -o {tmp_path}/nowhere -- torchrun ...'\n"
    )
