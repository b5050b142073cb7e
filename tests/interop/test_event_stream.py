"""The events of a trace are all read, whatever it looks like and wherever it ends."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.interop import event_stream
from overlapscope.interop.event_stream import EventStream

INTEGERS = st.integers(-(2**63), 2**64 - 1)  # of 64 bits, signed or not: no profiler writes larger ones
TEXTS = st.text(max_size=12) | st.sampled_from(['{"ph": ', '"ph"', "},{", "]", "\\", '"'])
EVENTS = st.lists(
    st.builds(
        lambda name, ts, args, is_first: (
            {"ph": "X", "name": name, "ts": ts, "args": args}
            if is_first
            else {"args": args, "name": name, "ts": ts, "ph": "X"}
        ),
        TEXTS,
        st.integers(0, 10**12),
        st.dictionaries(TEXTS, st.lists(INTEGERS) | TEXTS | st.dictionaries(TEXTS, TEXTS), max_size=3),
        st.booleans(),
    ),
    max_size=30,
)
LAYOUTS = st.sampled_from([None, 1, 2])


def read(path: Path) -> tuple[list[dict[str, Any]], EventStream]:
    stream = EventStream(path)
    return [event for batch in stream.batches() for event in batch], stream


@given(events=EVENTS, indent=LAYOUTS, chunk=st.integers(16, 400), is_first=st.booleans(), compressed=st.booleans())
def test_all_events_and_what_stands_around_them_are_read(tmp_path_factory, events, indent, chunk, is_first, compressed):
    around = {"distributedInfo": {"rank": 3}, "baseTimeNanoseconds": 12, "note": 'a "ph" and ] and {'}
    content = {"traceEvents": events, **around} if is_first else {**around, "traceEvents": events}
    text = json.dumps(content, indent=indent).encode()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    path.write_bytes(gzip.compress(text) if compressed else text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_stream, "_CHUNK_BYTES", chunk)
        found, stream = read(path)
    assert found == events
    assert stream.header == around
    assert stream.problem is None


def test_a_plain_list_of_events_is_a_trace_too(tmp_path):
    (tmp_path / "trace.json").write_text('[{"ph": "X"}, {"ph": "i"}]')
    assert read(tmp_path / "trace.json")[0] == [{"ph": "X"}, {"ph": "i"}]


@given(share=st.floats(0.3, 0.95), compressed=st.booleans())
def test_of_a_trace_that_is_cut_short_the_events_before_are_read_and_it_says_so(tmp_path_factory, share, compressed):
    events = [{"ph": "X", "name": f"event {number}", "ts": number} for number in range(50)]
    text = json.dumps({"baseTimeNanoseconds": 12, "traceEvents": events}).encode()
    text = gzip.compress(text) if compressed else text
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    path.write_bytes(text[: int(share * len(text))])
    try:
        found, stream = read(path)
    except OverlapScopeError:  # of a compressed file so little may be left that no event is
        assert compressed
        return
    assert found == events[: len(found)]
    assert stream.problem is not None
    assert compressed or stream.header == {"baseTimeNanoseconds": 12}


@pytest.mark.parametrize("text", ["", "# a README", '{"a": 1}', '"traceEvents"'])
def test_another_file_is_no_trace(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(
        OverlapScopeError, match=r"trace.json: not a trace of torch.profiler \(no list of traceEvents\)"
    ):
        read(tmp_path / "trace.json")


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(event_stream, "_MAX_HEADER_BYTES", 2**20)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "' + bytes(2**25)))
    with pytest.raises(OverlapScopeError, match="without a whole event"):
        read(tmp_path / "trace.json.gz")


def test_what_is_no_file_is_said(tmp_path):
    with pytest.raises(OverlapScopeError, match=r"nowhere\.json: not a file"):
        EventStream(tmp_path / "nowhere.json")
