"""Sends and receives among ranks, of which all-reduces are made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
import torch.distributed as dist

Message = tuple[torch.Tensor, int]
"""A tensor, and the rank that it goes to or comes from."""

_FIRST_TAG: Final = 0x5C0BE
"""So that messages of a script's own are no answers to ours."""


class Wire:
    """Connects some ranks of a group for the sum of one bucket.

    Args:
        group: the process group.
        ranks: of the group that take part, this one among them; in the same order on all of them. They are counted from
            0 here, in that order.
        says_why: around each round: who launches here says what for.
        bucket: its number.
        lane: of several wires between the same ranks at the same time each has a number of its own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        says_why: Callable[[], AbstractContextManager[None]],
        bucket: int = 0,
        lane: int = 0,
    ) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self._says_why = says_why
        self._lane = lane
        self.bucket = bucket
        """The number of the bucket, for what is kept from one step to the next."""
        self.size = len(self._ranks)
        """Number of ranks."""
        self.rank = self._ranks.index(group.rank())
        """This one's."""

    def exchange(self, *, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> None:
        """One round: all messages at once. What is received is there when this returns; empty tensors are left out.

        On a device the current stream waits for it, and not the host.

        Raises:
            RuntimeError: what the backend says if a rank is gone.
        """
        sends = [(tensor, self._ranks[to]) for tensor, to in sends if tensor.numel()]
        receives = [(tensor, self._ranks[by]) for tensor, by in receives if tensor.numel()]
        with self._says_why():
            works = self._post(sends, receives)
        for work in works:
            work.wait()

    def _post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[dist.Work]:
        tensor = next((tensor for tensor, _ in (*sends, *receives)), None)
        if tensor is not None and tensor.device.type == "cuda":  # NCCL: in one go, or two ranks wait for each other
            operations = [(dist.isend, *one) for one in sends] + [(dist.irecv, *one) for one in receives]
            return dist.batch_isend_irecv(
                [dist.P2POp(op, tensor, group=self._group, group_peer=peer) for op, tensor, peer in operations]
            )
        tag = _FIRST_TAG + self._lane
        return [
            *(self._group.recv([tensor], by, tag) for tensor, by in receives),
            *(self._group.send([tensor], to, tag) for tensor, to in sends),
        ]

    def among(self, ranks: Sequence[int]) -> Wire:
        """A wire between some of these ranks, this one among them."""
        return Wire(self._group, [self._ranks[rank] for rank in ranks], self._says_why, self.bucket, self._lane)

    def together(self, *parts: Callable[[Wire], None]) -> None:
        """Run several sums side by side, each with a wire of its own; one after another on a device."""
        lanes = range(self._lane, self._lane + len(parts))
        wires = [Wire(self._group, self._ranks, self._says_why, self.bucket, lane) for lane in lanes]
        others = [_Beside(part, wire) for part, wire in zip(parts[1:], wires[1:], strict=True)]
        parts[0](wires[0])
        for other in others:
            other.result()


class _Beside(threading.Thread):
    """A sum on a thread of its own."""

    def __init__(self, part: Callable[[Wire], None], wire: Wire) -> None:
        super().__init__(name="overlapscope-wire", daemon=True)
        self._part, self._wire = part, wire
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._part(self._wire)
        except BaseException as error:  # told to who waits
            self._error = error

    def result(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error
