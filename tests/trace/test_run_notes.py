"""Tags and notes beside a recording."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.runs import MAX_TAG_LENGTH, NOTES_FILE, RunNotes, parse_tags, read_notes, write_notes

tags = st.lists(
    st.text(max_size=MAX_TAG_LENGTH).filter(lambda tag: parse_tags(tag) == (tag,)), unique=True, max_size=20
)
printable = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(tags=tags, note=printable)
def test_what_is_written_is_read(tmp_path_factory, tags, note):
    run = tmp_path_factory.mktemp("run")
    notes = RunNotes(tags=tuple(tags), note=note)
    write_notes(run, notes)
    assert read_notes(run) == notes


@given(text=st.text())
def test_typed_tags_are_neat_and_typing_them_again_changes_nothing(text):
    typed = parse_tags(text)
    assert all(tag == " ".join(tag.split()) and tag for tag in typed)
    assert len(set(typed)) == len(typed)
    assert parse_tags(", ".join(typed)) == typed


def test_a_run_without_notes_has_none_and_nothing_to_write_leaves_no_file(tmp_path):
    assert read_notes(tmp_path) == RunNotes()
    write_notes(tmp_path, RunNotes(tags=("baseline",)))
    write_notes(tmp_path, RunNotes())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"tags": "x", "note": ""}', b'{"tags": [1], "note": ""}'])
def test_a_file_that_is_something_else_is_neither_read_nor_written_over(tmp_path, content):
    (tmp_path / NOTES_FILE).write_bytes(content)
    with pytest.raises(OverlapScopeError, match="holds no tags and note; repair it, or remove it"):
        read_notes(tmp_path)
    with pytest.raises(OverlapScopeError, match="repair it"):
        write_notes(tmp_path, RunNotes(note="new"))
    assert (tmp_path / NOTES_FILE).read_bytes() == content


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text('{"tags": [], "note": "secret"}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NOTES_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OverlapScopeError, match="can't be read"):
        read_notes(tmp_path / "run")


def test_a_folder_that_can_not_be_written_to_is_one_clear_line(tmp_path, monkeypatch):
    def refused(*_args, **_kwargs):
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr("pathlib.Path.open", refused)
    with pytest.raises(OverlapScopeError, match=r"tags and notes can't be kept here \(Read-only file system\)"):
        write_notes(tmp_path, RunNotes(note="x"))


@pytest.mark.parametrize("notes", [RunNotes(tags=("x" * 41,)), RunNotes(tags=("a",) * 21), RunNotes(note="x" * 10_001)])
def test_too_much_is_refused(tmp_path, notes):
    with pytest.raises(OverlapScopeError, match="at most"):
        write_notes(tmp_path, notes)
    assert list(tmp_path.iterdir()) == []
