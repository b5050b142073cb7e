"""The code in C lets go of what it was given and of what it has allocated, also after errors."""

from __future__ import annotations

import gc
import mmap
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from instrumented_ddp import native
from overlapscope.trace.schema import HEADER_BYTES

pytestmark = pytest.mark.skipif(not native.IS_NATIVE, reason="the code in C could not be compiled here")

SLOTS, PARAMETERS = 4, 8
BODY = bytes(range(28))
REPETITIONS = 100
LEAST_OBJECT_BYTES = 16

Act = Callable[[], Any]


class Listener:
    """What is called: for room, or with a bucket or a parameter."""

    def __call__(self, number: int) -> int:
        return HEADER_BYTES + (number - 1) % SLOTS * 64

    def fail(self, number: int) -> int:
        raise RuntimeError(number)


def make_store(make: Callable[..., Any], make_room: Callable[[int], int]) -> Any:
    store = make(mmap.mmap(-1, HEADER_BYTES + SLOTS * 64), make_room)
    store.capacity = SLOTS
    return store


def make_countdown(on_bucket_ready: Callable[[int], object], other: Callable[[int], object]) -> Any:
    ready_ns = memoryview(bytearray(8 * PARAMETERS)).cast("q")
    counter = native.Countdown(ready_ns, on_bucket_ready, other, other, other)
    counter.adopt([range(4), range(4, PARAMETERS)], (0,))
    return counter


def acts(listener: Listener) -> Iterator[tuple[str, Act]]:
    """What is done with each type, by name; what fails does so every time."""
    records = make_store(native.RecordStore, listener)
    entries = make_store(native.EntryStore, listener)
    full = make_store(native.RecordStore, listener.fail)
    counter = make_countdown(listener, listener)
    failing = make_countdown(listener.fail, listener.fail)
    hooks = [counter.make_hook(index) for index in range(PARAMETERS)]
    elsewhere = mmap.mmap(-1, HEADER_BYTES + SLOTS * 64)

    def backward() -> None:
        counter.is_expecting = True
        for hook in hooks:
            hook(None)
        assert counter.order == list(range(PARAMETERS))
        hooks[0](None)
        counter.reset()

    def failing_backward() -> None:
        failing.reset()
        failing.mark(0, 1, True)

    yield "append", lambda: records.append(BODY, 1, 10**15, 2 * 10**15, 3)
    yield "append what is none", lambda: records.append(BODY, -1, "", 2)
    yield "append without room", lambda: full.append(BODY, 1, 2, 3)
    yield "announce", lambda: entries.announce(1, 2**63, 2**62, 5, 10**15, 6, 7, 8, 9, 0)
    yield "announce what is none", lambda: entries.announce(1, 2, 3, 4, 5, 6, 7, 8, 9, None)
    yield "update", lambda: entries.update(entries.latest, "completed", 10**15, 1)
    yield "replace_buffer", lambda: records.replace_buffer(elsewhere)
    yield "a store", lambda: make_store(native.RecordStore, listener).append(BODY, 1, 2, 3)
    yield "close", lambda: make_store(native.EntryStore, listener).close()
    yield "initialize again", lambda: records.__init__(elsewhere, listener)
    yield "a backward", backward
    yield "a bucket that can't be launched", failing_backward
    yield "adopt", lambda: counter.adopt([(0, 1), (2,)], [1])
    yield "adopt what is none", lambda: counter.adopt([(0, PARAMETERS)], ())
    yield "adopt what is large and none", lambda: counter.adopt([[0]], (0, "1"))
    yield "make_hook", lambda: counter.make_hook(1)
    yield "make_hook of none", lambda: counter.make_hook(PARAMETERS)
    yield "a countdown", lambda: make_countdown(listener, listener).make_hook(1)
    yield "initialize a countdown again", lambda: counter.__init__(*[listener] * 5)


NAMES = [name for name, _ in acts(Listener())]


def repeat(act: Act) -> None:
    for _ in range(REPETITIONS):
        with suppress(RuntimeError, TypeError, ValueError, OverflowError, IndexError):
            act()
    gc.collect()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_behind(name: str) -> None:
    listener = Listener()
    act = dict(acts(listener))[name]
    gc.freeze()  # collections need not look through all that has been imported
    tracemalloc.start()
    try:
        repeat(act)
        given = BODY, listener, native.RecordStore, native.EntryStore, native.Countdown
        bytes_before, references_before = tracemalloc.get_traced_memory()[0], [*map(sys.getrefcount, given)]
        repeat(act)
        bytes_more = tracemalloc.get_traced_memory()[0] - bytes_before
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert bytes_more < REPETITIONS * LEAST_OBJECT_BYTES
    assert [*map(sys.getrefcount, given)] == references_before
