"""The allow list: of what a field holds, nothing is left that is not public, and every written field is known."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from overlapscope.bucket_model.calibration import Calibration
from overlapscope.diagnosis.evidence import (
    CaughtError,
    CreatedGroup,
    InterruptedBackward,
    NonFiniteGradients,
    UnreducedStep,
)
from overlapscope.diagnosis.loop_facts import LoopFacts
from overlapscope.diagnosis.replica_drift import OptimizerHyperparameters
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.collective_log import Signature
from overlapscope.trace.confidential import policy
from overlapscope.trace.confidential.policy import RULES, hide_content
from overlapscope.trace.confidential.pseudonyms import Pseudonyms
from overlapscope.trace.early_ends import EARLY_END_PATTERN, EarlyEnd
from overlapscope.trace.process_files import EXITS_PATTERN, ProcessExit, StallSnapshot
from overlapscope.trace.recording_modes import BegunMode
from overlapscope.trace.schema import (
    CALIBRATION_FILE,
    CAUGHT_ERRORS_PATTERN,
    CREATED_GROUPS_FILE,
    ENDED_FILE,
    HYPERPARAMETERS_FILE,
    INTERRUPTED_BACKWARDS_FILE,
    JOB_FILE,
    LOOP_FACTS_FILE,
    MODES_FILE,
    NON_FINITE_FILE,
    RANK_FILES,
    REPORTS_FILE,
    SEGMENTS_FILE,
    SIGNATURES_FILE,
    STALL_FILE,
    UNREDUCED_FILE,
    Segment,
)

WRITTEN_AS: dict[str, Any] = {
    CALIBRATION_FILE: Calibration,
    CAUGHT_ERRORS_PATTERN: CaughtError,
    CREATED_GROUPS_FILE: CreatedGroup,
    EARLY_END_PATTERN: EarlyEnd,
    EXITS_PATTERN: ProcessExit,
    HYPERPARAMETERS_FILE: OptimizerHyperparameters,
    INTERRUPTED_BACKWARDS_FILE: InterruptedBackward,
    LOOP_FACTS_FILE: LoopFacts,
    MODES_FILE: BegunMode,
    NON_FINITE_FILE: NonFiniteGradients,
    SEGMENTS_FILE: Segment,
    SIGNATURES_FILE: Signature,
    STALL_FILE: StallSnapshot,
    UNREDUCED_FILE: UnreducedStep,
}
"""Dataclass of each file that is written from one."""


def fill(hint: Any, secrets: Iterator[str]) -> Any:
    """A value of this type, with a secret for each text in it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return {field.name: fill(hints[field.name], secrets) for field in fields(hint)}
    if origin in (typing.Union, types.UnionType):
        return fill(arguments[0], secrets)
    if origin is tuple:
        return [fill(one, secrets) for one in arguments if one is not Ellipsis]
    if origin is dict:
        frame = {"file": next(secrets), "line": 7, "function": next(secrets)}
        return frame if arguments[1] is Any else {str(fill(arguments[0], secrets)): fill(arguments[1], secrets)}
    return {int: 7, float: 0.5, bool: True}.get(hint) or next(secrets)


@pytest.mark.parametrize("name", WRITTEN_AS)
def test_every_field_is_known_and_no_text_of_any_is_left(name: str) -> None:
    """Also texts that are one of a few words: another word is no such word."""
    secrets = [f"Geheim{letter}{other}" for letter, other in itertools.product("abcdefghij", repeat=2)]
    content = fill(WRITTEN_AS[name], iter(secrets))
    pseudonyms = Pseudonyms(b"key")
    hidden = hide_content(pseudonyms, name, content)
    assert pseudonyms.unknown == set()
    assert hidden.keys() == content.keys()
    assert "Geheim" not in json.dumps(hidden)


def test_a_report_of_a_watchdog_keeps_what_it_is_about_and_none_of_its_sentences() -> None:
    verdict = fill(Verdict, (f"Geheim{number}" for number in itertools.count()))
    verdict |= {"kind": "stuck", "certainty": "likely", "blamed": [3], "step": 12}
    report = {"report": 1, "time_ns": 5, "step": 12, "rank": 0, "pid": 9, "process_state": "S", "verdict": verdict}
    pseudonyms = Pseudonyms(b"key")
    hidden = hide_content(pseudonyms, REPORTS_FILE, report | {"message": "Geheim", "retracted_ns": None})
    assert pseudonyms.unknown == set()
    assert "Geheim" not in json.dumps(hidden)
    kept = hidden["verdict"]
    assert (kept["kind"], kept["blamed"], kept["step"], bool(kept["alternative"])) == ("stuck", [3], 12, True)
    assert "ank 3" in hidden["message"]
    assert "step 12" in hidden["message"]


def test_a_field_that_nobody_has_thought_about_is_left_out_and_named() -> None:
    pseudonyms = Pseudonyms(b"key")
    assert hide_content(pseudonyms, SEGMENTS_FILE, {"segment": 1, "owner": "me"}) == {"segment": 1}
    assert pseudonyms.unknown == {f"{SEGMENTS_FILE}: owner"}


def test_what_has_another_type_than_it_should_is_no_way_around_the_list() -> None:
    content = {"bytes": "Geheim", "op": {"Geheim": 1}, "names": "Geheim"}
    hidden = hide_content(Pseudonyms(b"key"), SIGNATURES_FILE, content)
    assert hidden == {"bytes": None, "op": None, "names": None}


ODD = (None, True, -1, 0.5, "\ud800", [], [None], [[7]], {"\ud800": "x"})


def test_what_has_another_type_than_it_should_raises_nothing() -> None:
    keys = re.findall(r'"(\w+)"', inspect.getsource(policy))
    for odd in ODD:
        inner = dict.fromkeys(keys, odd)
        for value, name in itertools.product((odd, [odd], inner, [inner]), RULES):
            json.dumps(hide_content(Pseudonyms(b"key"), name, dict.fromkeys(keys, value)))


def test_every_json_file_of_a_rank_has_a_rule() -> None:
    of_json = {kind.name for kind in RANK_FILES if kind.name.endswith((".json", ".jsonl"))}
    assert of_json - RULES.keys() == {"manifest.json"}


def test_a_job_that_several_commands_recorded_keeps_how_its_ranks_ended_and_not_what_it_is_called() -> None:
    pseudonyms, ended = Pseudonyms(b"key"), {"how": "ended", "is_detached": True}
    assert hide_content(pseudonyms, ENDED_FILE, ended) == ended
    assert "Geheim" not in json.dumps(hide_content(pseudonyms, JOB_FILE, {"job": "rendezvous Geheim"}))
    assert pseudonyms.unknown == set()


def test_equal_names_are_equal_on_all_ranks_and_another_key_makes_other_ones() -> None:
    one, same, other = Pseudonyms(b"a"), Pseudonyms(b"a"), Pseudonyms(b"b")
    assert one.hide("host", "node7") == same.hide("host", "node7") != other.hide("host", "node7")
    assert one.hide("host", "node7") != one.hide("host", "node8")
    assert one.names == {one.hide("host", "node7"): "node7", one.hide("host", "node8"): "node8"}
