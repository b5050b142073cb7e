"""Copies of recordings with pseudonyms: nothing of the names is left in any byte, and everything else is as it was."""

from __future__ import annotations

import random
import re
import shutil
import string
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlapscope.analysis import Analysis
from overlapscope.diagnosis.evidence import Failure
from overlapscope.diagnosis.failures import find_unreachable_address, is_consequence
from overlapscope.errors import OverlapScopeError
from overlapscope.redact.logs import DAMAGED
from overlapscope.trace.collective_log import CollectiveLogHeader
from overlapscope.trace.confidential.code import hide_message
from overlapscope.trace.confidential.pseudonyms import Pseudonyms
from overlapscope.trace.json_files import dump_json_line, parse_json_text, read_json, write_json
from overlapscope.trace.manifest import Manifest
from overlapscope.trace.process_files import write_exit
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.regular_file import match_files
from overlapscope.trace.schema import ENDED_FILE, HEADER_BYTES, MANIFEST_FILE, RUN_FILE, SIGNATURES_FILE, rank_folder
from tests import damage
from tests.diagnosis.test_verdict_texts import LOOPBACK, NO_ROUTE, NO_STORE
from tests.ordered import all_reduce, end, fail, steps, write_order
from tests.redact.copies import facts_of, find_verdict, read_bytes, redact
from tests.synthetic import write_recording, write_straggling_recording

DATA = Path(__file__).parents[1] / "data" / "recordings"
SECRET = st.text(string.ascii_lowercase + "äß✓", min_size=6, max_size=9).map(lambda text: f"Zq{text}")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of real jobs: of two ranks that trained, and of three with a fault that the watchdog has seen."""
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(DATA / "1.0.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for name in ("healthy", "missing-branch"):
        redact(folder / name, folder / f"copy of {name}")
    return folder


@pytest.mark.parametrize("name", ["healthy", "missing-branch"])
def test_a_real_recording_is_known_by_field_and_judged_as_before(recorded: Path, tmp_path: Path, name: str) -> None:
    assert redact(recorded / name, tmp_path / "copy").left_out == ()
    verdict, copied = find_verdict(recorded / name), find_verdict(recorded / f"copy of {name}")
    assert facts_of(copied) == facts_of(verdict)
    traces = [read_trace(recorded / f"{prefix}{name}") for prefix in ("", "copy of ")]
    assert [len(trace.errors) for trace in traces] == [0, 0]
    for table in ("steps", "phases", "copies", "pauses", "modes"):
        pd.testing.assert_frame_equal(*(getattr(trace, table) for trace in traces))


def test_a_real_recording_has_the_same_numbers(recorded: Path) -> None:
    analyses = [Analysis(read_trace(recorded / name)) for name in ("healthy", "copy of healthy")]
    assert analyses[0].summary.mean == analyses[1].summary.mean
    hashes = ["plan_hash"]
    pd.testing.assert_frame_equal(*(analysis.trace.collectives.drop(columns=hashes) for analysis in analyses))
    names = ["name", "plan_hash"]
    pd.testing.assert_frame_equal(*(analysis.trace.plans.drop(columns=names) for analysis in analyses))
    assert analyses[1].trace.plans["name"].nunique() == analyses[0].trace.plans["name"].nunique()
    assert analyses[1].trace.run["confidential"] is True


def replace_texts(content: Any, replace: Callable[[str], str]) -> Any:
    if isinstance(content, dict):
        return {key: replace_texts(one, replace) for key, one in content.items()}
    if isinstance(content, list):
        return [replace_texts(one, replace) for one in content]
    return replace(content) if isinstance(content, str) else content


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secrets=st.lists(SECRET, min_size=1, max_size=4, unique=True), seed=st.integers(0, 2**32))
def test_of_texts_in_any_place_no_byte_is_left(
    recorded: Path, tmp_path_factory: pytest.TempPathFactory, secrets: list[str], seed: int
) -> None:
    """Every text of a real recording is replaced by a secret, or has one inside, and so have the names of files."""
    folder = tmp_path_factory.mktemp("secret")
    shutil.copytree(recorded / "missing-branch", folder / "job")
    chance = random.Random(seed)

    def taint(text: str) -> str:
        secret = chance.choice(secrets)
        inside = f"{text}{secret}", f"/home/{secret}/{text}", f"{secret}.{text}", f"{text}: {secret}"
        return chance.choice([secret, *inside])

    for path in (folder / "job").rglob("*.json*"):
        content = path.read_bytes()
        texts = [content] if path.suffix == ".json" else content.splitlines()
        path.write_text("".join(dump_json_line(replace_texts(parse_json_text(text), taint)) for text in texts))
    for path in (folder / "job").rglob("*.txt"):
        path.write_text("\n".join(taint(line) for line in path.read_text().splitlines()))
    for path in (folder / "job").rglob("group_*.log"):
        page = path.read_bytes()
        header = CollectiveLogHeader.unpack(page[:HEADER_BYTES], path)
        changed = CollectiveLogHeader(
            **vars(header) | {name: taint("x") for name in ("name", "description", "backend")}
        )
        path.write_bytes(changed.pack() + page[HEADER_BYTES:])
    write_exit(folder / "job", 17, 1)
    for name in (f"{secrets[0]}.txt", "notes.json", f"exits_{secrets[0]}_9.jsonl", f"rank_0/{secrets[0]}.part"):
        (folder / "job" / name).write_text(f'{{"a": "{secrets[0]}"}}\n')
    redact(folder / "job", folder / "copy")
    written = read_bytes(folder / "copy")
    assert [secret for secret in secrets if secret.encode() in written] == []
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["healthy", "missing-branch"])
def test_of_a_real_recording_no_name_is_left(recorded: Path, name: str) -> None:
    """Whatever is a name in it: of parameters and modules, of hosts and files, of lines and messages."""
    run, where = (read_json(recorded / name / "rank_1" / file, []) for file in (RUN_FILE, "rank.json"))
    named = {where["host"], where["boot_id"], run["models"][0]["class"], *run["argv"]}
    for file in ("parameters.jsonl", "call_sites.jsonl"):
        for line in (recorded / name / "rank_1" / file).read_bytes().splitlines():
            content = parse_json_text(line)
            named |= {content.get("file", ""), content.get("function", "")}
            named |= {each[0] for each in content.get("parameters", ())}
    written = read_bytes(recorded / f"copy of {name}")
    assert len(named) > 8
    kept = {"main", "<module>", "forward"}
    assert [text for text in named - kept if len(text) > 3 and text.encode() in written] == []


@pytest.mark.parametrize("do_damage", dict.fromkeys(damage.DAMAGES), ids=lambda each: each.__name__)
def test_damage_is_damage_in_the_copy_and_accuses_nobody_else(
    recorded: Path, tmp_path: Path, do_damage: damage.Damage
) -> None:
    shutil.copytree(recorded / "missing-branch", tmp_path / "job")
    how = do_damage(random.Random(1), tmp_path / "job", recorded / "healthy")
    try:
        verdict = find_verdict(tmp_path / "job")
    except OverlapScopeError:
        return
    redact(tmp_path / "job", tmp_path / "copy")
    assert facts_of(find_verdict(tmp_path / "copy")) == facts_of(verdict), how


def write_swapped(folder: Path) -> None:
    """Two collectives of one shape in another order on one rank, which only the names tell."""
    first, second = all_reduce("zqa"), all_reduce("zqb")
    order = [*steps(3), first, second, *steps(3, first=3), first, second]
    write_order(folder, {0: order, 1: order, 2: [*order[:-2], second, first]})
    end(folder, (0, 1, 2))


def write_failed(folder: Path) -> None:
    write_order(folder, {rank: steps(4) for rank in range(3)}, close=False)
    fail(folder, 1, "ValueError", "zqsecret is no number")
    fail(folder, 0, "RuntimeError", "Connection closed by peer zqhost", time_ns=10**10)


def write_two_groups(folder: Path) -> None:
    write_order(folder, {rank: steps(3) for rank in range(4)})
    write_order(
        folder, {0: [all_reduce("zqa")] * 3, 1: [all_reduce("zqa")] * 2}, group="zqpair", number=1, world_size=4
    )
    end(folder, range(4))


@pytest.mark.parametrize("write", [write_swapped, write_failed, write_two_groups])
def test_a_made_up_job_is_judged_as_before(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "job")
    redact(tmp_path / "job", tmp_path / "copy")
    verdict = find_verdict(tmp_path / "job")
    assert verdict.is_fault
    assert facts_of(find_verdict(tmp_path / "copy")) == facts_of(verdict)
    assert b"zq" not in read_bytes(tmp_path / "copy").lower()


def test_a_straggler_is_found_with_its_pseudonymous_host(tmp_path: Path) -> None:
    write_straggling_recording(tmp_path / "job", late_us=lambda rank, _: 1000 * (rank == 3), ranks_per_host=2)
    redact(tmp_path / "job", tmp_path / "copy")
    found, copied = (Analysis(read_trace(tmp_path / name)).stragglers for name in ("job", "copy"))
    assert found is not None
    assert copied is not None
    assert [one.ranks for one in copied.findings] == [one.ranks for one in found.findings] != []
    assert [one.saving for one in copied.findings] == [one.saving for one in found.findings]
    assert list(map(len, hosts_of(read_trace(tmp_path / "copy")))) == [2, 2]


def hosts_of(trace: Trace) -> list[list[int]]:
    return [ranks.tolist() for _, ranks in trace.ranks.groupby("host")["rank"]]


def test_attempts_and_exits_are_copied_under_pseudonyms(tmp_path: Path) -> None:
    for attempt in (tmp_path / "job", tmp_path / "job" / "restart_2"):
        write_order(attempt, {0: steps(2), 1: steps(2)})
        write_exit(attempt, 1234, -9, rank=1)
    assert redact(tmp_path / "job", tmp_path / "copy").ranks == 4
    for attempt in (tmp_path / "copy", tmp_path / "copy" / "restart_2"):
        (exits,) = match_files(attempt, "exits_host_*.jsonl")
        assert parse_json_text(exits.read_bytes())["status"] == -9


def test_what_is_not_of_the_recording_or_of_its_attempt_is_named(tmp_path: Path) -> None:
    write_order(tmp_path / "job", {0: steps(2)})
    write_order(tmp_path / "job" / "restart_1", {0: steps(2)})
    for name in ("mine", "tables"):
        (tmp_path / "job" / name).mkdir()
    (tmp_path / "job" / "early_end_node_7.json").touch()
    assert redact(tmp_path / "job", tmp_path / "copy").left_out == ("mine",)
    assert redact(tmp_path / "job" / "restart_1", tmp_path / "one").left_out == ("early_end_node_7.json",)


def test_a_log_that_was_not_closed_stays_sparse_and_unclosed(tmp_path: Path) -> None:
    write_recording(tmp_path / "job", close=False)
    redact(tmp_path / "job", tmp_path / "copy")
    sizes = [(tmp_path / name / "rank_0" / "events.log").stat() for name in ("job", "copy")]
    assert sizes[0].st_size == sizes[1].st_size
    assert 512 * sizes[1].st_blocks < sizes[1].st_size / 4
    first, copied = (read_trace(tmp_path / name) for name in ("job", "copy"))
    pd.testing.assert_frame_equal(first.steps, copied.steps)
    assert [len(trace.problems) for trace in (first, copied)] == [2, 2]


def test_names_that_could_be_guessed_are_not_in_the_sums_of_logs(tmp_path: Path) -> None:
    write_swapped(tmp_path / "job")
    redact(tmp_path / "job", tmp_path / "copy", b"a")
    redact(tmp_path / "job", tmp_path / "other", b"b")
    logs = [(tmp_path / name / "rank_0" / "group_0.log").read_bytes() for name in ("job", "copy", "other")]
    assert len(set(logs)) == 3


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recording(tmp_path / "job")
    (tmp_path / "job" / "rank_1" / ENDED_FILE).touch()
    monkeypatch.setattr("overlapscope.redact.logs.copy_event_log", _fail)
    with pytest.raises(OverlapScopeError, match="No space"):
        redact(tmp_path / "job", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def _fail(*_: object) -> None:
    raise OSError(28, "No space left on device", "events.log")


def test_a_field_of_a_later_version_is_left_out_and_named(tmp_path: Path) -> None:
    write_recording(tmp_path / "job", ranks=1)
    path = rank_folder(tmp_path / "job", 0) / RUN_FILE
    write_json(path, read_json(path, []) | {"owner": "zqsecret"})
    (tmp_path / "job" / "zqfile").touch()
    assert redact(tmp_path / "job", tmp_path / "copy").left_out == (f"{RUN_FILE}: owner", "zqfile")
    assert not (rank_folder(tmp_path / "copy", 0) / SIGNATURES_FILE).exists()


def test_what_a_rank_was_writing_when_it_was_killed_is_in_no_copy_and_nobody_is_told(tmp_path: Path) -> None:
    write_recording(tmp_path / "job", ranks=1)
    for name in (RUN_FILE, "zqfile"):
        (rank_folder(tmp_path / "job", 0) / f"{name}.part").touch()
    assert redact(tmp_path / "job", tmp_path / "copy").left_out == ("zqfile.part",)
    assert not [*(tmp_path / "copy").rglob("*.part")]


def test_files_that_are_not_as_we_write_them_are_damage_in_the_copy(tmp_path: Path) -> None:
    write_order(tmp_path / "job", {0: steps(2), 1: steps(2)})
    end(tmp_path / "job", (0, 1))
    folder = rank_folder(tmp_path / "job", 0)
    write_json(folder / MANIFEST_FILE, {"files": {SIGNATURES_FILE: [7], "group_0.log": None}})
    page = (folder / "group_0.log").read_bytes()
    header = CollectiveLogHeader.unpack(page[:HEADER_BYTES], folder)
    crowded = replace(header, backend=".".join("x" * 400))  # each x gets a pseudonym, more than the page can hold
    (folder / "group_0.log").write_bytes(crowded.pack() + page[HEADER_BYTES:])
    redact(tmp_path / "job", tmp_path / "copy")
    copied = rank_folder(tmp_path / "copy", 0)
    assert (copied / "group_0.log").read_bytes() == DAMAGED
    assert all(map(Manifest(copied, []).is_damaged, (SIGNATURES_FILE, "group_0.log")))


@pytest.mark.parametrize("failure", [NO_STORE, LOOPBACK, NO_ROUTE])
def test_what_could_not_be_connected_to_is_known_without_its_address(failure: Failure) -> None:
    copy = replace(failure, message=hide_message(Pseudonyms(b"key"), failure.message))
    assert not re.search("node0|10.0.0.7", copy.message)
    original, found = find_unreachable_address(failure), find_unreachable_address(copy)
    assert original is not None
    assert found is not None
    assert (found.is_store, found.is_loopback) == (original.is_store, original.is_loopback)
    assert is_consequence(copy)
