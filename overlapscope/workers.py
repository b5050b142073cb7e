"""Parallel map: in this process, in a pool of processes on this machine, or on a Dask cluster.

A worker may be killed, for example by the out-of-memory killer: its task is then run again by another one.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, TypeVar

from overlapscope.errors import OverlapScopeError

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

_CONNECT_TIMEOUT_S: Final = 5
_MAX_DEATHS_IN_A_ROW: Final = 3
"""Number of worker deaths in a row, with no task done in between, after which there is no further retry."""


class Workers(Protocol):
    """Interface of an executor that applies a function to many arguments."""

    def map(
        self, function: Callable[[_Argument], _Result], arguments: Sequence[_Argument]
    ) -> Iterator[tuple[int, _Result]]:
        """Call a function with each argument; it has to be a module-level function, so that it can be pickled.

        Yields:
            (index of an argument, its result), in order of completion.
        """
        ...

    def rest(self) -> None:
        """Release the memory that calls have taken; further calls are possible."""
        ...


class SerialWorkers:
    """Serial executor: this process, one call after the other."""

    def map(
        self, function: Callable[[_Argument], _Result], arguments: Sequence[_Argument]
    ) -> Iterator[tuple[int, _Result]]:
        """Call a function with each argument, in order."""
        for index, argument in enumerate(arguments):
            yield index, function(argument)

    def rest(self) -> None:
        """Do nothing: calls leave no memory behind."""


class _PoolWorkers:
    """Executor of ``concurrent.futures`` that is started again after its workers have died."""

    def __init__(self, start: Callable[[], Executor]) -> None:
        self._start = start
        self._executor: Executor | None = None

    def map(
        self, function: Callable[[_Argument], _Result], arguments: Sequence[_Argument]
    ) -> Iterator[tuple[int, _Result]]:
        """Call a function with each argument in worker processes.

        Raises:
            OverlapScopeError: workers died ``_MAX_DEATHS_IN_A_ROW`` times in a row.
        """
        pending, deaths = dict(enumerate(arguments)), 0
        while pending:
            self._executor = self._executor or self._start()
            futures: dict[Future[Any], int] = {}
            try:
                futures = {self._executor.submit(function, argument): index for index, argument in pending.items()}
                while futures:
                    for future in wait(futures, return_when=FIRST_COMPLETED).done:
                        result = future.result()
                        index = futures.pop(future)
                        del pending[index]
                        deaths = 0
                        yield index, result
            except BrokenProcessPool:
                self._executor.shutdown(wait=False)
                self._executor = None
                deaths += 1
                if deaths >= _MAX_DEATHS_IN_A_ROW:
                    message = f"a process that was reading died {deaths} times: is there too little memory?"
                    raise OverlapScopeError(f"{message} Open it on a larger machine") from None
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def rest(self) -> None:
        """Stop the workers; the next call starts others."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def __enter__(self) -> _PoolWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()


def processes() -> AbstractContextManager[Workers]:
    """Create a pool of as many processes as there are cores, started at the first call.

    For commands only: processes are spawned, and so import the main module.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    context = multiprocessing.get_context("spawn")
    return _PoolWorkers(lambda: ProcessPoolExecutor(count, mp_context=context))


@contextmanager
def dask(address: str) -> Iterator[Workers]:
    """Connect to a Dask cluster whose workers see the same folders.

    Args:
        address: address of its scheduler, such as ``tcp://10.0.0.1:8786``.

    Raises:
        OverlapScopeError: Dask is not installed, or the scheduler does not answer.
    """
    try:
        from distributed import Client
    except ImportError:
        raise OverlapScopeError("--dask needs Dask: pip install 'overlapscope[dask]'") from None
    try:
        client = Client(address, timeout=_CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise OverlapScopeError(f"--dask {address}: no scheduler answers there ({error})") from None
    with client, _PoolWorkers(lambda: client.get_executor(retries=_MAX_DEATHS_IN_A_ROW, pure=False)) as pool:
        yield pool
