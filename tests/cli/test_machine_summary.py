"""What the machine said is a section of ``summary`` and of its JSON, if it is worth a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlapscope.cli.main import main
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.schema import MACHINE_FILE, rank_folder
from tests.machine.said import HOT, gpu, quota, write_machine
from tests.synthetic import write_recording


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Ten steps of 10 ms from 1 s on: rank 1's GPU is hot, and both ranks share a control group."""
    write_recording(tmp_path, ranks=2, steps=10)
    when = {"begin_s": 1.0, "every_s": 0.01}
    write_machine(tmp_path, 0, [*quota("cgroup a", [0.5] * 12, **when), *gpu("gpu 0", [0] * 12, **when)])
    write_machine(tmp_path, 1, gpu("gpu 1", [0] * 5 + [HOT] * 7, **when), uses=["cgroup a"])
    with (rank_folder(tmp_path, 1) / MACHINE_FILE).open("a") as file:
        file.write(dump_json_line({"time_ns": 0, "unreadable": "gpu 1", "facts": ["xid"], "why": "Not Supported"}))
    return tmp_path


def test_the_section_and_its_json(recording: Path, capsys: pytest.CaptureFixture[str], golden) -> None:
    assert main(["summary", str(recording)]) == 0
    text = capsys.readouterr().out
    golden("cli/machine", text[text.index("GPU clock held down") :])
    assert main(["summary", str(recording), "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    found = {one["kind"]: one for one in machine["conditions"]}
    assert (found["thermal limit"]["ranks"], found["CPU quota"]["ranks"]) == ([1], [0, 1])
    assert found["thermal limit"]["amount"] == pytest.approx(0.5, abs=0.05)
    assert found["CPU quota"]["amount"] == pytest.approx(0.5)
    assert machine["unreadable"] == [{"source": "gpu", "facts": "xid", "why": "Not Supported", "ranks": [1]}]


def test_a_recording_without_facts_has_no_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recording(tmp_path, steps=10)
    assert main(["summary", str(tmp_path)]) == 0
    assert "machine" not in capsys.readouterr().out.replace(str(tmp_path), "").lower()


def test_a_damaged_line_is_a_problem_and_the_rest_is_told(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rank_folder(recording, 1) / MACHINE_FILE
    lines = file.read_bytes().split(b"\n")
    lines[3] = b"x" + lines[3][1:]
    file.write_bytes(b"\n".join(lines))
    assert main(["summary", str(recording), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert [one["message"] for one in content["problems"] if "machine.jsonl: line 4" in one["message"]]
    assert {one["kind"] for one in content["machine"]["conditions"]} == {"thermal limit", "CPU quota"}
