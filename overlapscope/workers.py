"""Work that is shared out: the same calls on this process, on several of this machine, or on a Dask cluster.

A worker may be killed, by who is short of memory: what it was doing is begun again elsewhere.
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

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")

_ANSWERS_WITHIN_S: Final = 5
_MOST_DEATHS: Final = 3
"""In a row, without anything done in between: then there is no use in trying again."""


class Workers(Protocol):
    """Who calls functions for us."""

    def map(self, function: Callable[[_Given], _Result], given: Sequence[_Given]) -> Iterator[tuple[int, _Result]]:
        """Call a function of a module with each argument.

        Yields:
            The place of an argument, and what came of it, as they come.
        """
        ...

    def rest(self) -> None:
        """Give back the memory that calls have taken; further ones may come."""
        ...


class Here:
    """This process, one call after the other."""

    def map(self, function: Callable[[_Given], _Result], given: Sequence[_Given]) -> Iterator[tuple[int, _Result]]:
        """See ``Workers``."""
        for place, argument in enumerate(given):
            yield place, function(argument)

    def rest(self) -> None:
        """See ``Workers``."""


class _Pool:
    """An executor of ``concurrent.futures``, made anew when its workers are gone."""

    def __init__(self, start: Callable[[], Executor]) -> None:
        self._start = start
        self._executor: Executor | None = None

    def map(self, function: Callable[[_Given], _Result], given: Sequence[_Given]) -> Iterator[tuple[int, _Result]]:
        """See ``Workers``.

        Raises:
            OverlapScopeError: workers die again and again.
        """
        left, deaths = dict(enumerate(given)), 0
        while left:
            self._executor = self._executor or self._start()
            futures: dict[Future[Any], int] = {}
            try:
                futures = {self._executor.submit(function, argument): place for place, argument in left.items()}
                while futures:
                    for future in wait(futures, return_when=FIRST_COMPLETED).done:
                        result = future.result()
                        place = futures.pop(future)
                        del left[place]
                        deaths = 0
                        yield place, result
            except BrokenProcessPool:
                self._executor.shutdown(wait=False)
                self._executor = None
                deaths += 1
                if deaths >= _MOST_DEATHS:
                    message = f"a process that was reading died {deaths} times: is there too little memory?"
                    raise OverlapScopeError(f"{message} Open it on a larger machine") from None
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def rest(self) -> None:
        """See ``Workers``."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()


def processes() -> AbstractContextManager[Workers]:
    """As many processes as there are cores, from the first call on. For commands: they import the main module."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    context = multiprocessing.get_context("spawn")
    return _Pool(lambda: ProcessPoolExecutor(count, mp_context=context))


@contextmanager
def dask(address: str) -> Iterator[Workers]:
    """The workers of a Dask cluster, which see the same folders.

    Args:
        address: of its scheduler, such as ``tcp://10.0.0.1:8786``.

    Raises:
        OverlapScopeError: Dask is not installed, or its scheduler does not answer.
    """
    try:
        from distributed import Client
    except ImportError:
        raise OverlapScopeError("--dask needs Dask: pip install 'overlapscope[dask]'") from None
    try:
        client = Client(address, timeout=_ANSWERS_WITHIN_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise OverlapScopeError(f"--dask {address}: no scheduler answers there ({error})") from None
    with client, _Pool(lambda: client.get_executor(retries=_MOST_DEATHS, pure=False)) as pool:
        yield pool
