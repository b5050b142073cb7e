"""Real training processes for tests: gloo over loopback, a file as rendezvous, a time limit, ended by pid."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIME_LIMIT_S = 120

# Ranks are forked from a server that has imported torch and started no thread: a rank costs a moment, not seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed.optim", "instrumented_ddp"])


def run_ranks(worker: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``worker(*args)`` on each rank of a fresh process group; its results, by rank.

    ``worker`` is a module-level function. A rank that raises has its exception as result.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_rank_main, args=(theirs, worker, rank, world_size, folder, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_result_of(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _result_of(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(TIME_LIMIT_S):
        raise TimeoutError(f"rank {rank} gave no result in {TIME_LIMIT_S} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died") from None


def _rank_main(
    pipe: Connection, worker: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    gc.freeze()  # what was imported before the fork is not garbage, and looking at it would copy its memory
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    try:
        result = worker(*args)
    except Exception as error:
        traceback.print_exc()
        result = error
    pipe.send(result)
    dist.destroy_process_group()
    atexit._run_exitfuncs()  # which a forked process leaves out
