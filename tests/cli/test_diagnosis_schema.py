"""Every diagnosis is valid by the JSON Schema that is printed for it, and its codes stay what they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from overlapscope.cli.main import main
from overlapscope.diagnosis.attempts import Attempt
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.kinds import KINDS
from overlapscope.diagnosis.verdict import FaultKind
from overlapscope.errors import Problem
from overlapscope.report.diagnosis import build_diagnosis_report
from overlapscope.report.diagnosis_json import build_schema
from overlapscope.report.render_json import render_json
from tests.cli.test_json import DOCUMENT, documented
from tests.diagnosis.jobs import job, rank
from tests.diagnosis.test_verdict_texts import CASES

HEADING = "`overlapscope diagnose`"


@pytest.fixture(scope="module")
def validator() -> Any:
    """A validator of the schema. Its library takes seconds to import, which every worker would do to collect tests."""
    from jsonschema import Draft202012Validator

    return Draft202012Validator(build_schema())


def content_of(evidence: Any) -> dict[str, Any]:
    """What ``diagnose --json`` prints of a job."""
    problems = (Problem("note", "rank 1: a log was never closed"),)
    shown = Attempt(path=Path("traces"), evidence=evidence, verdict=judge(evidence), problems=problems)
    content: dict[str, Any] = json.loads(render_json(build_diagnosis_report(shown, (shown, shown))))
    return content


@pytest.mark.parametrize("kind", get_args(FaultKind))
def test_every_verdict_is_valid_by_the_schema(validator: Any, kind: FaultKind) -> None:
    for case in CASES[kind]:
        content = content_of(case.evidence)
        validator.validate(content)
        verdict = content["verdict"]
        assert (verdict["code"], verdict["restart"]) == KINDS[kind][:2], case.what
        assert set(content) == set(documented(HEADING, 0))
        assert set(verdict) == set(documented(HEADING, 1))


@pytest.mark.parametrize(
    "changed", [{"schema": 2}, {"verdict": {}}, {"ranks": [{"rank": "one"}]}, {"groups": None}], ids=str
)
def test_what_breaks_the_schema_is_refused(validator: Any, changed: dict[str, Any]) -> None:
    content = content_of(CASES["killed"][0].evidence)
    assert validator.is_valid(content)
    assert not validator.is_valid(content | changed)


def test_a_verdict_names_the_hosts_of_the_ranks_that_it_names() -> None:
    hosts = {0: "alpha", 1: "beta", 2: "gamma"}
    evidence = next(case.evidence for case in CASES["killed"] if judge(case.evidence).blamed == (1,))
    evidence = replace(evidence, ranks={n: replace(one, host=hosts[n]) for n, one in evidence.ranks.items()})
    verdict = content_of(evidence)["verdict"]
    assert (verdict["hosts"], verdict["may_be_host"]) == (["beta"], True)
    healthy = content_of(job(rank(0, "ended", host="alpha"), rank(1, "ended", host="beta")))["verdict"]
    assert (healthy["hosts"], healthy["may_be_host"]) == ([], False)


def test_codes_are_those_that_were_published() -> None:
    """A code that was printed once means the same for ever: programs of others rest on it."""
    assert set(KINDS) == set(get_args(FaultKind))
    assert len({handling.code for handling in KINDS.values()}) == len(KINDS)
    rows = re.findall(r"^\| `([\w-]+)` \| `([\w-]+)` \| (yes)? ?\|$", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(code, restart, "yes" if may_be_host else "") for code, restart, may_be_host in KINDS.values()]


def test_the_schema_is_printed(
    capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None], validator: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", "--print-schema"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    validator.check_schema(json.loads(printed))
    golden("cli/diagnose_schema", printed)
