"""Real training processes for tests: gloo over loopback, a file as rendezvous, a time limit, ended by pid."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

TIME_LIMIT_S = 120

# Ranks are forked from a server that has imported torch, and what the tests' modules import: a rank costs a moment, not
# seconds. There is one such server in a process.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.optim",
        "torch.utils.data",
        "instrumented_ddp",
        "overlapscope.trace.recording",
        "pytest",
    ]
)


def run_ranks(worker: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``worker(*args)`` on each rank of a fresh process group; its results, by rank.

    ``worker`` is a module-level function. A rank that raises has its exception as result.
    """
    with Ranks(world_size) as ranks:
        return ranks.call(worker, *args, is_last=True)


def on_loopback(rank: int) -> None:
    """Where ranks are, if nothing else is said."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


class Ranks:
    """The ranks of one process group, which stay for one call after the other until they are closed.

    They share a temporary folder, ``tempfile.gettempdir()``, which is gone with them.

    Args:
        world_size: how many.
        enter: called first on each rank with its number, to bring it to its host.
        backend: of the process group.
    """

    def __init__(
        self, world_size: int, enter: Callable[[int], None] = on_loopback, backend: str | None = "gloo"
    ) -> None:
        self._world_size = world_size
        self._enter = enter
        self._backend = backend
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[tuple[Connection, BaseProcess]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, worker: Callable[..., Any], *args: Any, is_last: bool = False) -> list[Any]:
        """Call a module-level function on each rank; its results, by rank. New ranks are started if there are none.

        After a call in which a rank raised, died or took too long all ranks are closed: the others may wait for it.

        Args:
            worker: called with ``args``. A rank that raises has its exception as result.
            is_last: each rank ends as soon as it has done this.

        Raises:
            RuntimeError: a rank died.
            TimeoutError: a rank gave no result in ``TIME_LIMIT_S``.
        """
        results: list[Any] = [RuntimeError("not called")]
        try:
            if not self._ranks:
                self._start()
            for pipe, _ in self._ranks:
                pipe.send((worker, args))
                if is_last:
                    pipe.send(None)
            results = [_result_of(rank, pipe) for rank, (pipe, _) in enumerate(self._ranks)]
        finally:
            if any(isinstance(result, Exception) for result in results):
                self.close()
        return results

    def close(self) -> None:
        """End the ranks: in their own way, or by force after a while."""
        for pipe, _ in self._ranks:
            pipe.close()
        for _, process in self._ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []
        if self._folder:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._world_size):
            ours, theirs = CONTEXT.Pipe()
            arguments = theirs, rank, self._world_size, self._folder.name, self._enter, self._backend
            process = CONTEXT.Process(target=_rank_main, args=arguments)
            process.start()
            theirs.close()
            self._ranks.append((ours, process))
        # One that is done before another has connected to it would be gone for that one.
        for rank, (pipe, _) in enumerate(self._ranks):
            _result_of(rank, pipe)


def _result_of(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(TIME_LIMIT_S):
        raise TimeoutError(f"rank {rank} gave no result in {TIME_LIMIT_S} s")
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        raise RuntimeError(f"rank {rank} died") from None


def _rank_main(
    pipe: Connection, rank: int, world_size: int, folder: str, enter: Callable[[int], None], backend: str | None
) -> None:
    gc.freeze()  # what was imported before the fork is not garbage, and looking at it would copy its memory
    enter(rank)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    tempfile.tempdir = folder
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    pipe.send("connected")
    with suppress(EOFError):  # the other end is closed
        while task := pipe.recv():
            worker, args = task
            try:
                result = worker(*args)
            except Exception as error:
                traceback.print_exc()
                result = error
            pipe.send(result)
    dist.destroy_process_group()
    atexit._run_exitfuncs()  # which a forked process leaves out
