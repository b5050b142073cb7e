"""One test of PyTorch's suite in a forked session of its own: its class, environment, files and end touch no other."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.nn.parallel

from overlapscope.trace.environment import TRACE_VARIABLE
from tests.conformance.cuda_shim import install_cuda_shim
from tests.conformance.torch_suite import TorchSuite, distributed_test, needs_gpu

TIME_LIMIT_S = 120
LOG_TAIL_CHARACTERS = 8000

STATUS_OF_EXIT_CODE = {0: "passed", 1: "failed", 2: "skipped"}
PASSED, FAILED, SKIPPED = STATUS_OF_EXIT_CODE


@dataclass(frozen=True, kw_only=True)
class Session:
    """What to run, and where."""

    test: str
    ddp_class: str
    """``module:Class``, put in place of torch's class."""
    folder: str
    """An empty folder for the log, temporary files and the recording."""


class AbandonedError(Exception):
    """Nobody waits for the outcome any more."""


def run_forked(session: Session, requests_fd: int) -> dict[str, str | float]:
    """Run one test, and end whatever is left of its processes.

    Args:
        requests_fd: is readable before the session is over only if the other end is closed.

    Returns:
        ``status`` (passed, failed, skipped, timed out), ``seconds``, and ``log``, the end of all that was printed.

    Raises:
        AbandonedError: the other end of ``requests_fd`` is closed.
    """
    folder = Path(session.folder)
    begin = time.monotonic()
    with (folder / "log.txt").open("w+", errors="replace") as log:
        pid = os.fork()
        if pid == 0:
            _run_and_exit(lambda: _run_test(session, folder), log.fileno())
        pidfd = os.pidfd_open(pid)
        ready, _, _ = select.select([pidfd, requests_fd], [], [], TIME_LIMIT_S)
        os.close(pidfd)
        # The session's pid is not reaped yet, so that no other process group can have this number.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, wait_status = os.waitpid(pid, 0)
        if requests_fd in ready:
            raise AbandonedError
        exit_code = os.waitstatus_to_exitcode(wait_status)
        log.seek(0)
        return {
            "status": STATUS_OF_EXIT_CODE.get(exit_code, "failed") if ready else "timed out",
            "seconds": time.monotonic() - begin,
            "log": log.read()[-LOG_TAIL_CHARACTERS:],
        }


def _run_and_exit(run: Callable[[], int], log_fd: int) -> None:
    """The life of the forked process."""
    exit_code = FAILED
    try:
        os.setsid()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        exit_code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _run_test(session: Session, folder: Path) -> int:
    os.environ[TRACE_VARIABLE] = str(folder / "trace")
    temporary = folder / "temporary"
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    ddp_class = _substitute(session.ddp_class)
    if needs_gpu(session.test):
        install_cuda_shim(ddp_class, int(os.environ["WORLD_SIZE"]))

    result = unittest.TestResult()
    TorchSuite(session.test).run(result)
    for _, message in [*result.errors, *result.failures, *result.skipped]:
        print(message)
    if result.errors or result.failures:
        return FAILED
    return SKIPPED if result.skipped else PASSED


def _substitute(ddp_class: str) -> type:
    """Put a class where the tests, and all of torch that they use, find DistributedDataParallel."""
    module_name, class_name = ddp_class.split(":")
    # Imported first: it derives from torch's class.
    substitute: type = getattr(importlib.import_module(module_name), class_name)
    for namespace in (torch.nn.parallel, torch.nn.parallel.distributed, distributed_test):
        namespace.DistributedDataParallel = substitute
    return substitute
