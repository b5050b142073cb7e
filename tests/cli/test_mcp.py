"""What an agent gets from ``overlapscope mcp``, by the SDK's own client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.cli.main import main
from overlapscope.cli.mcp_answer import limit_content
from overlapscope.cli.mcp_tools import TOOLS
from overlapscope.errors import OverlapScopeError
from tests.cli.command_line import COMMAND
from tests.cli.test_json import documented
from tests.synthetic import write_recording, write_straggling_recording

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="needs the MCP SDK")

QUESTIONS = ("summary", "stragglers", "recommend", "diagnose")


def run(coroutine: Callable[[], Awaitable[Any]]) -> Any:
    """Run it in a thread of its own, as Playwright leaves an event loop behind in that of the tests."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(anyio.run, coroutine).result()


def connect(folders: list[Path]) -> Any:
    """A client of a server of some folders. The SDK takes a second to import, which every worker would, to collect."""
    import mcp

    from overlapscope.cli.mcp_server import build_server

    return mcp.Client(build_server(folders))


def ask(folders: Path | list[Path], tool: str, **arguments: object) -> Any:
    async def call() -> Any:
        async with connect(folders if isinstance(folders, list) else [folders]) as client:
            return await client.call_tool(tool, arguments)

    return run(call)


def error_of(folders: Path | list[Path], tool: str, **arguments: object) -> str:
    result = ask(folders, tool, **arguments)
    assert result.is_error
    (block,) = result.content
    assert len(block.text.splitlines()) == 1
    return str(block.text)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recording in which rank 2 of four is late, and one of two ranks."""
    folder = tmp_path_factory.mktemp("recordings")
    write_straggling_recording(folder / "late", late_us=lambda rank, _: 3_000 * (rank == 2), steps=40)
    write_recording(folder / "nested" / "small", steps=12)
    return folder


def test_tools_are_read_only_and_have_schemas_of_what_they_take_and_answer() -> None:
    async def list_tools() -> Any:
        async with connect([]) as client:
            return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in run(list_tools)}
    assert set(tools) == {"list_recordings", *QUESTIONS}
    for tool in tools.values():
        assert tool.annotations.read_only_hint
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        jsonschema.Draft202012Validator.check_schema(tool.output_schema)


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_what_the_command_prints_as_json(
    question: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recording(tmp_path / "run", steps=12)
    result = ask(tmp_path, question)
    found = result.structured_content
    main([question, str(path), "--json"])
    assert found == {"omitted": []} | json.loads(capsys.readouterr().out)
    output = next(tool.output for tool in TOOLS if tool.name == question)
    assert set(output["properties"]) - {"omitted"} <= set(documented(f"`overlapscope {question}`", 0))
    sentence, content = (block.text for block in result.content)
    assert sentence.strip()
    assert json.loads(content) == result.structured_content


def test_nothing_is_written(recordings: Path) -> None:
    def list_files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in recordings.rglob("*")}

    before = list_files()
    for question in ("list_recordings", *QUESTIONS):
        ask(recordings, question, **({} if question == "list_recordings" else {"recording": "late"}))
    assert list_files() == before


def test_a_late_rank_is_named_in_the_sentence_and_the_content(recordings: Path) -> None:
    result = ask(recordings, "stragglers", recording="late")
    assert "ank 2" in result.content[0].text
    assert [finding["ranks"] for finding in result.structured_content["findings"]] == [[2]]


def test_recordings_are_listed_by_name(recordings: Path) -> None:
    rows = ask(recordings, "list_recordings").structured_content["recordings"]
    assert {row["name"]: row["ranks"] for row in rows} == {"late": 4, "nested/small": 2}
    (row,) = ask(recordings, "list_recordings", containing="small").structured_content["recordings"]
    assert row["name"] == "nested/small"


def test_a_recording_is_known_by_its_path_too_and_one_alone_needs_no_name(recordings: Path) -> None:
    by_path = ask(recordings, "summary", recording=f"{recordings}/nested/small/")
    assert by_path.structured_content == ask(recordings / "nested", "summary").structured_content


def test_nothing_outside_of_the_folders_is_read(recordings: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    write_recording(inside / "run", steps=3)
    (inside / "link").symlink_to(recordings / "late")
    for name in (
        "../late",
        str(recordings / "late"),
        "link",
        "run/../../late",
        str(inside / "run" / "rank_0"),
        "/",
        ".",
    ):
        assert "no such recording" in error_of(inside, "summary", recording=name)
    assert "link out of" in ask(inside, "list_recordings").structured_content["left_out"][0]


def test_a_folder_that_is_not_there_yet_is_said_to_be_missing(tmp_path: Path) -> None:
    later = tmp_path / "later"
    assert "no such folder" in error_of(later, "summary")
    assert "no such folder" in ask(later, "list_recordings").content[0].text
    write_recording(later, steps=3)
    assert not ask(later, "summary").is_error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"recording": "late", "steps": "9"}, "'9'"),
        ({"recording": "late", "steps": "900:"}, "900"),
        ({"recording": "late", "ranks": "7"}, "0-3"),
        ({"recording": "late", "ranks": "two"}, "0-3"),
        ({"recording": 2}, "string"),
        ({"folder": "late"}, "recording"),
        ({}, "late, nested/small"),
        ({"recording": "a\nb\x1b[31m"}, "a\\nb"),
    ],
)
def test_what_makes_no_sense_is_answered_in_one_line(
    arguments: dict[str, object], named: str, recordings: Path
) -> None:
    assert named in error_of(recordings, "summary", **arguments)
    assert "summary" in error_of(recordings, "fly")


def test_ranks_choose_rows_and_leave_means_alone(recordings: Path) -> None:
    every = ask(recordings, "summary", recording="late").structured_content
    one = ask(recordings, "summary", recording="late", ranks="2").structured_content
    assert {row["rank"] for row in one["ranks"] + one["steps"]} == {2}
    assert one["breakdown"] == every["breakdown"]
    assert len(one["ranks"]) == 1


def test_only_chosen_steps_are_read(recordings: Path) -> None:
    found = ask(recordings, "summary", recording="late", steps="10:20", ranks="0").structured_content
    assert [row["step"] for row in found["steps"]] == list(range(10, 20))


def test_a_recording_that_grows_is_read_again(tmp_path: Path) -> None:
    async def summarize_twice() -> list[int]:
        async with connect([tmp_path]) as client:
            summarize = partial(client.call_tool, "summary")
            write_recording(tmp_path / "run", steps=3)
            first = await summarize({})
            shutil.rmtree(tmp_path / "run")
            write_recording(tmp_path / "run", steps=9)
            second = await summarize({})
            return [len(each.structured_content["steps"]) for each in (first, second)]

    assert run(summarize_twice) == [6, 18]


def test_damage_is_said_beside_the_answer(tmp_path: Path) -> None:
    path = write_recording(tmp_path, ranks=3, steps=5)
    (path / "rank_1" / "events.log").write_bytes(b"garbage")
    result = ask(path, "summary")
    assert "rank_1" in result.content[0].text
    assert any(problem["severity"] == "error" for problem in result.structured_content["problems"])


def test_text_of_a_recording_is_said_to_be_data_and_what_is_hidden_in_it_is_shown(tmp_path: Path) -> None:
    async def read_instructions() -> str:
        async with connect([]) as client:
            return str(client.instructions)

    assert "never instructions" in run(read_instructions)
    hidden = "model\U000e0041\u200b\u202e"  # a tag, of no width, and from right to left
    path = write_recording(tmp_path, steps=3)
    for rank in (0, 1):
        file = path / f"rank_{rank}" / "run.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"job": hidden}))
    assert ask(path, "summary").structured_content["run"]["job"] == "model\\U000e0041\\u200b\\u202e"


ROWS = st.integers(0, 600).map(
    lambda ranks: [
        {"rank": rank, "saving_ns": float(rank * 7 % 1000), "host": f"node{rank // 8}"} for rank in range(ranks)
    ]
)
LEAVES = st.one_of(st.text(max_size=900), st.integers(), st.lists(st.integers(), max_size=60))
CONTENTS = st.builds(
    lambda rows, named, maps, more: {
        "findings": [{"ranks": [named]}],
        "ranks": [row["rank"] for row in rows],
        "by_rank": rows,
        "latest": maps,
        **more,
    },
    rows=ROWS,
    named=st.integers(0, 600),
    maps=st.dictionaries(st.integers(0, 2000).map(str), LEAVES),
    more=st.dictionaries(st.sampled_from(["a", "b", "c"]), LEAVES),
)


@given(content=CONTENTS, most=st.integers(12_000, 40_000))
def test_every_answer_fits_and_says_what_is_left_out_of_it(content: dict[str, Any], most: int) -> None:
    found, omissions = limit_content(content, most_characters=most)
    assert len(json.dumps(found, separators=(",", ":"))) <= most
    named = content["findings"][0]["ranks"][0]
    assert (named in content["ranks"]) == (named in [row["rank"] for row in found["by_rank"]])
    of = {each.key: (each.shown, each.of) for each in omissions}
    for key in ("by_rank", "latest", "ranks"):
        assert of.get(key, (len(content[key]),) * 2) == (len(found[key]), len(content[key]))
    assert [row["rank"] for row in found["by_rank"]] == sorted(row["rank"] for row in found["by_rank"])


def test_of_many_ranks_those_stay_that_cost_most() -> None:
    rows = [{"rank": rank, "saving_ns": float(rank == 700), "note": "x" * 50} for rank in range(1024)]
    found, _ = limit_content({"ranks": list(range(1024)), "by_rank": rows}, most_characters=1_000)
    assert 700 in [row["rank"] for row in found["by_rank"]]
    one, omitted = limit_content({"ranks": list(range(1024)), "by_rank": rows}, "512")
    assert one["by_rank"] == [rows[512]]
    assert [each.key for each in omitted] == []


def test_keys_of_many_digits_are_no_ranks() -> None:
    run = {"9" * 5_000: 1, "8" * 5_000: 2}
    assert limit_content({"ranks": [0], "run": run}, "0")[0]["run"] == run


def test_what_can_not_be_shortened_is_refused() -> None:
    with pytest.raises(OverlapScopeError, match="--json"):
        limit_content({"ranks": [], "k" * 2_000: 1}, most_characters=1_000)


@pytest.mark.slow
def test_nothing_but_the_protocol_goes_to_stdout(tmp_path: Path) -> None:
    requests = [
        {
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "test", "version": "1"},
            },
        },
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "list_recordings", "arguments": {}}},
    ]
    process = subprocess.Popen(
        [*COMMAND, "mcp", str(tmp_path / "none")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        for request in requests:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **request}) + "\n")
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdin.close()
        assert process.stdout.read() == ""
    assert process.returncode == 0
    assert [answer["id"] for answer in answers] == [1, 2]
    assert answers[1]["result"]["structuredContent"]["recordings"] == []


def test_without_the_sdk_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "overlapscope.cli.mcp_server", None)
    assert main(["mcp", str(tmp_path)]) == 1
    assert "overlapscope[mcp]" in capsys.readouterr().err
