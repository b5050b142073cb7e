"""The README's commands are the ones that are tested, and what all documents show can be typed."""

from __future__ import annotations

import json
import re
import tomllib

from tests.shown import PAGES, ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def shell_lines(text: str) -> list[str]:
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def test_ci_runs_the_readmes_test_command_word_for_word():
    (command,) = [line for line in shell_lines((ROOT / "README.md").read_text()) if "pytest" in line]
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_overlapscope_command_that_the_readme_shows_exists():
    from overlapscope.cli.main import COMMANDS

    text = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"overlapscope (\w+)", text))
    assert shown == set(COMMANDS)


def test_every_module_that_a_document_names_exists() -> None:
    modules = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[a-z]*/**/*.py")]
    named = {(page.name, name) for page in PAGES for name in re.findall(r"`([\w./-]+\.py)`", page.read_text())}
    assert {each for each in named if not any(path.endswith(f"/{each[1]}") for path in modules)} == set()


def test_the_container_runs_a_command_that_is_accepted():
    from overlapscope.cli.main import build_parser

    lines = (ROOT / "examples" / "Containerfile").read_text().splitlines()
    words = [
        word for line in lines if line.startswith(("ENTRYPOINT", "CMD")) for word in json.loads(line.split(" ", 1)[1])
    ]
    assert words[0] == "overlapscope"
    build_parser().parse_args(words[1:])
    text = "\n".join(lines)
    assert re.search(r"^ARG BASE=.*:\d+\.\d+\.\d+-\S+$", text, re.MULTILINE)
    assert re.search(r"^USER [1-9]\d*:", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*:5006/health'", text, re.MULTILINE)
