"""What is taken apart for JSON is put together again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.diagnosis.evidence import (
    CallSite,
    Entry,
    Failure,
    ModelParameters,
    RankEvidence,
    RankPosition,
    UnreadyParameter,
)
from overlapscope.diagnosis.rank_snapshot import LogExcerpt, RankSnapshot
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.collective_log import Signature
from overlapscope.trace.json_files import from_dict, from_json, to_json

THINGS = st.one_of(
    [
        st.builds(thing)
        for thing in (
            CallSite,
            Signature,
            Entry,
            Failure,
            RankPosition,
            UnreadyParameter,
            ModelParameters,
            RankEvidence,
        )
    ]
    + [st.builds(LogExcerpt), st.builds(RankSnapshot), st.builds(Verdict)]
)


@given(THINGS)
def test_what_was_told_is_what_is_heard(thing: Any) -> None:
    assert repr(from_json(type(thing), to_json(thing))) == repr(thing)  # by repr: a NaN equals nothing


def test_what_a_later_version_says_is_left_out() -> None:
    site = CallSite(file="train.py", line=7, function="main")
    assert from_dict(CallSite, asdict(site) | {"column": 4}) == site


@pytest.mark.parametrize("text", ["[]", "{}", "7", '{"file": "train.py"}', "not JSON"])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        from_json(CallSite, text)
