"""How far a rank is in its data, so that a rank that skipped a batch is found although all shapes are right.

If one rank leaves out a batch (``continue``, a batch without a target), its gradients are averaged with those of
another batch from then on, and nothing fails. The sign is that its data loader, or its loop counter, is one
ahead. Positions of ranks need not be equal, a rank may have begun elsewhere; only their difference must not change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final

from torch.utils.data import dataloader

from instrumented_ddp.collective_log.call_sites import CallSites
from instrumented_ddp.collective_log.position import Position
from instrumented_ddp.collective_log.variables import read_variables
from overlapscope.trace.group_log import UNEVEN_INPUTS, UNKNOWN

_FRAMES_SEARCHED: Final = 5
_MOST_REPEATED: Final = 4
"""Forwards in a row with a batch that a data loader has yielded before; after that the loader is out of use."""
_STEADY_AFTER: Final = 3
"""A variable that grows by one this many times in a row counts the loop."""


class DataPosition:
    """Keeps ``Position.batch``: the data that the newest training forward was given; and says when it is fetched.

    Args:
        position: of this rank.
        call_sites: know which frames are the user's.
    """

    def __init__(self, position: Position, call_sites: CallSites) -> None:
        self._position = position
        self._call_sites = call_sites
        self.on_fetch: tuple[Callable[[], None], Callable[[], None]] | None = None
        """Called before and after the training waits for a batch."""
        self._training_thread: int | None = None
        self._is_fetching = False
        self._yielded: int | None = None
        """Batches from the data loader that was last asked; None if none was since the last forward."""
        self._repeated = _MOST_REPEATED
        """How often in a row a forward was given no new batch of a data loader."""
        self._had_uneven_inputs = False
        self._counter: tuple[CodeType, str] | None = None
        self._growing: dict[tuple[CodeType, str], tuple[int, int]] = {}
        """Candidates for the loop's counter: their newest value, and how often in a row they have grown by one."""
        self._original: Callable[..., Any] | None = dataloader._BaseDataLoaderIter.__next__
        dataloader._BaseDataLoaderIter.__next__ = self._observed(self._original)  # type: ignore[method-assign]

    @property
    def has_new_batch(self) -> bool:
        """Whether a data loader has yielded since the position was taken."""
        return self._yielded is not None

    def forward_begins(self, *, has_uneven_inputs: bool = False) -> None:
        """A forward begins whose gradients are wanted: take the position of the data that it is given.

        Args:
            has_uneven_inputs: it is under ``join()``, where ranks may be at different steps.
        """
        self._training_thread = threading.get_ident()
        self._had_uneven_inputs |= has_uneven_inputs  # ranks count different steps from then on
        self._position.flags = UNEVEN_INPUTS if self._had_uneven_inputs else 0
        if self._yielded is not None:
            self._position.batch, self._yielded, self._repeated = self._yielded, None, 0
        elif self._repeated < _MOST_REPEATED:
            self._repeated += 1  # the newest batch once more
        else:
            self._position.batch = self._count_of_loop(self._call_sites.frame_of_caller())

    def close(self) -> None:
        """Stop watching data loaders. May be called twice."""
        if self._original is not None:
            dataloader._BaseDataLoaderIter.__next__ = self._original  # type: ignore[method-assign]
            self._original = None

    def _observed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_batch(iterator: Any) -> Any:
            # A thread that fetches ahead lets nobody wait, and a dataset may have a loader of its own inside.
            if self.on_fetch is None or self._is_fetching or threading.get_ident() != self._training_thread:
                batch = original(iterator)
            else:
                begins, ends = self.on_fetch
                self._is_fetching = True
                begins()
                try:
                    batch = original(iterator)
                finally:
                    self._is_fetching = False
                    ends()
            self._yielded = getattr(iterator, "_num_yielded", None)
            return batch

        return next_batch

    def _count_of_loop(self, frame: FrameType | None) -> int:
        """The value of the variable that grows by one with each forward, in one of the nearest frames."""
        for _ in range(_FRAMES_SEARCHED):
            if frame is None:
                break
            if self._counter is None:
                read_variables(frame, partial(self._watch, frame.f_code))
            if self._counter is not None and self._counter[0] is frame.f_code:
                value = read_variables(frame, partial(_value_of, self._counter[1]))
                return value if type(value) is int and 0 <= value < UNKNOWN else UNKNOWN
            frame = frame.f_back
        return UNKNOWN

    def _watch(self, code: CodeType, variables: Mapping[str, Any]) -> None:
        for name, value in variables.items():
            if type(value) is not int:
                continue
            key = (code, name)
            before, times = self._growing.get(key, (value, 0))
            times = times + 1 if value == before + 1 else 0
            self._growing[key] = (value, times)
            if times >= _STEADY_AFTER:
                self._counter = key
                self._growing = {}
                return


def _value_of(name: str, variables: Mapping[str, Any]) -> Any:
    return variables.get(name)
