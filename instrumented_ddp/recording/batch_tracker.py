"""Position of a rank in its data, which reveals a rank that skipped a batch although all shapes match.

If one rank skips a batch (``continue``, a batch without a target), its gradients are averaged with those of another
batch from then on, and nothing fails. The symptom is that its data loader, or its loop counter, is one ahead. Positions
of ranks need not be equal, since a rank may have begun elsewhere; only their difference must not change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final

from torch.utils.data import dataloader

from instrumented_ddp.collectives.call_sites import CallSiteTable, read_variables
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.recording.batch_hashes import BatchHashes
from overlapscope.trace.collective_log import UNEVEN_INPUTS, UNKNOWN

_FRAMES_SEARCHED: Final = 5
_MAX_FORWARDS_WITHOUT_BATCH: Final = 4
"""Consecutive forwards without a new batch after which the data loader is considered out of use."""
_MIN_INCREMENTS: Final = 3
"""Increments by one, after equally many forwards each, after which a variable is taken for the loop counter."""


class _Candidate:
    """Variable that may be the loop counter: an iteration may have several forwards, as in a GAN."""

    def __init__(self, value: int) -> None:
        self._value = value
        self._times, self._forwards, self._forwards_before = 0, -1, 0

    def count_increments(self, value: int) -> int:
        """Return the number of latest increments by one with equally many forwards each.

        Args:
            value: its value at a forward.
        """
        self._forwards += 1
        if value != self._value:
            is_alike = value == self._value + 1 and self._forwards == self._forwards_before
            self._times = self._times + 1 if is_alike else int(value == self._value + 1)
            self._value, self._forwards_before, self._forwards = value, self._forwards, 0
        return self._times


class DataPositionTracker:
    """Tracks ``TrainingPosition.batch``, the data of the latest training forward, and reports when batches are fetched.

    Args:
        position: position of this rank.
        call_sites: decides which frames are user code.
    """

    def __init__(self, position: TrainingPosition, call_sites: CallSiteTable) -> None:
        self._position = position
        self._call_sites = call_sites
        self.on_fetch: tuple[Callable[[], None], Callable[[], None]] | None = None
        """Callbacks before and after the training waits for a batch."""
        self.hashes = BatchHashes()
        """Hashes of batches, to compare what ranks are given."""
        self._training_thread: int | None = None
        self._is_fetching = False
        self._yielded: int | None = None
        """Number of batches from the last used data loader; None if it has yielded none since the last forward."""
        self._forwards_without_batch = _MAX_FORWARDS_WITHOUT_BATCH
        """Number of consecutive forwards without a new batch from a data loader."""
        self._had_uneven_inputs = False
        self._counter: tuple[CodeType, str] | None = None
        self._counter_candidates: dict[tuple[CodeType, str], _Candidate] = {}
        self._original: Callable[..., Any] | None = dataloader._BaseDataLoaderIter.__next__
        dataloader._BaseDataLoaderIter.__next__ = self._wrap_next(self._original)  # type: ignore[method-assign]

    @property
    def has_new_batch(self) -> bool:
        """Return whether a data loader has yielded since the position was last updated."""
        return self._yielded is not None

    def on_forward_start(self, *, has_uneven_inputs: bool = False) -> None:
        """Update the position at the start of a training forward.

        Args:
            has_uneven_inputs: whether it is under ``join()``, where ranks may be at different steps.
        """
        self._training_thread = threading.get_ident()
        self._had_uneven_inputs |= has_uneven_inputs  # ranks count different steps from then on
        self.hashes.on_forward_start()
        self._position.flags = UNEVEN_INPUTS if self._had_uneven_inputs else 0
        if self._yielded is not None:
            self._position.batch, self._yielded, self._forwards_without_batch = self._yielded, None, 0
        elif self._forwards_without_batch < _MAX_FORWARDS_WITHOUT_BATCH:
            self._forwards_without_batch += 1  # the latest batch once more
        else:
            self._position.batch = self._read_loop_counter(self._call_sites.find_caller_frame())

    def close(self) -> None:
        """Stop watching data loaders. May be called twice."""
        if self._original is not None:
            dataloader._BaseDataLoaderIter.__next__ = self._original  # type: ignore[method-assign]
            self._original = None

    def _wrap_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_batch(iterator: Any) -> Any:
            # A prefetching thread does not block the training, and a dataset may use a loader internally.
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
            if threading.get_ident() == (self._training_thread or threading.main_thread().ident):
                with suppress(Exception):  # from the user's classes
                    self.hashes.on_fetched(batch)
            return batch

        return next_batch

    def _read_loop_counter(self, frame: FrameType | None) -> int:
        """Return the value of the variable that grows by one with each forward, searched in the nearest frames."""
        for _ in range(_FRAMES_SEARCHED):
            if frame is None:
                break
            if self._counter is None:
                read_variables(frame, partial(self._find_counter, frame.f_code))
            if self._counter is not None and self._counter[0] is frame.f_code:
                value = read_variables(frame, partial(_value_of, self._counter[1]))
                return value if type(value) is int and 0 <= value < UNKNOWN else UNKNOWN
            frame = frame.f_back
        return UNKNOWN

    def _find_counter(self, code: CodeType, variables: Mapping[str, Any]) -> None:
        for name, value in variables.items():
            if type(value) is not int:
                continue
            key = (code, name)
            candidate = self._counter_candidates.setdefault(key, _Candidate(value))
            if candidate.count_increments(value) >= _MIN_INCREMENTS:
                self._counter = key
                self._counter_candidates = {}
                return


def _value_of(name: str, variables: Mapping[str, Any]) -> Any:
    return variables.get(name)
