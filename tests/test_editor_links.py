"""Lines of code that an editor opens: on pages, in saved reports and in terminals."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.pages.shell import format_code
from overlapscope import editor_links
from overlapscope.editor_links import EDITOR_VARIABLE, find_code_links, link_line, read_editor
from overlapscope.errors import OverlapScopeError
from overlapscope.report.render_text import print_report
from overlapscope.report.report import Report, Section

LINK = re.compile(r"\x1b\]8;[^;]*;([^\x1b]+)\x1b\\")
"""How terminals are told of a link."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's home with a script, and no editor chosen."""
    monkeypatch.delenv(EDITOR_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    (tmp_path / "ada" / "job").mkdir(parents=True)
    (tmp_path / "ada" / "job" / "train.py").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "ada" / "job")
    return tmp_path / "ada"


def hrefs(markup: str) -> list[str]:
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag in ("a", "span", "code")
            assert {name for name, _ in attrs} <= {"class", "title", "href"}
            found.extend(value or "" for name, value in attrs if name == "href")

    Links().feed(markup)
    return found


def print_to_terminal(section: Section, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    print_report(Report(facts=(), sections=(section,), content={}))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("editor", "start", "end"),
    [
        ("vscode", "vscode://file", ":43"),
        ("cursor", "cursor://file", ":43"),
        ("pycharm", "pycharm://open?file=", "&line=43"),
        ("vscode://vscode-remote/ssh-remote+gpu7{path}:{line}", "vscode://vscode-remote/ssh-remote+gpu7", ":43"),
    ],
)
def test_a_page_and_a_terminal_link_to_the_chosen_editor(
    editor: str,
    start: str,
    end: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(EDITOR_VARIABLE, editor)
    sentence = f"Rank 1 waits at {home}/job/train.py:43 (main)."
    assert hrefs(format_code(sentence)) == [f"{start}{home}/job/train.py{end}"]
    shown = print_to_terminal(Section(name="a", title="A", headline=sentence), monkeypatch, capsys)
    assert LINK.findall(shown) == [f"{start}{home}/job/train.py{end}"]


def test_unless_an_editor_is_chosen_terminals_link_to_files_and_pages_to_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = f"at {home}/job/train.py:43 (main)"
    for chosen in (None, "file", "none"):
        if chosen:
            monkeypatch.setenv(EDITOR_VARIABLE, chosen)
        assert hrefs(format_code(sentence)) == []
        found = LINK.findall(print_to_terminal(Section(name="a", title="A", headline=sentence), monkeypatch, capsys))
        assert [re.sub("^file://[^/]+", "", url) for url in found] == [f"{home}/job/train.py"] * (chosen != "none")


def test_a_pipe_gets_no_links(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = Section(name="a", title="A", headline=f"at {home}/job/train.py:43 (main)")
    print_report(Report(facts=(), sections=(section,), content={}))
    assert "\x1b" not in capsys.readouterr().out


def test_the_end_of_a_path_is_a_link_if_it_can_only_be_of_one_file(home: Path) -> None:
    one, two = f"{home}/job/train.py", f"{home}/old/job/train.py"
    text = "rank 0  step 12, at .../job/train.py:43 (main)"
    (link,) = find_code_links(text, (one,), "vscode://file{path}:{line}")
    assert (text[link.start : link.end], link.url) == (".../job/train.py:43", f"vscode://file{one}:43")
    assert list(find_code_links(text, (one, two), "vscode://file{path}:{line}")) == []
    assert list(find_code_links(text, (), "vscode://file{path}:{line}")) == []


def test_a_line_that_leads_nowhere_or_out_of_the_users_folders_is_no_link(home: Path) -> None:
    for path in (
        f"{home}/job/gone.py",
        f"{home}/job",
        f"{home.parent}/other/train.py",
        f"{home}/job/../../other/train.py",
        f"{home.parent}/ada2/train.py",
        "train.py",
        "",
    ):
        assert link_line(path, "43", "vscode://file{path}:{line}") == ""


def test_a_file_elsewhere_is_not_even_looked_for() -> None:
    with mock.patch("os.path.isfile", side_effect=AssertionError):
        assert link_line("/net/elsewhere.example/share/train.py", "1", "vscode://file{path}:{line}") == ""


@given(name=st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=30), line=st.integers(0, 10**9))
def test_a_name_can_neither_change_the_scheme_nor_leave_the_attribute(name: str, line: int) -> None:
    with (
        mock.patch.dict(os.environ, {EDITOR_VARIABLE: "vscode"}),
        mock.patch.object(editor_links, "_user_folders", return_value=["/home/ada"]),
        mock.patch("os.path.isfile", side_effect=lambda path: bool(os.fsencode(path))),
    ):
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            return  # no file can have such a name
        url = link_line(f"/home/ada/{name}/x.py", str(line), read_editor(in_browser=True))
        assert re.fullmatch(r"(vscode://file/home/ada/[\w.%~/-]+\.py:\d+)?", url, re.ASCII)
        for href in hrefs(format_code(f"at /home/ada/{name}/x.py:{line} or {name}:{line}")):
            assert re.fullmatch(r"vscode://file/home/ada/[\w.%~/-]+:\d+", html.unescape(href), re.ASCII)


@pytest.mark.parametrize(
    "wrong", ["vim", "vscode:", "javascript:alert('{path}')", "JavaScript://{path}", "data:text/html,{path}", "{path}"]
)
def test_what_is_no_editor_is_refused_with_those_that_are(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EDITOR_VARIABLE, wrong)
    for in_browser in (False, True):
        with pytest.raises(OverlapScopeError, match="vscode, cursor"):
            read_editor(in_browser=in_browser)


def test_long_texts_are_searched_once() -> None:
    """A pattern that begins anywhere would take hours."""
    for part in ("/-", "/a,", ".../", "/a:1", "'/", "/a '"):
        assert list(find_code_links(part * 50_000, (), "")) == []
