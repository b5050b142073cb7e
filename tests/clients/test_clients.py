"""Hugging Face's Trainer, accelerate and Lightning on two ranks: they train as with torch's class, and are recorded.

The scripts are ordinary ones. Each runs twice, and the only difference is the class that wraps the model: recorded, as
its users start it; with torch's class, in ranks that are forked, because importing a framework takes longer than all
steps. With a launcher of its own Lightning runs once: there it is the recording that could be missing.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from overlapscope.trace.recording import read_trace
from tests.cli.command_line import REPOSITORY, overlapscope
from tests.clients.launch import TORCHRUN, record, run_forked

RECIPES = REPOSITORY / "examples" / "recipes"
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def train_with_both_classes(script: str, folder: Path, *options: str) -> set[str]:
    """Train with torch's class and with ours, the second recorded into ``folder / "traces"``.

    Returns:
        The names of the parameters.
    """
    for name in ("torch", "instrumented"):
        (folder / name).mkdir()
    run_forked([str(RECIPES / script), str(folder / "torch"), *options])
    command = [*TORCHRUN, str(RECIPES / script), str(folder / "instrumented"), "--instrumented", *options]
    record(command, folder / "traces")
    states = [torch.load(folder / name / f"rank_{rank}.pt") for name in ("torch", "instrumented") for rank in (0, 1)]
    expected = states[0]
    for state in states[1:]:
        assert state.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(state[name], expected[name])]
        assert different == []
    return {name for name in expected if not name.endswith(BUFFERS)}


def check_recording(traces: Path, *, parameters: set[str], steps: int) -> None:
    """Two ranks have recorded so many optimizer steps, each of two passes of which one is not reduced."""
    told = overlapscope("summary", "--json", traces)
    assert told.returncode == 0, told.stderr
    summary = json.loads(told.stdout)
    assert [(step["rank"], step["step"]) for step in summary["steps"]] == [(r, s) for r in (0, 1) for s in range(steps)]
    for rank in (0, 1):
        assert sum(step["exposed_ns"] for step in summary["steps"] if step["rank"] == rank) > 0

    trace = read_trace(traces)
    assert trace.problems == ()
    assert set(trace.plans["name"]) == parameters
    backward = trace.phases.query("phase == 'backward'")
    assert (backward.groupby(["rank", "step", "no_sync"]).size() == 1).all()
    assert len(backward) == 2 * steps * 2
    reduced = trace.collectives.query("op == 'all_reduce'")
    assert reduced["end_ns"].notna().all()
    assert (reduced.groupby(["rank", "model"])["bucket"].nunique() > 1).all()


@pytest.mark.nightly
@pytest.mark.cluster
def test_hugging_face_trainer(tmp_path: Path) -> None:
    parameters = train_with_both_classes("train_with_trainer.py", tmp_path)
    check_recording(tmp_path / "traces", parameters=parameters, steps=8)


@pytest.mark.nightly
@pytest.mark.cluster
def test_accelerate(tmp_path: Path) -> None:
    parameters = train_with_both_classes("train_with_accelerate.py", tmp_path)
    check_recording(tmp_path / "traces", parameters=parameters, steps=12)


@pytest.mark.nightly
@pytest.mark.cluster
def test_lightning_with_its_own_launcher(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPES / "train_with_lightning.py"), str(tmp_path), "--instrumented"]
    record(command, tmp_path / "traces")
    first, second = (torch.load(tmp_path / f"rank_{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first if not name.endswith(BUFFERS))
    parameters = {name for name in first if not name.endswith(BUFFERS)}
    check_recording(tmp_path / "traces", parameters=parameters, steps=12)


@pytest.mark.nightly
@pytest.mark.cluster
def test_lightning_with_torchrun_and_unused_parameters(tmp_path: Path) -> None:
    parameters = train_with_both_classes("train_with_lightning.py", tmp_path, "--find-unused-parameters")
    assert "unused.weight" in parameters
    check_recording(tmp_path / "traces", parameters=parameters, steps=12)


def test_the_documented_lines_are_those_of_the_scripts() -> None:
    sections = (REPOSITORY / "docs" / "frameworks.md").read_text().split("\n## ")[1:]
    documented = set()
    for section in sections:
        for script in set(re.findall(r"train_with_\w+\.py", section)):
            lines = {line.strip() for line in (RECIPES / script).read_text().splitlines()}
            (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
            assert [line for line in block.splitlines() if line.strip() not in lines] == []
            documented.add(script)
    assert documented == {path.name for path in RECIPES.glob("train_with_*.py")} - {"train_with_fsdp2.py"}  # no change
