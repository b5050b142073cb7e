"""Runs that a folder holds, with their tags and notes; no name leads out of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.runs import (
    MAX_DEPTH,
    MAX_TAG_LENGTH,
    NOTES_FILE,
    RunNotes,
    find_runs,
    is_run,
    parse_tags,
    read_notes,
    write_notes,
)
from tests.synthetic import write_recording

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder" / "hang_3"


def recording(folder: Path) -> Path:
    return write_recording(folder, ranks=1, steps=1)


def names_in(*folders: Path) -> list[str]:
    return [run.name for run in find_runs(folders).runs]


def test_runs_are_found_at_any_depth_and_named_by_their_path(tmp_path):
    for name in ("b", "nightly/2026-11-02", "a/b/c"):
        recording(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    assert names_in(tmp_path) == ["a/b/c", "b", "nightly/2026-11-02"]


def test_a_run_may_hold_others_and_the_folder_that_was_given_may_be_one(tmp_path):
    recording(tmp_path / "traces")
    recording(tmp_path / "traces" / "later")
    assert names_in(tmp_path / "traces") == ["later", "traces"]
    assert is_run(tmp_path / "traces")
    assert not is_run(tmp_path)


def test_attempts_are_one_run_with_names_of_their_own(tmp_path):
    job = recording(tmp_path / "job")
    recording(job / "restart_1")
    recording(job / "restart_2")
    found = find_runs([tmp_path])
    (run,) = found.runs
    assert (run.name, run.latest_name, len(run.attempts)) == ("job", "job/restart_2", 3)
    assert found.path_of("job") == job
    assert found.path_of("job/restart_1") == job / "restart_1"


def test_a_job_whose_first_attempt_left_nothing_is_found_by_its_later_one(tmp_path):
    recording(tmp_path / "job" / "restart_1")
    (run,) = find_runs([tmp_path]).runs
    assert (run.name, run.latest_name) == ("job", "job/restart_1")


def test_a_folder_of_dumps_is_a_run(tmp_path):
    shutil.copytree(DUMPS, tmp_path / "dumps")
    assert names_in(tmp_path) == ["dumps"]


def test_of_several_folders_each_has_a_name_of_its_own(tmp_path):
    for name in ("one/traces/x", "two/traces/x", "three"):
        recording(tmp_path / name)
    folders = [tmp_path / "one" / "traces", tmp_path / "two" / "traces", tmp_path / "three", tmp_path / "missing"]
    assert names_in(*folders) == ["three", "traces (2)/x", "traces/x"]


def test_a_folder_inside_another_adds_nothing(tmp_path):
    recording(tmp_path / "traces" / "x" / "y")
    assert names_in(tmp_path / "traces", tmp_path / "traces" / "x") == ["traces/x/y"]


def test_links_out_of_the_folder_are_not_followed_and_that_is_said(tmp_path):
    outside = recording(tmp_path / "outside")
    inside = tmp_path / "traces"
    recording(inside / "run")
    (inside / "out").symlink_to(outside)
    (inside / "latest").symlink_to(inside / "run")
    (inside / "mixed").mkdir()
    (inside / "mixed" / "rank_0").symlink_to(outside / "rank_0")
    found = find_runs([inside])
    assert [run.name for run in found.runs] == ["run"]
    assert sorted(text.partition(":")[0] for text in found.left_out) == [
        str(inside / "mixed" / "rank_0"),
        str(inside / "out"),
    ]


@pytest.mark.parametrize("link", ["rank_0/stall.json", "exits_host_1.jsonl", "tables", "restart_1/rank_0/stall.json"])
def test_a_run_with_a_file_that_is_a_link_out_of_the_folder_is_left_out(tmp_path, link):
    (secret := tmp_path / "secret").mkdir()
    run = recording(tmp_path / "traces" / "run")
    recording(run / "restart_1")
    (run / "model.pt").symlink_to(secret)  # nothing that is read
    assert [len(one.attempts) for one in find_runs([tmp_path / "traces"]).runs] == [2]
    (run / link).symlink_to(secret)
    found = find_runs([tmp_path / "traces"])
    assert [len(one.attempts) for one in found.runs] == ([1] if link.startswith("restart_1") else [])
    assert str(run / link) in {text.partition(":")[0] for text in found.left_out}


def test_an_attempt_with_a_rank_outside_is_left_out(tmp_path):
    outside = recording(tmp_path / "outside")
    job = recording(tmp_path / "traces" / "job")
    (job / "restart_1").mkdir()
    (job / "restart_1" / "rank_0").symlink_to(outside / "rank_0")
    (run,) = find_runs([tmp_path / "traces"]).runs
    assert run.attempts == (job,)


def test_the_folder_that_was_given_may_be_a_link(tmp_path):
    recording(tmp_path / "disk" / "run")
    (tmp_path / "traces").symlink_to(tmp_path / "disk")
    assert names_in(tmp_path / "traces") == ["run"]


def test_a_folder_that_can_not_be_read_is_named(tmp_path, monkeypatch):
    recording(tmp_path / "run")
    (tmp_path / "secret").mkdir()
    import os

    scan = os.scandir

    def refused(path):
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    found = find_runs([tmp_path])
    assert [run.name for run in found.runs] == ["run"]
    assert found.left_out == (f"{tmp_path / 'secret'}: can't be read (Permission denied)",)


def test_what_is_too_deep_is_not_searched_and_that_is_said(tmp_path):
    deep = tmp_path.joinpath(*["d"] * (MAX_DEPTH + 2))
    recording(deep)
    found = find_runs([tmp_path])
    assert found.runs == ()
    assert "levels deep" in found.left_out[0]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and beside it one that nobody may see."""
    top = tmp_path_factory.mktemp("guarded")
    recording(top / "secret")
    recording(top / "traces" / "nightly" / "one")
    recording(top / "traces" / "two")
    (top / "traces" / "out").symlink_to(top / "secret")
    return top / "traces"


parts = st.sampled_from(["..", ".", "", "nightly", "one", "two", "out", "secret", "traces", "rank_0", "/", "\0", "~"])


@given(name=st.lists(parts, max_size=7).map("/".join) | st.text(max_size=40))
@example(name="../secret")
@example(name="nightly/../../secret")
@example(name="/etc")
@example(name="out")
def test_a_name_leads_to_a_run_inside_or_to_nothing(guarded, name):
    path = find_runs([guarded]).path_of(name)
    if name in ("nightly/one", "two"):
        assert path == guarded / name
    else:
        assert path is None


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
