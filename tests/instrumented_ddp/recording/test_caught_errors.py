"""Exceptions that do not end a process are written wherever they pass through, each once, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from overlapscope.diagnosis.caught_errors import read_caught_errors
from overlapscope.diagnosis.evidence import CaughtError

SCRIPT = """
import concurrent.futures, logging, multiprocessing, os, pathlib, sys, threading, traceback
from instrumented_ddp.collectives.call_sites import LoopTracker
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.recording.caught_errors import CaughtErrors
from contextlib import nullcontext, suppress
import torch

def fail(kind):
    raise kind("no shard")

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return 2 * value

    @staticmethod
    def backward(ctx, gradient):
        fail(ZeroDivisionError)

def retry(kind, times):
    for _ in range(times):
        try:
            fail(kind)
        except kind as error:
            with suppress(kind), caught.watching_forward(nullcontext()):
                raise
            logging.exception("once more")

position = TrainingPosition(step=3)
caught = CaughtErrors(pathlib.Path(sys.argv[1]), LoopTracker(position))
before = threading.excepthook
said = []
threading.excepthook = lambda args: (said.append(args.exc_type), before(args))
thread = threading.Thread(target=fail, args=(ValueError,), name="loader")
thread.start()
thread.join()
with concurrent.futures.ThreadPoolExecutor() as pool:
    future = pool.submit(fail, KeyError)
assert isinstance(future.exception(), KeyError) and said == [ValueError]
child = multiprocessing.get_context("fork").Process(target=fail, args=(OSError,), name="reader")
child.start()
child.join()
position.step = 4
retry(IndexError, 5)
with suppress(ZeroDivisionError):
    Doubled.apply(torch.ones(1, requires_grad=True)).backward()
try:
    fail(KeyboardInterrupt)
except KeyboardInterrupt:
    traceback.print_exc()
try:
    try:
        fail(LookupError)
    except LookupError as error:
        raise RuntimeError("wrapped") from error
except RuntimeError:
    traceback.format_exc()
def look():
    caught.note_being_handled()

for _ in range(2):
    try:
        fail(BufferError)
    except BufferError as error:
        for name in ("watcher", "overlapscope-background"):
            watcher = threading.Thread(target=look, name=name)
            watcher.start()
            watcher.join()
        keep = error
caught.note_being_handled()
caught.close()
"""
LINE = SCRIPT.splitlines().index('    raise kind("no shard")') + 1


def test_what_does_not_end_a_process_is_written_once_each_with_its_line_and_step(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "rank_0"
    folder.mkdir()
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "wrapped" not in ran.stderr
    assert "once more" in ran.stderr
    found = {one.failure.type: one for one in read_caught_errors(folder, [])}
    assert {kind: summary(one) for kind, one in found.items()} == {
        "ValueError": ("thread", "loader", "", 3, 1),
        "KeyError": ("future", "ThreadPoolExecutor-0_0", "", 3, 1),
        "OSError": ("process", "", "reader", None, 1),
        "IndexError": ("forward", "", "", 4, 5),
        "ZeroDivisionError": ("backward", "", "", 4, 1),
        "RuntimeError": ("caught", "", "", 4, 1),
        "BufferError": ("caught", "", "", 4, 2),
    }
    lines = {kind: one.failure.call_site and one.failure.call_site.line for kind, one in found.items()}
    assert {lines[kind] for kind in ("ValueError", "KeyError", "OSError", "IndexError", "ZeroDivisionError")} == {LINE}


def summary(one: CaughtError) -> tuple[str, str, str, int | None, int]:
    return one.how, one.thread, one.process, one.last_step, one.count_in_step
