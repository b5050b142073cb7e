"""The code in C and its twins in Python store the same bytes and make the same calls, in any order of events."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp import native
from instrumented_ddp.native import countdown, finite
from overlapscope.trace import collective_log, event_log
from overlapscope.trace.live_files import READY
from overlapscope.trace.schema import HEADER_BYTES

pytestmark = pytest.mark.skipif(not native.IS_NATIVE, reason="the code in C could not be compiled here")

SLOTS = 8
PINNED = 2
U8, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))
TIME = st.integers(0, 2**63 - 1)

RECORDS = st.lists(st.tuples(st.binary(min_size=28, max_size=28), U32, TIME, TIME, U32), max_size=3 * SLOTS)
ANNOUNCED = st.tuples(U32, U64, st.just(0) | U64, st.integers(-1, 2**32 - 1), TIME, U32, U32, U32, U8, U8)
UPDATE = st.tuples(st.integers(0, 3 * SLOTS), st.sampled_from([None, "launched", "completed"]), TIME, U8)


class Ring:
    """A store over a ring of a few slots of 64 bytes, of which the first are written once."""

    def __init__(self, make_store: Callable[..., Any], pinned: int) -> None:
        self.buffer = mmap.mmap(-1, HEADER_BYTES + SLOTS * 64)
        self.store = make_store(self.buffer, self.make_room)
        self.store.capacity, self.store.pinned = SLOTS, pinned

    def make_room(self, number: int) -> int:
        slot = number - 1
        if number <= SLOTS:
            self.store.allocated = number
        else:
            slot = self.store.pinned + (slot - self.store.pinned) % (SLOTS - self.store.pinned)
        return HEADER_BYTES + slot * 64


@given(RECORDS)
def test_records_are_the_same_bytes(records: list[tuple[bytes, int, int, int, int]]) -> None:
    python, compiled = Ring(event_log.RecordStore, PINNED), Ring(native.RecordStore, PINNED)
    for record in records:
        python.store.append(*record)
        compiled.store.append(*record)
    assert bytes(python.buffer) == bytes(compiled.buffer)
    assert python.store.latest == compiled.store.latest == len(records)


@given(st.lists(ANNOUNCED | UPDATE, max_size=40))
def test_entries_and_their_sums_are_the_same_bytes(operations: list[tuple[Any, ...]]) -> None:
    python, compiled = Ring(collective_log.EntryStore, 0), Ring(native.EntryStore, 0)
    for operation in operations:
        name = "update" if len(operation) == 4 else "announce"
        assert getattr(python.store, name)(*operation) == getattr(compiled.store, name)(*operation)
        assert bytes(python.buffer) == bytes(compiled.buffer)
    assert (python.store.hash, python.store.names_hash) == (compiled.store.hash, compiled.store.names_hash)


@pytest.mark.parametrize("make_store", [event_log.RecordStore, native.RecordStore])
def test_what_is_appended_after_the_end_is_discarded(make_store: Callable[..., Any]) -> None:
    ring = Ring(make_store, 0)
    ring.store.append(bytes(28), 1, 2, 3)
    before = bytes(ring.buffer)
    ring.store.close()
    ring.store.append(bytes(28), 4, 5, 6)
    assert bytes(ring.buffer) == before
    ring.buffer.close()  # nothing refers to it


@pytest.mark.parametrize("make_store", [collective_log.EntryStore, native.EntryStore])
def test_what_is_announced_after_the_end_has_no_number(make_store: Callable[..., Any]) -> None:
    ring = Ring(make_store, 0)
    entry = (1, 2, 3, 4, 5, 6, 7, 8, 9, 0)
    assert ring.store.announce(*entry) == 1
    ring.store.close()
    assert ring.store.announce(*entry) == 0
    ring.store.update(1, "completed", 9, 0)
    ring.buffer.close()


@pytest.mark.parametrize("make_store", [event_log.RecordStore, native.RecordStore])
def test_an_error_while_room_is_made_is_raised(make_store: Callable[..., Any]) -> None:
    def fail(number: int) -> int:
        raise OSError(number)

    store = make_store(mmap.mmap(-1, HEADER_BYTES + 64), fail)
    with pytest.raises(OSError, match="1"):
        store.append(bytes(28), 1, 2, 3)


def test_a_forked_process_stores_elsewhere() -> None:
    for make_store in (event_log.RecordStore, native.RecordStore):
        ring = Ring(make_store, 0)
        elsewhere = mmap.mmap(-1, HEADER_BYTES + SLOTS * 64)
        ring.store.replace_buffer(elsewhere)
        ring.store.append(bytes(28), 1, 2, 3)
        assert not any(bytes(ring.buffer))
        assert any(bytes(elsewhere))
        ring.buffer.close()


@pytest.mark.parametrize(
    "arguments", [(), (bytes(27), 1, 2, 3), (bytes(28), -1, 2, 3), (bytes(28), 2**32, 2, 3), (bytes(28), 1, "2", 3)]
)
def test_what_is_no_record_is_refused(arguments: tuple[Any, ...]) -> None:
    ring = Ring(native.RecordStore, 0)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        ring.store.append(*arguments)
    assert not any(bytes(ring.buffer))


# -- countdown ---------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn, parameters: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return buckets of all parameters, and those that are large."""
    order = draw(st.permutations(range(parameters)))
    ends = sorted({*draw(st.lists(st.integers(1, parameters), max_size=3)), parameters})
    buckets = [tuple(order[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    return buckets, draw(st.lists(st.sampled_from(range(parameters)), unique=True))


PARAMETERS = 6
CALLS = st.one_of(
    st.tuples(st.just("hook"), st.integers(0, PARAMETERS - 1)),
    st.tuples(st.just("mark"), st.integers(0, PARAMETERS - 1), st.integers(1, 2**62), st.booleans()),
    st.tuples(st.just("reset")),
    st.tuples(st.just("adopt"), plans(PARAMETERS)),
    st.tuples(st.just("set"), st.sampled_from(["is_expecting", "has_begun", "is_direct"]), st.booleans()),
)


class Listener:
    """A countdown, and the calls it makes."""

    def __init__(self, make_countdown: Callable[..., Any]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.ready_ns = memoryview(bytearray(8 * PARAMETERS)).cast("q")
        self.countdown = make_countdown(
            self.ready_ns,
            on_bucket_ready=lambda number: self.calls.append(("bucket", number)),
            on_large=lambda index: self.calls.append(("large", index)),
            on_other=lambda index: self.calls.append(("other", index)),
            on_repeated=lambda index: self.calls.append(("repeated", index)),
        )
        self.hooks = [self.countdown.make_hook(index) for index in range(PARAMETERS)]

    def do(self, name: str, *arguments: Any) -> None:
        if name == "hook":
            self.hooks[arguments[0]](None, None)
        elif name == "set":
            setattr(self.countdown, *arguments)
        elif name == "adopt":
            self.countdown.adopt(*arguments[0])
        else:
            getattr(self.countdown, name)(*arguments)

    @property
    def state(self) -> tuple[Any, ...]:
        counter = self.countdown
        flags = (counter.is_expecting, counter.has_begun, counter.is_direct, counter.stamps)
        return self.calls, list(self.ready_ns), counter.order, flags


@given(plans(PARAMETERS), st.lists(CALLS, max_size=30))
def test_a_countdown_makes_the_same_calls(plan: tuple[Any, Any], calls: list[tuple[Any, ...]]) -> None:
    python, compiled = Listener(countdown.Countdown), Listener(native.Countdown)
    for call in [("adopt", plan), ("set", "is_expecting", True), *calls]:
        python.do(*call)
        compiled.do(*call)
        assert python.state == compiled.state


@pytest.mark.parametrize("make_countdown", [countdown.Countdown, native.Countdown])
def test_a_gradient_is_stamped_with_the_time_or_the_fact(make_countdown: Callable[..., Any]) -> None:
    listener = Listener(make_countdown)
    listener.countdown.adopt([tuple(range(PARAMETERS))], ())
    listener.countdown.is_expecting = True
    listener.do("hook", 0)
    listener.countdown.stamps = True
    listener.do("hook", 1)
    listener.do("hook", 2)
    assert listener.ready_ns[0] == READY
    assert READY > listener.ready_ns[2] >= listener.ready_ns[1] > 0
    assert listener.countdown.order == [0, 1, 2]


def test_times_that_somebody_else_clears_overflow_nothing() -> None:
    """They are in a mapped file."""
    listener = Listener(native.Countdown)
    listener.countdown.is_expecting = True
    for _ in range(100 * PARAMETERS):
        listener.do("hook", 1)
        listener.ready_ns[1] = 0
    assert listener.countdown.order == [1] * PARAMETERS


@pytest.mark.parametrize("make_countdown", [countdown.Countdown, native.Countdown])
def test_a_parameter_in_no_bucket_is_only_marked(make_countdown: Callable[..., Any]) -> None:
    listener = Listener(make_countdown)
    listener.countdown.is_expecting = True
    listener.do("hook", 3)
    listener.do("hook", 1)
    assert [bool(ready_ns) for ready_ns in listener.ready_ns] == [False, True, False, True, False, False]
    assert (listener.calls, listener.countdown.order, listener.countdown.has_begun) == ([], [3, 1], True)


@pytest.mark.parametrize("make_countdown", [countdown.Countdown, native.Countdown])
def test_an_error_of_a_listener_comes_out_of_the_hook(make_countdown: Callable[..., Any]) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("a bucket could not be launched")

    counter = make_countdown(memoryview(bytearray(8)).cast("q"), fail, fail, fail, fail)
    counter.adopt([(0,)], ())
    hook = counter.make_hook(0)
    with pytest.raises(RuntimeError):
        hook()
    counter.is_expecting = True
    with pytest.raises(RuntimeError):
        hook()


def test_a_countdown_in_a_cycle_is_collected_before_or_after_its_memory() -> None:
    memory = memoryview(bytearray(8)).cast("q")  # a collection clears what is older first
    calls: list[Any] = []
    counter = native.Countdown(memory, calls.append, calls.append, calls.append, print)
    calls += [counter, counter.make_hook(0)]
    listener = Listener(native.Countdown)
    gone = weakref.ref(listener)
    del memory, calls, counter, listener
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("index", [-1, PARAMETERS, 2**40])
def test_no_memory_beyond_the_parameters_is_touched(index: int) -> None:
    counter = Listener(native.Countdown).countdown
    for act in (
        lambda: counter.mark(index, 1, True),
        lambda: counter.make_hook(index),
        lambda: counter.adopt([(index,)], ()),
        lambda: counter.adopt([], (index,)),
    ):
        with pytest.raises((IndexError, OverflowError)):
            act()


GRADIENT = st.tuples(st.integers(1, 7), st.integers(1, 7))


@given(
    st.integers(0, 3),
    st.lists(GRADIENT, max_size=4),
    st.integers(0, 40),
    st.integers(0, finite.WHOLE),
    st.data(),
)
def test_the_same_elements_of_gradients_are_looked_at(
    kind: int, shapes: list[tuple[int, int]], turn: int, share: int, data: st.DataObject
) -> None:
    sizes = [rows * columns for rows, columns in shapes]
    gradients = [(sum(sizes[:at]), *shape) for at, shape in enumerate(shapes)]
    elements = np.zeros(sum(sizes) + 1, dtype=("f2", "u2", "f4", "f8")[kind])
    if sizes:
        elements[data.draw(st.integers(0, sum(sizes) - 1))] = 0x7F80 if kind == 1 else np.inf
    python, compiled = finite.FiniteProbe(kind, gradients), native.FiniteProbe(kind, gradients)
    address = elements.ctypes.data
    assert python.is_finite(address, turn, share) == compiled.is_finite(address, turn, share)


@pytest.mark.parametrize("make_probe", [finite.FiniteProbe, native.FiniteProbe])
@pytest.mark.parametrize("arguments", [(4, ()), (-1, ()), (0, [(0, 0, 1)]), (0, [(-1, 1, 1)])])
def test_a_probe_of_what_is_no_gradient_is_refused(make_probe: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="no such"):
        make_probe(*arguments)
