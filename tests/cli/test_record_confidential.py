"""``overlapscope record --confidential``: names are in a private folder while the job runs, and nowhere after it.

The training is played by a script that writes a recording where the environment says, without torch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from overlapscope.cli import joined_job
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import read_recording_options
from tests.cli.command_line import Ran, overlapscope
from tests.redact.copies import find_verdict, read_bytes

FAILING = """
import os, sys
from pathlib import Path
from tests.ordered import fail, steps, write_order
folder = Path(os.environ["OVERLAPSCOPE_TRACE"])
print(oct(folder.parent.stat().st_mode & 0o777), os.environ["OVERLAPSCOPE_CONFIDENTIAL"], *os.listdir(sys.argv[1]))
write_order(folder, {rank: steps(4) for rank in range(2)}, close=False)
fail(folder, 1, "ValueError", "zqmessage")
raise SystemExit(3)
"""

RANK = """
import os, shutil, sys, tempfile
from pathlib import Path
from tests.ordered import end, fail, steps, write_order
rank = int(sys.argv[1])
with tempfile.TemporaryDirectory() as made:
    write_order(Path(made), {each: steps(4) for each in range(2)}, close=False)
    fail(Path(made), 1, "ValueError", "zqmessage")
    end(Path(made), [0])
    shutil.move(Path(made, f"rank_{rank}"), os.environ["OVERLAPSCOPE_TRACE"])
raise SystemExit(rank)
"""


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of the command."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def key(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("ab" * 32)
    return tmp_path / "key"


def record(folder: Path, *options: object) -> Ran:
    failing = [sys.executable, "-c", FAILING, folder]
    return overlapscope("record", "--confidential", "-o", folder, *options, "--", *failing)


def record_rank(folder: Path, rank: int, *options: object) -> Ran:
    playing = [sys.executable, "-c", RANK, rank]
    return overlapscope("record", "--join", "-o", folder, *options, "--", *playing, SLURM_JOB_ID="12")


def test_names_are_on_the_terminal_and_in_no_file_but_the_owners(private: Path, tmp_path: Path) -> None:
    traces, names = tmp_path / "traces", tmp_path / "names.json"
    ran = record(traces, "--names", names)
    assert (ran.returncode, ran.stdout) == (3, "0o700 1\n")
    assert "zqmessage" in ran.stderr
    assert ran.stderr.count(str(traces)) == 2  # it is there, and how to look at it
    assert [*private.iterdir()] == []
    verdict = find_verdict(traces)
    assert (verdict.kind, verdict.blamed, verdict.step) == ("failed", (1,), 3)
    written = read_bytes(traces)
    assert [name for name in ("zqmessage", "node0", "train.py", "body") if name.encode() in written] == []
    assert [path.name.partition("_")[0] for path in sorted(traces.iterdir())] == ["exits", "rank", "rank"]
    assert {"zqmessage", "node0"} <= {*json.loads(names.read_text()).values()}
    assert names.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_hosts_with_one_key_record_into_one_folder(
    private: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_job, "_WAIT_S", 0.0)
    traces, options = tmp_path / "traces", ("--confidential", "--key", key)
    first, second = (record_rank(traces, rank, *options) for rank in (0, 1))
    assert (first.returncode, second.returncode) == (0, 1)
    assert "zqmessage" in second.stderr
    assert sorted(read_evidence(traces)[0].ranks) == [0, 1]
    assert find_verdict(traces).blamed == (1,)
    again = record_rank(traces, 0, *options)
    assert "restart_1" in again.stderr
    assert (traces / "restart_1" / "rank_0").is_dir()
    written = read_bytes(traces)
    assert [name for name in ("zqmessage", "node0", "Slurm", ".copy") if name.encode() in written] == []
    assert [*private.iterdir()] == []
    (tmp_path / "other").write_text("cd" * 32)
    for other in ((), ("--confidential", "--key", tmp_path / "other")):
        assert "another job" in record_rank(traces, 1, *other).stderr


def test_what_cannot_be_copied_stays_for_its_owner_and_the_next_command_says_so(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr("overlapscope.redact.logs.copy_collective_log", _fail)
        ran = record(tmp_path / "traces")
    (kept,) = private.glob("*/traces")
    assert ran.returncode == 3
    assert "No space" in ran.stderr
    assert f"{kept}: still holds names" in ran.stderr
    assert not (tmp_path / "traces").exists()
    assert find_verdict(kept).blamed == (1,)
    assert f"{kept.parent}: still holds names of an earlier job" in record(tmp_path / "traces").stderr
    assert [*private.glob("*/traces")] == [kept]


def _fail(*_: object) -> None:
    raise OSError(28, "No space left on device", "group_0.log")


def test_nothing_is_left_of_a_job_that_recorded_nothing(private: Path, tmp_path: Path) -> None:
    ran = overlapscope("record", "--confidential", "-o", tmp_path / "traces", "--", "true")
    assert ran.returncode == 1
    assert "nothing was recorded" in ran.stderr
    assert ([*private.iterdir()], (tmp_path / "traces").exists()) == ([], False)


def test_ranks_of_another_host_are_said_to_have_other_pseudonyms(private: Path, key: Path, tmp_path: Path) -> None:
    playing = [sys.executable, "-c", RANK, 0]
    ran = overlapscope("record", "--confidential", "-o", tmp_path / "a", "--", *playing)
    assert "rank 1 recorded elsewhere, under other pseudonyms" in ran.stderr
    ran = overlapscope("record", "--confidential", "--key", key, "-o", tmp_path / "b", "--", *playing)
    assert "elsewhere" not in ran.stderr


def test_a_rank_records_into_the_private_folder_of_its_host_and_into_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAPSCOPE_CONFIDENTIAL", "1")
    monkeypatch.setenv("OVERLAPSCOPE_TRACE", str(tmp_path))
    found = read_recording_options("traces")
    assert found is not None
    assert found.folder == tmp_path
    monkeypatch.setenv("OVERLAPSCOPE_TRACE", str(tmp_path / "of another host"))
    with pytest.raises(OverlapScopeError, match="private to another host"):
        read_recording_options(None)
