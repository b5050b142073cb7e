"""``overlapscope compare``: what it prints, in which form, and how it ends."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from overlapscope.trace.schema import EVENTS_FILE, rank_folder
from tests.cli.command_line import overlapscope
from tests.synthetic import write_recording, write_straggling_recording

STEPS = 40


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, the same once more, and one with a forward that takes half a millisecond longer, 5 % of a step."""
    folder = tmp_path_factory.mktemp("recordings")
    return {
        name: recorded(folder / name, seed, later_us)
        for name, seed, later_us in (("base", 0, 0), ("same", 1, 0), ("slower", 2, 500))
    }


def recorded(folder: Path, seed: int, later_us: int, steps: int = STEPS) -> Path:
    luck = random.Random(seed)
    late_us = [later_us + luck.randrange(100) for _ in range(steps)]
    return write_straggling_recording(folder, late_us=lambda _, step: late_us[step], ranks=2, steps=steps)


def test_the_same_program_is_no_regression(recordings: dict[str, Path]) -> None:
    ran = overlapscope("compare", recordings["base"], recordings["same"])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(
        f"Base: {recordings['base']}: GPT, means of 37 steps of 2 ranks, excluded: 3 warm-up steps (0-2)"
    )
    assert "No significant difference; this many steps would show one of 1." in ran.stdout


def test_a_slower_program_is_one(recordings: dict[str, Path]) -> None:
    ran = overlapscope("compare", recordings["base"], recordings["slower"])
    assert (ran.returncode, ran.stderr) == (3, "")
    (share, low) = re.search(
        r"^Slower: 10\.0 ms → 10\.5 ms, \+([\d.]+) % .*interval \+([\d.]+) ", ran.stdout, re.M
    ).groups()
    assert float(share) == pytest.approx(5.0, abs=0.2)
    assert 3 <= float(low) < float(share)
    assert "The difference is in forward (+" in ran.stdout
    assert overlapscope("compare", recordings["slower"], recordings["base"]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--fail-above", "3%"], 3),
        (["--fail-above", "6 %"], 0),
        (["--only", "exposed,data_wait"], 0),
        (["--only", "exposed,forward"], 3),
        (["--only", "compute", "--fail-above", "3.5%"], 3),
    ],
)
def test_what_counts_and_how_much_is_for_the_user_to_say(
    recordings: dict[str, Path], arguments: list[str], code: int
) -> None:
    assert overlapscope("compare", recordings["base"], recordings["slower"], *arguments).returncode == code


def test_ranges_of_one_recording_are_compared(recordings: dict[str, Path]) -> None:
    base = recordings["base"]
    ran = overlapscope("compare", base, base, "--base-steps", ":20", "--new-steps", "20:")
    assert ran.returncode == 0
    assert f"Base: {base} steps 0 to 19: " in ran.stdout
    assert f"New: {base} steps from 20: " in ran.stdout
    assert "Settings" not in ran.stdout


def test_markdown_has_every_table_and_is_no_different_otherwise(recordings: dict[str, Path]) -> None:
    text, markdown = (
        overlapscope("compare", recordings["base"], recordings["slower"], "--format", form) for form in ("text", "md")
    )
    assert markdown.returncode == text.returncode == 3
    lines = markdown.stdout.splitlines()
    assert lines[0] == "## OverlapScope: comparison"
    verdict = next(line for line in text.stdout.splitlines() if line.startswith("Slower"))
    assert f"**{verdict}**" in lines
    titles = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    assert titles == [
        "Step-time breakdown, in milliseconds",
        "Buckets in the middle 80 % of steps, in milliseconds",
        "Steps that differ most, in milliseconds",
    ]
    for title in titles:
        assert title in text.stdout
    tables = [line for line in lines if line.startswith("|")]
    assert sum(set(line) <= set("|:- ") for line in tables) == len(titles)


@pytest.mark.parametrize("columns", ["20", "300"])
def test_in_a_pipe_no_number_is_cut_off(recordings: dict[str, Path], columns: str) -> None:
    ran = overlapscope("compare", recordings["base"], recordings["slower"], COLUMNS=columns, FORCE_COLOR="")
    assert "…" not in ran.stdout
    assert "\x1b" not in ran.stdout


def test_the_json_adds_up_and_says_what_became_of_what_counts(recordings: dict[str, Path]) -> None:
    ran = overlapscope("compare", recordings["base"], recordings["slower"], "--json", "--only", "step,exposed")
    assert ran.returncode == 3
    content = json.loads(ran.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content["outcomes"] == {"step": "slower", "exposed": "no difference seen"}
    breakdown = json.loads(overlapscope("summary", recordings["base"], "--json").stdout)["breakdown"]
    means = {name: part["mean"] for name, part in content["parts"].items()}
    assert means["step"]["base_ns"] == breakdown["step_ns"]["value"]
    assert {name: means[name]["base_ns"] for name in breakdown["blocks_ns"]} == {
        name: block["value"] for name, block in breakdown["blocks_ns"].items()
    }
    differences = [means[name]["difference_ns"]["value"] for name in breakdown["blocks_ns"]]
    assert sum(differences) == pytest.approx(means["step"]["difference_ns"]["value"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fail-above", "3"], "'3' is no percentage: give one like 3%"),
        (["--base-steps", "10-20"], "'10-20' is no range of steps: give one like 10:50, 10: or :50"),
        (["--only", "step,bogus"], "'bogus' is no part of a step: give some of step, data_wait, "),
        (["--json", "--format", "md"], "not allowed with"),
    ],
)
def test_wrong_arguments_are_explained(recordings: dict[str, Path], arguments: list[str], said: str) -> None:
    ran = overlapscope("compare", recordings["base"], recordings["same"], *arguments)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_too_few_steps_are_no_pass(tmp_path: Path, recordings: dict[str, Path]) -> None:
    short = recorded(tmp_path / "short", 0, 0, steps=10)
    ran = overlapscope("compare", recordings["base"], short)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        f"overlapscope compare: {short}: 7 steps to compare (3 warm-up steps (0-2) excluded); "
        "a comparison takes 8 or more on each side\n"
    )


def test_a_missing_rank_is_no_pass_either(tmp_path: Path, recordings: dict[str, Path]) -> None:
    partial = write_recording(tmp_path / "partial", ranks=2, steps=30)
    log = rank_folder(partial, 1) / EVENTS_FILE
    log.write_bytes(b"garbage")
    ran = overlapscope("compare", recordings["base"], partial)
    assert ran.returncode == 1
    assert f"error: {log}: not an OverlapScope event log" in ran.stderr
    assert "No significant difference" in ran.stdout or "Faster" in ran.stdout


def test_without_a_recording_there_is_one_line(tmp_path: Path, recordings: dict[str, Path]) -> None:
    ran = overlapscope("compare", recordings["base"], tmp_path / "none")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(f"overlapscope compare: {tmp_path}/none: no such folder; record one with")


def test_a_recording_against_itself_is_refused(recordings: dict[str, Path]) -> None:
    ran = overlapscope("compare", recordings["base"], recordings["base"])
    assert ran.returncode == 1
    assert "both sides are the same steps; choose some with --base-steps and --new-steps" in ran.stderr
