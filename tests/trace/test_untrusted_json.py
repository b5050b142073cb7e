"""Whatever a JSON file holds: a dictionary or one sentence."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.untrusted import MAX_NESTING, MAX_VALUES, load_json

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder"
REAL = (DUMPS / "op_mismatch_gloo" / "json" / "trace_0.json").read_bytes()
FILE = Path("trace_0.json")


def refusal(text: bytes) -> str:
    with pytest.raises(OverlapScopeError) as refused:
        load_json(text, FILE)
    message = str(refused.value)
    assert message.startswith("trace_0.json: ")
    assert "\n" not in message
    return message


def test_reads_real_dumps() -> None:
    files = list(DUMPS.rglob("*.json"))
    assert files
    for file in files:
        assert load_json(file.read_bytes(), file) == json.loads(file.read_bytes())


def test_refuses_a_real_dump_that_is_cut_anywhere() -> None:
    for length in range(0, len(REAL), 7):
        refusal(REAL[:length])


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 2_000, 500_000])
def test_refuses_what_is_nested_too_deeply(depth: int) -> None:
    assert "deep" in refusal(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    assert "deep" in refusal(b'{"a":' * depth + b"1" + b"}" * depth)


def test_refuses_numbers_of_thousands_of_digits_at_once() -> None:
    assert "digits" in refusal(b'{"record_id": ' + b"9" * 5_000_000 + b"}")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_refuses_numbers_that_json_does_not_know(number: str) -> None:
    assert number in refusal(f'{{"duration_ms": {number}}}'.encode())


def test_refuses_a_key_that_is_there_twice() -> None:
    assert "duplicate key" in refusal(b'{"entries": [], "entries": [1]}')
    assert "duplicate key" in refusal(b'{"entries": [{"state": "completed", "state": "scheduled"}]}')


@pytest.mark.parametrize("text", [b"[]", b"1", b'"version"', b"null", b"[{}]"])
def test_refuses_what_is_no_object(text: bytes) -> None:
    assert "no JSON object" in refusal(text)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe{}", b"{", b"{}{}", b"{} x", b"{'a': 1}", b'{"a": 01}', b"\x00"])
def test_refuses_what_is_not_json(text: bytes) -> None:
    refusal(text)


def test_allocates_little_for_what_it_refuses_for_its_size() -> None:
    """An empty list of two characters becomes an object of 56 bytes."""
    text = b'{"entries": [' + b"[]," * (MAX_VALUES // 2) + b"[]]}"
    tracemalloc.start()
    refusal(text)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@given(st.text(max_size=200) | st.sampled_from(["{", "}", "[", "]", '"', ":", ","]))
def test_answers_random_text_with_a_dictionary_or_a_sentence(text: str) -> None:
    for data in (text.encode("utf-8", errors="replace"), b"{" + text.encode("utf-8", errors="replace")):
        try:
            assert isinstance(load_json(data, FILE), dict)
        except OverlapScopeError:
            refusal(data)


@given(st.integers(0, len(REAL) - 1), st.binary(min_size=1, max_size=5))
def test_answers_damaged_dumps_with_a_dictionary_or_a_sentence(at: int, new: bytes) -> None:
    damaged = REAL[:at] + new + REAL[at + len(new) :]
    try:
        assert isinstance(load_json(damaged, FILE), dict)
    except OverlapScopeError:
        refusal(damaged)
