"""Damage to a JSON text is noticed, texts without a checksum are read too, and a file is replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import Problem
from overlapscope.trace.json_files import (
    dump_json_line,
    dump_json_text,
    parse_json_text,
    read_json,
    read_lines,
    write_json,
)
from overlapscope.trace.regular_file import remember_small_files

CONTENT = {"name": 'größe "crc32":"00000000"', "shape": [3, 4], "nested": {"b": None, "a": 1.5}}
WRITTEN = [dump_json_line(CONTENT), dump_json_text(CONTENT)]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_text_comes_back_without_its_checksum(text: str) -> None:
    assert parse_json_text(text.encode()) == CONTENT
    assert json.loads(text).keys() == {*CONTENT, "crc32"}
    assert text.endswith("}\n")


@pytest.mark.parametrize("text", WRITTEN)
@given(offset=st.integers(0, 10_000), change=st.integers(1, 255))
def test_what_a_damaged_byte_makes_of_a_text_is_not_believed(text: str, offset: int, change: int) -> None:
    data = bytearray(text.removesuffix("\n").encode())
    data[offset % len(data)] ^= change
    try:
        content = parse_json_text(bytes(data))
    except ValueError:
        return
    # Only the name of the checksum can be another: then nothing is checked, and nothing else is wrong.
    assert {key: value for key, value in content.items() if key in CONTENT} == CONTENT


def test_halves_of_characters_which_nothing_could_print_or_store_are_replaced() -> None:
    assert parse_json_text(rb'{"host": "\ud800x", "\uDC80": ["\ud83d\ude00", 1]}') == {
        "host": "?x",
        "?": ["\U0001f600", 1],
    }


def test_a_text_without_a_checksum_is_taken_as_it_is() -> None:
    assert parse_json_text(b'{"a": 1}') == {"a": 1}


def test_a_content_that_was_read_elsewhere_can_be_written_again() -> None:
    assert parse_json_text(dump_json_text(json.loads(dump_json_text(CONTENT)) | {"more": 1}).encode()) == CONTENT | {
        "more": 1
    }


@pytest.mark.parametrize("write", [dump_json_line, dump_json_text])
def test_only_the_last_key_is_the_checksum(write: Callable[[dict[str, object]], str]) -> None:
    content: dict[str, object] = {"a": {"crc32": "12345678"}, "b": [{"crc32": "12345678"}]}
    assert parse_json_text(write(content).encode()) == content
    assert parse_json_text(json.dumps(content).encode()) == content


def test_a_small_json_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert parse_json_text(path.read_bytes()) == {"a": 1}
    assert os.path.exists(path)


def test_a_file_that_is_remembered_is_not_changed_by_who_has_read_it_and_its_problem_is_reported_each_time(
    tmp_path: Path,
) -> None:
    good, bad = tmp_path / "run.json", tmp_path / "rank.json"
    write_json(good, CONTENT)
    bad.write_text("{")
    with remember_small_files():
        read_json(good, []).clear()
        assert read_json(good, []) == CONTENT
        found: list[list[Problem]] = [[], []]
        assert [read_json(bad, problems) for problems in found] == [{}, {}]
        assert found[0] == found[1] != []


def test_lines_that_are_known_from_another_rank_are_not_parsed_again_unless_some_are_damaged(tmp_path: Path) -> None:
    whole = dump_json_line({"number": 1})
    texts = {"a": whole, "b": whole, "c": f"{{\n{whole}", "d": f"{{\n{whole}"}
    parsed: list[int] = []
    known: dict[bytes, list[int]] = {}

    def row(line: dict[str, int]) -> list[int]:
        parsed.append(line["number"])
        return [line["number"]]

    problems: list[Problem] = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert read_lines(tmp_path / name, problems, row, known=known) == [1]
    assert len(parsed) == 3
    assert [problem.message.partition(":")[0] for problem in problems] == [str(tmp_path / name) for name in "cd"]
