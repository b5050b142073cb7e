"""Completion scripts, as the shells that read them understand them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.command_line import overlapscope

ASK = """
source {script}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_overlapscope
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (("overlapscope", "st"), ["stragglers"]),
        (("overlapscope", "lab", "cl"), ["cluster"]),
        (("overlapscope", "record", "--on-incident", "r"), ["raise", "report"]),
        (("overlapscope", "summary", "--j"), ["--json"]),
        (("overlapscope", "serve", "my-tr"), ["my-traces"]),
    ],
)
def test_bash_completes_commands_options_their_values_and_paths(
    tmp_path: Path, line: tuple[str, ...], offered: list[str]
) -> None:
    printed = overlapscope("--print-completion", "bash")
    assert (printed.returncode, printed.stderr) == (0, "")
    script = tmp_path / "completion"
    script.write_text(printed.stdout)
    (tmp_path / "my-traces").mkdir()
    asked = ["bash", "-c", ASK.format(script=script), "bash", *line]
    ran = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ran.stderr == ""
    assert sorted(ran.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_are_told_of_every_command(shell: str) -> None:
    from overlapscope.cli.main import COMMANDS

    printed = overlapscope("--print-completion", shell)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert [name for name in COMMANDS if name not in printed.stdout] == []
