"""Countdown of the gradients of a backward, bucket by bucket: what autograd calls for every parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.live_files import READY


class Countdown:
    """Counts the gradients of a backward, and calls the reducer only when a bucket is full or something is unusual.

    A hook runs between kernels that have just emptied the processor's caches, so each line of Python costs several
    times what it does in a loop. Hence the twin in C, which stores one number and counts another one down.

    Args:
        ready_ns: memory for the ready time of each parameter; 0 until its gradient has arrived.
        on_bucket_ready: called with the number of a bucket whose last gradient has arrived.
        on_large: called with a parameter that is copied as soon as its gradient has arrived, before its bucket.
        on_other: called with a parameter whose gradient is not simply counted, as nothing is expected.
        on_repeated: called with a parameter whose gradient has arrived before; raises.
    """

    def __init__(
        self,
        ready_ns: memoryview[int],
        on_bucket_ready: Callable[[int], None],
        on_large: Callable[[int], None],
        on_other: Callable[[int], None],
        on_repeated: Callable[[int], None],
    ) -> None:
        self._ready_ns = ready_ns
        self._zeros = memoryview(bytes(ready_ns.nbytes)).cast("q")
        self._on_bucket_ready, self._on_large = on_bucket_ready, on_large
        self._on_other, self._on_repeated = on_other, on_repeated
        self.is_expecting = False
        """True while gradients are expected."""
        self.has_begun = False
        """True from the first gradient until the reduction is complete."""
        self.is_direct = True
        """False if the reducer has a say in whether a gradient counts, or times it on its device."""
        self.stamps = False
        """True if the time is stored that the host sees a gradient at, in place of the fact."""
        self.order: list[int] = []
        """Parameters in the order of their gradients in the latest backward."""
        self.adopt((), ())

    def adopt(self, buckets: Sequence[Sequence[int]], large: Sequence[int]) -> None:
        """Count by other buckets from now on.

        Args:
            buckets: indices of the parameters of each bucket. A parameter in none is only marked.
            large: parameters for which ``on_large`` is called.
        """
        self._sizes = [len(indices) for indices in buckets]
        self._bucket_of = {index: number for number, indices in enumerate(buckets) for index in indices}
        self._large = frozenset(large)
        self.reset()

    def reset(self) -> None:
        """Count all gradients again."""
        self._ready_ns[:] = self._zeros
        self._pending = self._sizes.copy()
        self.order = []

    def mark(self, index: int, ready_ns: int, is_arrival: bool) -> None:
        """Count a parameter.

        Args:
            ready_ns: its ready time; ``READY`` if only the fact is known.
            is_arrival: true if its gradient has arrived, false if it is known to be unused.
        """
        if self._ready_ns[index]:
            self._on_repeated(index)
            return
        self._ready_ns[index] = ready_ns
        if is_arrival:
            self.order.append(index)
        self.has_begun = True
        if index in self._large:
            self._on_large(index)
        bucket = self._bucket_of.get(index)
        if bucket is not None:
            self._pending[bucket] -= 1
            if self._pending[bucket] == 0:
                self._on_bucket_ready(bucket)

    def make_hook(self, index: int) -> Callable[..., None]:
        """Return the hook of a parameter, which ignores its arguments."""

        def hook(*_: object) -> None:
            if self.is_expecting and self.is_direct:
                self.mark(index, host_now_ns() if self.stamps else READY, True)
            else:
                self._on_other(index)

        return hook
