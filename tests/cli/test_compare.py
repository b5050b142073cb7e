"""``overlapscope compare``: what it prints, in which form, and how it ends."""

from __future__ import annotations

import json
import random
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
    ran = overlapscope("compare", recordings["base"], recordings["same"], "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    content = json.loads(ran.stdout)
    assert content["outcomes"] == {"step": "no difference seen"}
    base = content["base"]
    assert (base["path"], base["steps"], base["ranks"]) == (str(recordings["base"]), STEPS - 3, 2)
    assert [(each["why"], each["steps"]) for each in base["excluded"]] == [("warm-up", [0, 1, 2])]


def test_a_slower_program_is_one(recordings: dict[str, Path]) -> None:
    ran = overlapscope("compare", recordings["base"], recordings["slower"], "--json")
    assert (ran.returncode, ran.stderr) == (3, "")
    content = json.loads(ran.stdout)
    assert content["outcomes"] == {"step": "slower"}
    step, forward = (content["parts"][name]["mean"] for name in ("step", "forward"))
    assert step["share"]["value"] == pytest.approx(0.05, abs=0.002)
    assert 0.03 <= step["share"]["low"] < step["share"]["value"]
    assert forward["difference_ns"]["value"] == pytest.approx(step["difference_ns"]["value"])
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
    ran = overlapscope("compare", base, base, "--base-steps", ":20", "--new-steps", "20:", "--json")
    assert ran.returncode == 0
    content = json.loads(ran.stdout)
    assert [content[side]["choice"]["first"] for side in ("base", "new")] == [None, 20]
    assert [content[side]["steps"] for side in ("base", "new")] == [17, 20]
    assert content["settings"] == []


def test_markdown_and_html_are_other_forms_of_the_same(recordings: dict[str, Path]) -> None:
    text, markdown, html = (
        overlapscope("compare", recordings["base"], recordings["slower"], "--format", form)
        for form in ("text", "md", "html")
    )
    assert text.returncode == markdown.returncode == html.returncode == 3
    verdict = next(line for line in text.stdout.splitlines() if line.startswith("Slower"))
    assert f"**{verdict}**" in markdown.stdout.splitlines()
    assert html.stdout.startswith("<!DOCTYPE html>")


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


def test_a_missing_rank_is_no_pass_either(tmp_path: Path, recordings: dict[str, Path]) -> None:
    partial = write_recording(tmp_path / "partial", ranks=2, steps=30)
    log = rank_folder(partial, 1) / EVENTS_FILE
    log.write_bytes(b"garbage")
    ran = overlapscope("compare", recordings["base"], partial)
    assert ran.returncode == 1
    assert f"error: {log}: " in ran.stderr
    assert ran.stdout.startswith("Base: ")
