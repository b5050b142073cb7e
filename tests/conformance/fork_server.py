"""A process that has imported PyTorch's tests once, and forks a session for each test that it is asked to run.

Both ends of the protocol are here, JSON in lines: the server says ``{"tests": [names]}`` when it is ready, then answers
each request (the fields of ``forked_session.Session``) with what ``run_forked`` returns. It ends with its input.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

ENVIRONMENT = {
    "BACKEND": "gloo",
    "WORLD_SIZE": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What torch's test modules read when they are imported; two ranks on the CPU, whatever the machine has."""

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a test ended."""

    status: Literal["passed", "failed", "skipped", "timed out"]
    seconds: float
    log: str

    @property
    def reason(self) -> str:
        """The last line of the log that names an error."""
        errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", self.log, re.MULTILINE)
        return errors[-1] if errors else "no error in the log"


class ForkServer:
    """The server, seen from the process that asks.

    Args:
        log: receives what the server itself prints.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.fork_server"],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,  # Ctrl-C reaches pytest alone, which then closes the server's input
            )
        self.ddp_tests: list[str] = self._answer()["tests"]

    def run(self, test: str, *, ddp_class: str, folder: Path) -> Outcome:
        """Run one test with a class in place of torch's; its log, files and recording go into an empty folder."""
        assert self._process.stdin is not None
        request = {"test": test, "ddp_class": ddp_class, "folder": str(folder)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return Outcome(**self._answer())

    def close(self) -> None:
        """End the server, and a test that may be running in it."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server ended:\n{self._log.read_text()}")
        return json.loads(line)


def serve() -> None:
    """Answer requests until there are no more."""
    # Here, because the asking side must not wait for these imports.
    from tests.conformance.forked_session import AbandonedError, Session, run_forked
    from tests.conformance.torch_suite import ddp_tests

    import_module("instrumented_ddp")  # which sessions then need not
    gc.collect()
    gc.freeze()
    print(json.dumps({"tests": ddp_tests()}), flush=True)
    for line in sys.stdin:
        try:
            outcome = run_forked(Session(**json.loads(line)), sys.stdin.fileno())
        except AbandonedError:
            return
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    serve()
