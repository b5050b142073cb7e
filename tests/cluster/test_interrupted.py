"""Jobs that somebody ends, started as people start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from overlapscope.diagnosis.attempts import read_attempt
from tests.cli.command_line import COMMAND, REPOSITORY
from tests.cluster.test_unchanged_scripts import ENVIRONMENT, record, script_in, torchrun

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LASTING = """
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank=-1, rendezvous=None):
    init = {} if rendezvous is None else {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **init)
    for step in range(10_000):
        dist.all_reduce(torch.ones(5))
        if step == 20 and dist.get_rank() == 0:
            print("it trains", flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    train() if len(sys.argv) == 1 else mp.spawn(train, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.parametrize(
    ("launcher", "number", "said"),
    [
        pytest.param("torchrun", signal.SIGINT, "Ctrl-C, SIGINT", marks=pytest.mark.nightly),
        ("torchrun", signal.SIGTERM, "SIGTERM"),
        pytest.param("spawn", signal.SIGINT, "Ctrl-C, SIGINT", marks=pytest.mark.nightly),
    ],
)
def test_a_job_that_is_ended_by_a_signal_did_not_fail(
    tmp_path: Path, launcher: str, number: signal.Signals, said: str
) -> None:
    traces, script = tmp_path / "traces", script_in(tmp_path, LASTING)
    command = torchrun(script) if launcher == "torchrun" else [sys.executable, script, tmp_path / "rendezvous"]
    recording = subprocess.Popen(
        [*COMMAND, "record", "-o", str(traces), "--", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    assert recording.stdout is not None
    assert recording.stdout.readline() == "it trains\n"
    if number == signal.SIGINT:
        os.killpg(recording.pid, number)  # as a terminal does
    else:
        recording.send_signal(number)
    _, errors = recording.communicate(timeout=90)
    verdict = read_attempt(traces).verdict
    assert (verdict.kind, verdict.blamed) == ("interrupted", ()), verdict
    assert f"({said})" in verdict.sentence
    assert f"{verdict.sentence}\n\noverlapscope record: " in errors


WITH_TEXT = """
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(5))
if dist.get_rank() == 1:
    {leave}
dist.all_reduce(torch.ones(5))
"""


@pytest.mark.parametrize(
    "leave", ['sys.exit("no data in /data/x")', pytest.param('exit("no data in /data/x")', marks=pytest.mark.nightly)]
)
def test_what_a_rank_says_when_it_exits_is_in_the_verdict(tmp_path: Path, leave: str) -> None:
    traces, script = tmp_path / "traces", script_in(tmp_path, WITH_TEXT.format(leave=leave))
    record(traces, *torchrun(script))
    verdict = read_attempt(traces).verdict
    assert (verdict.kind, verdict.blamed) == ("failed", (1,))
    assert verdict.sentence.endswith(": no data in /data/x.")
    assert f" {script}:10 " in verdict.sentence
