"""Coordination of ranks: rank 0 gives orders, all ranks carry them out, and rank 0 collects the outcome."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from meeting import TASK_VARIABLE, connect

from overlapscope.cli import child_process
from overlapscope.trace.schema import rank_folder

SCRIPTS: Final = Path(__file__).parent
LOG_FILE: Final = "trial.log"
RESULT_FILE: Final = "trial.json"
_POLL_INTERVAL_S: Final = 0.05
_LAST: Final = "last"
_LEAVE_TIMEOUT: Final = timedelta(seconds=5)
"""Time for ranks to leave."""
_LAUNCHERS_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, kw_only=True)
class Order:
    """Order of rank 0 to run a script on some ranks."""

    number: int
    script: str
    folder: str
    ranks: int
    backend: str
    settings: dict[str, Any]
    detail: str | None = None
    """Level of detail of the recording; None records nothing."""


class Rank:
    """This rank among the others of the job."""

    def __init__(self) -> None:
        self.number, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = connect(is_host=self.number == 0 and os.environ.get(_LAUNCHERS_STORE) != str(True))
        self.store.set(f"host/{self.number}", socket.gethostname())
        self.given = 0
        """Number of orders given so far."""

    def hosts(self) -> tuple[str, ...]:
        """Return the host names of all ranks."""
        return tuple(self.store.get(f"host/{rank}").decode() for rank in range(self.size))

    def run_orders(self) -> None:
        """Carry out rank 0's orders until there are no more, or rank 0 is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C does
        with suppress(dist.DistError, RuntimeError):
            number = 0
            while (text := self.store.get(f"order/{number}").decode()) != _LAST:
                order = Order(**json.loads(text))
                if self.number < order.ranks:
                    self.run_order(order)
                number += 1
            self.store.set(f"left/{self.number}", "")

    def send_order(self, **order: Any) -> Order:
        """Give the others the next order."""
        given = Order(number=self.given, **order)
        self.store.set(f"order/{given.number}", json.dumps(asdict(given)))
        self.given += 1
        return given

    def shut_down(self) -> None:
        """Order the others to stop whatever they are doing, and wait for them: the store may be in this process."""
        self.store.set(f"failed/{self.given - 1}", "")
        self.store.set(f"unseen/{self.given - 1}", "[]")
        self.store.set(f"order/{self.given}", _LAST)
        with suppress(dist.DistError, RuntimeError):  # some may have been killed
            self.store.wait([f"left/{rank}" for rank in range(1, self.size)], _LEAVE_TIMEOUT)

    def run_order(self, order: Order) -> None:
        """Run this rank's process of a trial, report how it ended, and send its recording if rank 0 can't read it."""
        failure = self._run(order)
        if failure:
            self.store.set(f"failed/{order.number}", "")
        self.store.set(f"end/{order.number}/{self.number}", failure)
        if self.number > 0:
            unseen = json.loads(self.store.get(f"unseen/{order.number}"))
            if self.number in unseen:
                self.store.set(
                    f"recording/{order.number}/{self.number}", pack_recording(Path(order.folder), self.number)
                )

    def _run(self, order: Order) -> str:
        """Run the process of a trial; return why it failed, or an empty text."""
        folder = Path(order.folder)
        folder.mkdir(parents=True, exist_ok=True)
        task = {
            "number": order.number,
            "rank": self.number,
            "ranks": order.ranks,
            "backend": order.backend,
            "result": str(folder / RESULT_FILE),
            "settings": order.settings,
        }
        environment = child_process.environment_without_recording()
        if order.detail is not None:
            environment = child_process.recording_environment(folder, order.detail, on_incident="raise")  # type: ignore[arg-type]
        log = folder / f"{self.number}-{LOG_FILE}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPTS / order.script)],
                env={
                    **environment,
                    TASK_VARIABLE: json.dumps(task),
                    "RANK": str(self.number),
                    "WORLD_SIZE": str(order.ranks),
                },
                stdout=output,
                stderr=output,
            )
            try:
                while process.poll() is None:
                    if self.store.check([f"failed/{order.number}"]):
                        process.kill()
                    time.sleep(_POLL_INTERVAL_S)
            finally:
                process.kill()
                process.wait()
        if not process.returncode:
            return ""
        if process.returncode == -signal.SIGKILL and self.store.check([f"failed/{order.number}"]):
            return ""  # another rank has failed
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        ended = f"rank {self.number} ended with exit code {process.returncode}"
        return last_error_message(lines) or ": ".join([ended, *lines[-1:]])

    def failure_of(self, order: Order) -> str:
        """Return why a trial failed, by the first rank that reports a failure itself; empty if it succeeded."""
        ends = [self.store.get(f"end/{order.number}/{rank}").decode() for rank in range(order.ranks)]
        return next(filter(None, ends), "")

    def collect_recordings(self, order: Order) -> None:
        """Collect the recordings of all ranks here, also of those that share no disk with this one."""
        folder = Path(order.folder)
        unseen = [rank for rank in range(1, order.ranks) if not rank_folder(folder, rank).exists()]
        self.store.set(f"unseen/{order.number}", json.dumps(unseen if order.detail is not None else []))
        if order.detail is not None:
            for rank in unseen:
                with tarfile.open(fileobj=io.BytesIO(self.store.get(f"recording/{order.number}/{rank}"))) as archive:
                    archive.extractall(folder, filter="data")


def pack_recording(folder: Path, rank: int) -> bytes:
    """Pack the recording of a rank for sending; an empty archive if it left none."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        own = rank_folder(folder, rank)
        if own.exists():
            tar.add(own, own.name)
    return archive.getvalue()


def last_error_message(lines: list[str]) -> str:
    """Return the message in the last line of a traceback; empty without one."""
    errors = [line for line in lines if "Error: " in line and not line.startswith(" ")]
    return errors[-1].partition("Error: ")[2] if errors else ""
