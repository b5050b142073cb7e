"""``overlapscope summary``: the text for people, the JSON for programs, and what goes to stderr."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from overlapscope.cli.main import main
from overlapscope.trace.schema import EVENTS_FILE, Kind, Phase, pack_body, rank_folder
from tests.cli.command_line import overlapscope
from tests.synthetic import US, make_rank, write_recording

HIDDEN = "65 % of communication"
ROW = "10.00 7.38 3.70 2.40 1.30 0.65"


def rows(text: str) -> list[str]:
    """The lines of the tables of ranks and of steps, with single spaces."""
    return [
        " ".join(line.split()).removeprefix("rank ")
        for line in text.splitlines()
        if re.match(r" rank \d| +\.\.\. ", line)
    ]


def test_a_short_recording_is_shown_in_full(tmp_path: Path) -> None:
    ran = overlapscope("summary", write_recording(tmp_path, ranks=2, steps=3))
    assert (ran.returncode, ran.stderr) == (0, "")
    means = [f"{rank} 2 {ROW}" for rank in (0, 1)]
    assert rows(ran.stdout) == means + [f"{rank} {step} {ROW}" for rank in (0, 1) for step in range(3)]
    assert ran.stdout.splitlines()[2].startswith(HIDDEN)


def test_some_steps_are_summed_up_without_the_others(tmp_path: Path) -> None:
    ran = overlapscope("summary", write_recording(tmp_path, ranks=1, steps=9), "--steps", "4:6")
    assert rows(ran.stdout)[1:] == [f"0 {step} {ROW}" for step in (4, 5)]


def test_the_breakdown_adds_up_for_whoever_reads_it(tmp_path: Path) -> None:
    ran = overlapscope("summary", write_recording(tmp_path, ranks=2, steps=9))
    breakdown = re.findall(r"^ (\S.*?|  \S.*?) {2,}([\d.]+) +[\d.]+ to [\d.]+ +[\d.]+ % *([\d.]*) *$", ran.stdout, re.M)
    means = {label: (float(mean), float(path or 0)) for label, mean, path in breakdown}
    assert means == {
        "data wait": (0.50, 0.50),
        "forward": (2.00, 2.00),
        "between phases": (0.50, 0.50),
        "backward": (3.88, 3.78),
        "exposed communication": (1.30, 1.40),
        "  transfer": (1.30, 0.00),
        "copies of gradients": (0.32, 0.32),
        "optimizer": (1.50, 1.50),
        "step": (10.00, 10.00),
    }
    blocks = [both for label, both in means.items() if label not in ("  transfer", "step")]
    assert [round(sum(column), 2) for column in zip(*blocks, strict=True)] == [10.0, 10.0]


def test_a_long_recording_shows_its_ends_and_how_much_is_left_out(tmp_path: Path) -> None:
    ran = overlapscope("summary", write_recording(tmp_path, ranks=1, steps=200))
    assert rows(ran.stdout) == [
        f"0 197 {ROW}",
        *[f"0 {step} {ROW}" for step in (0, 1, 2)],
        "... 194 steps",
        *[f"0 {step} {ROW}" for step in (197, 198, 199)],
    ]


def test_of_many_ranks_the_means_are_shown_and_the_steps_of_some(tmp_path: Path) -> None:
    ran = overlapscope("summary", write_recording(tmp_path, ranks=10, steps=1))
    assert len(rows(ran.stdout)) == 10 + 8


@pytest.mark.parametrize("columns", ["20", "300"])
def test_in_a_pipe_nothing_is_colored_or_cut_off(tmp_path: Path, columns: str) -> None:
    write_recording(tmp_path, ranks=1, steps=2)
    ran = overlapscope("summary", tmp_path, COLUMNS=columns, FORCE_COLOR="", TERM="xterm-256color")
    assert "\x1b" not in ran.stdout
    assert "…" not in ran.stdout
    assert rows(ran.stdout)[-1] == f"0 1 {ROW}"


def test_json_has_every_step_and_null_for_what_is_not_a_number(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=2, steps=50)
    silent = make_rank(tmp_path, 2, world_size=3)
    silent.append(pack_body(Kind.PHASE, index=Phase.FORWARD), 0, 0, 5 * US)
    silent.append(pack_body(Kind.STEP), 0, 0, 9 * US)
    silent.close()
    ran = overlapscope("summary", tmp_path, "--json")
    content = json.loads(ran.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    keys = ["schema", "path", "attempts", "run", "sentence", "breakdown", "communication", "ranks", "steps", "problems"]
    keys.append("machine")
    assert list(content) == keys
    assert content["schema"] == 1
    assert content["path"] == str(tmp_path)
    assert content["run"]["backend"] == "gloo"
    assert len(content["steps"]) == 101
    assert content["steps"][0] == {
        "rank": 0,
        "step": 0,
        "step_time_ns": 10_000_000,
        "data_wait_ns": 500_000,
        "host_loop_ns": 0,
        "buffers_ns": 0,
        "forward_ns": 2_000_000,
        "inter_phase_ns": 500_000,
        "backward_ns": 3_880_000,
        "exposed_ns": 1_300_000,
        "exposed_launch_delay_ns": 0,
        "exposed_straggler_ns": 0,
        "exposed_queued_ns": 0,
        "exposed_transfer_ns": 0,
        "exposed_unattributed_ns": 1_300_000,
        "bucket_copies_ns": 320_000,
        "optimizer_ns": 1_500_000,
        "evaluation_ns": 0,
        "collectives_ns": 0,
        "gc_ns": 0,
        "unattributed_ns": 0,
        "compute_ns": 7_380_000,
        "hidden_ns": 2_400_000,
        "communication_ns": 3_700_000,
        "overlap_ratio": pytest.approx(24 / 37),
        "is_counted": False,
    }
    assert content["steps"][-1]["overlap_ratio"] is None
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    assert content["ranks"][0]["steps_counted"] == 47
    assert content["ranks"][0]["exposed_ns"] == 1_300_000
    assert content["sentence"].startswith(HIDDEN)
    breakdown = content["breakdown"]
    assert (breakdown["ranks"], breakdown["steps"], breakdown["excluded_ranks"]) == (2, 47, [2])
    assert breakdown["excluded"] == [{"why": "warm-up", "steps": [0, 1, 2], "block": None}]
    assert sum(mean["value"] for mean in breakdown["blocks_ns"].values()) == breakdown["step_ns"]["value"] == 10_000_000
    assert breakdown["critical_path_ns"] is None
    assert content["problems"] == []


def test_notes_go_to_stderr_and_are_no_failure(tmp_path: Path) -> None:
    ran = overlapscope("summary", write_recording(tmp_path, ranks=1, close=False))
    assert ran.returncode == 0
    (note,) = ran.stderr.splitlines()
    assert note.startswith(f"note: {tmp_path}/rank_0/events.log: ")
    assert HIDDEN in ran.stdout


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_missing_and_an_unreadable_rank_fail_and_the_rest_is_shown(tmp_path: Path, arguments: list[str]) -> None:
    write_recording(tmp_path, ranks=2, world_size=3)
    log = rank_folder(tmp_path, 1) / EVENTS_FILE
    log.write_bytes(b"garbage")
    ran = overlapscope("summary", tmp_path, *arguments)
    assert ran.returncode == 1
    unreadable, missing = ran.stderr.splitlines()
    assert unreadable.startswith(f"error: {log}: ")
    assert missing.startswith(f"error: {tmp_path}: 1 of 3 ranks ")
    assert HIDDEN in ran.stdout


def test_a_truncated_log_is_named_with_its_offset(tmp_path: Path) -> None:
    log = rank_folder(write_recording(tmp_path, ranks=1), 0) / EVENTS_FILE
    log.write_bytes(log.read_bytes()[:-100])
    size = log.stat().st_size
    ran = overlapscope("summary", tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"error: {log}: ")
    assert f" offset {size};" in ran.stderr
    assert HIDDEN in ran.stdout


def test_a_recording_without_a_finished_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_rank(tmp_path, 0, world_size=1).close()
    assert main(["summary", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["summary", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["ranks"], content["steps"], content["breakdown"]["overlap_ratio"]) == ([], [], None)


def test_facts_that_are_not_known_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recording(tmp_path, ranks=1)
    (rank_folder(tmp_path, 0) / "run.json").write_text("{}")
    assert main(["summary", str(tmp_path)]) == 0
    facts = capsys.readouterr().out.splitlines()[0].split(", ")
    assert facts == [f"{tmp_path}: unknown model", "1 of ? ranks", "one shared clock", "5 steps"]
