"""Messages between watchdogs arrive as they were sent."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.watchdog.protocol import (
    Alarm,
    DivergenceLocation,
    EntriesReply,
    EntriesRequest,
    Heartbeat,
    LogHead,
    Outcome,
)
from overlapscope.trace.json_files import from_json, to_json

MESSAGES = st.one_of(
    [
        st.builds(message)
        for message in (LogHead, EntriesRequest, EntriesReply, Heartbeat, DivergenceLocation, Alarm, Outcome)
    ]
)


@given(MESSAGES)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert repr(from_json(type(message), to_json(message).encode())) == repr(message)  # by repr: a NaN equals nothing
