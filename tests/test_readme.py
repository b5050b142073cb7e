"""The README's commands are the ones that are tested."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def shell_lines(text: str) -> list[str]:
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def test_ci_runs_the_readmes_test_command_word_for_word():
    (command,) = [line for line in shell_lines((ROOT / "README.md").read_text()) if "pytest" in line]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_overlapscope_command_that_the_readme_shows_exists():
    from overlapscope.cli import COMMANDS

    text = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"overlapscope (\w+)", text))
    assert shown == set(COMMANDS)
