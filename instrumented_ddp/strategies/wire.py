"""Point-to-point communication among ranks, of which all-reduces are built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist

from instrumented_ddp.strategies.bucket_sum import BucketSumRecorder
from overlapscope.trace.schema import Segment

Message = tuple[torch.Tensor, int]
"""A tensor, and the rank that it goes to or comes from."""

_FIRST_TAG: Final = 0x5C0BE
"""First message tag, chosen such that our messages can't be mistaken for those of a script."""


class Wire:
    """A connection between some ranks of a group for the sum of one bucket.

    Args:
        group: the process group.
        ranks: the ranks of the group that take part, including this one; in the same order on all of them. They are
            numbered from 0 here, in that order.
        recorded_sum: recorder of each round.
        bucket: index of the bucket.
        lane: number that distinguishes several wires between the same ranks at the same time.
        where: which ranks these are, as ``between hosts``; for people.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        recorded_sum: BucketSumRecorder,
        bucket: int = 0,
        lane: int = 0,
        where: str = "",
    ) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self._recorded_sum = recorded_sum
        self._lane = lane
        self._where = where
        self._phase, self._rounds, self._round = where, 0, 0
        self.bucket = bucket
        """Index of the bucket, for state that is kept from one step to the next."""
        self.size = len(self._ranks)
        """Number of ranks."""
        self.rank = self._ranks.index(group.rank())
        """This rank's number on the wire."""

    def exchange(self, *, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> None:
        """Do one round: send and receive all messages at once. Received tensors are complete on return.

        Empty tensors are left out. A round without any message is not executed, but counts.

        On a device the current stream waits for it, and not the host.

        Raises:
            RuntimeError: the backend's error, if a rank is gone.
        """
        sends = [(tensor, self._ranks[to]) for tensor, to in sends if tensor.numel()]
        receives = [(tensor, self._ranks[by]) for tensor, by in receives if tensor.numel()]
        self._round += 1
        if not sends and not receives:
            return
        with self._recorded_sum.round(self._segment(sends, receives)):
            for work in self._post(sends, receives):
                work.wait()

    @contextmanager
    def phase(self, name: str, rounds: int = 0) -> Iterator[None]:
        """Label the exchanges inside as this part of the sum, for people.

        Args:
            rounds: number of calls of ``exchange``, if it is equal on all ranks; else they are not numbered alike, and
                the number is left out.
        """
        before = self._phase, self._rounds, self._round
        self._phase, self._rounds, self._round = f"{name} {self._where}".strip(), rounds, 0
        try:
            yield
        finally:
            self._phase, self._rounds, self._round = before

    def _segment(self, sends: Sequence[Message], receives: Sequence[Message]) -> Segment:
        return Segment(
            bucket=self.bucket,
            lane=self._lane,
            phase=self._phase,
            round=self._round,
            rounds=self._rounds,
            sends=tuple([(to, tensor.nbytes) for tensor, to in sends]),
            receives=tuple([(by, tensor.nbytes) for tensor, by in receives]),
        )

    def _post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[dist.Work]:
        tensor = next((tensor for tensor, _ in (*sends, *receives)), None)
        if tensor is not None and tensor.device.type == "cuda":  # NCCL: as a batch, or two ranks wait for each other
            operations = [(dist.isend, *one) for one in sends] + [(dist.irecv, *one) for one in receives]
            return dist.batch_isend_irecv(
                [dist.P2POp(op, tensor, group=self._group, group_peer=peer) for op, tensor, peer in operations]
            )
        tag = _FIRST_TAG + self._lane
        return [
            *(self._group.recv([tensor], by, tag) for tensor, by in receives),
            *(self._group.send([tensor], to, tag) for tensor, to in sends),
        ]

    def among(self, ranks: Sequence[int], where: str = "") -> Wire:
        """Return a wire between some of these ranks, including this one.

        Args:
            where: which ranks these are, as ``between hosts``; for people, appended to the names of phases.
        """
        return Wire(
            self._group, [self._ranks[rank] for rank in ranks], self._recorded_sum, self.bucket, self._lane, where
        )

    def over(self, group: dist.ProcessGroup) -> Wire:
        """Return a wire between all ranks of another group, for the same bucket."""
        return Wire(group, range(group.size()), self._recorded_sum.over(group), self.bucket, self._lane, self._where)

    def together(self, *parts: Callable[[Wire], None]) -> None:
        """Run several sums concurrently, each with a separate wire; one after another on a device."""
        lanes = range(self._lane, self._lane + len(parts))
        wires = [Wire(self._group, self._ranks, self._recorded_sum, self.bucket, lane, self._where) for lane in lanes]
        others = [_ConcurrentSum(part, wire) for part, wire in zip(parts[1:], wires[1:], strict=True)]
        parts[0](wires[0])
        for other in others:
            other.result()


class _ConcurrentSum(threading.Thread):
    """A sum that runs on a separate thread."""

    def __init__(self, part: Callable[[Wire], None], wire: Wire) -> None:
        super().__init__(name="overlapscope-wire", daemon=True)
        self._part, self._wire = part, wire
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._part(self._wire)
        except BaseException as error:  # raised in the thread that waits
            self._error = error

    def result(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error
