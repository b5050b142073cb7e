"""Pages and files about the project name what is there: tests that hold a promise, scripts that workflows run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DECISIONS = sorted(path for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "index.md")
HELD_BY_TESTS = [ROOT / "SECURITY.md", *(ROOT / "docs" / name for name in ("promises.md", "support.md")), *DECISIONS]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
KINDS = [
    each["directory"] for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


def has_test(name: str) -> bool:
    """Whether a file or folder of the repository exists, and the test in it if one is named."""
    path, _, test = name.partition("::")
    return (ROOT / path).exists() and (not test or f"def {test}(" in (ROOT / path).read_text())


@pytest.mark.parametrize("page", HELD_BY_TESTS, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:tests|benchmarks|\.ci)/[^`\s]+)`", page.read_text())
    assert named
    assert [name for name in named if not has_test(name)] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_says_why_what_was_rejected_and_what_follows_and_is_listed(page: Path) -> None:
    assert re.findall(r"^\*\*(\w+)", page.read_text(), re.MULTILINE) == ["Why", "Rejected", "So", "Held"]
    title = page.read_text().partition("\n")[0].removeprefix("# ")
    assert f"[{title}]({page.name})" in (page.parent / "index.md").read_text()


@pytest.mark.parametrize("file", sorted((ROOT / "changes").iterdir()), ids=lambda file: file.name)
def test_what_changed_is_one_line_under_a_name_that_a_release_understands(file: Path) -> None:
    if file.name != "README.md":
        assert re.fullmatch(rf"\+[\w.-]+\.({'|'.join(KINDS)})\.md", file.name)
        assert len(file.read_text().splitlines()) == 1
        assert not file.read_text().startswith("- ")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.stem)
def test_a_workflow_runs_scripts_that_are_there_and_may_only_read(workflow: Path) -> None:
    described = yaml.safe_load(workflow.read_text())
    assert described["permissions"] == {"contents": "read"}
    scripts = re.findall(r"\.ci/\w+", workflow.read_text())
    assert scripts
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_forms_for_issues_ask_for_something() -> None:
    forms = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert forms
    for form in forms:
        described = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= described.keys()
        identifiers = [each["id"] for each in described["body"]]
        assert len(identifiers) == len(set(identifiers))
    assert json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())["postCreateCommand"]


def test_the_citation_is_of_this_version_or_of_the_released_one() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"## [{citation['version']}] - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text()
