"""Help, the version, and what a command line is refused for."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

from overlapscope import __version__, cli
from overlapscope.cli.main import COMMANDS
from tests.cli.command_line import REPOSITORY, overlapscope, overlapscope_process

HEAVY = ("numpy", "pandas", "pyarrow", "torch", "bokeh", "panel", "rich")

VERBS = sorted(
    module.name
    for module in pkgutil.iter_modules(cli.__path__, f"{cli.__name__}.")
    if hasattr(importlib.import_module(module.name), "prepare_parser")
)
"""Whatever module can be a verb."""


def test_help_names_every_command_with_the_first_line_of_its_module() -> None:
    ran = overlapscope_process("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    shown = "".join(ran.stdout.split())  # lines are broken anywhere, also behind the hyphen of a word
    for verb in VERBS:
        title = (sys.modules[verb].__doc__ or "").splitlines()[0]
        assert verb.rpartition(".")[2].rstrip("_") + title.replace(" ", "") in shown
    assert "overlapscopedemo" in shown.rpartition("Startwith")[2]


def test_help_loads_nothing_heavy() -> None:
    """Whatever it takes to show a recording is loaded only when one is shown."""
    program = (
        "import sys\n"
        "from overlapscope.cli.main import main\n"
        f"for command in [[], *([name] for name in {[*COMMANDS]!r})]:\n"
        "    try:\n"
        "        main([*command, '--help'])\n"
        "    except SystemExit:\n"
        f"        print(command, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.stderr.splitlines() == [f"{command} []" for command in [[], *([name] for name in COMMANDS)]]


def test_the_version() -> None:
    assert overlapscope("--version").stdout == f"overlapscope {__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("fly",), ("summary",), ("record", "--detail", "all", "--", "python")])
def test_a_command_line_that_makes_no_sense_exits_with_2_and_usage(arguments: tuple[str, ...]) -> None:
    ran = overlapscope(*arguments)
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: overlapscope")


@pytest.mark.parametrize("arguments", [("summary", "traces", "--jsn"), ("serve", "--prot", "80", "traces")])
def test_an_unknown_option_is_answered_with_how_to_use_its_command(arguments: tuple[str, ...]) -> None:
    ran = overlapscope(*arguments)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"usage: overlapscope {arguments[0]} ")
    assert "unrecognized arguments: --" in ran.stderr
