"""Sum of one bucket that a strategy computes from several messages, and its entries in both logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.dispatch import Call
from instrumented_ddp.collectives.log import AnnouncedCollective
from instrumented_ddp.collectives.roles import CollectiveRole, collective_context
from instrumented_ddp.recording.events import EventSink
from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.recording.timing import DeviceTimer, Mark
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.schema import Segment


class BucketSumRecorder:
    """Receives the events of a strategy's sum of a bucket.

    In the collective log of its group it is an all-reduce like that of the backend, so that ranks are compared by it,
    and each message is an entry with the number of its round. In the event log each round is a record.

    Args:
        strategy: name of the strategy.
        records: packed records of the bucket; None writes nothing.
        sink: receives the records; None writes nothing.
        op: operation, if the sum takes several.
    """

    def __init__(
        self, strategy: str, records: BucketRecords | None, sink: EventSink | None, op: str = "all_reduce"
    ) -> None:
        self._strategy = strategy
        self._op = op
        self._records = records
        self._sink = sink
        self._step = 0 if sink is None else sink.steps.step
        self._timer: DeviceTimer | None = None
        self._announced: AnnouncedCollective | None = None
        self._ranks: Sequence[int] | None = None
        self.marks: tuple[Mark, Mark] = None, None
        """Marks of its start and its end, on a device."""

    def over(self, group: dist.ProcessGroup) -> BucketSumRecorder:
        """Return a copy of this sum whose rounds run in another group than that of the ranks that need the sum."""
        copied = copy(self)
        copied._ranks = dist.get_process_group_ranks(group)
        return copied

    def launched(self, group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
        """Announce the sum before it starts or queues behind earlier ones; entries are in launch order."""
        sink, records = self._sink, self._records
        if sink is None or records is None or sink.collectives is None:  # a meter has no log
            return
        try:
            self._timer = sink.get_timer(buffer.device)
            call = Call(
                op=self._op,
                group=group,
                tensors=(buffer,),
                device=buffer.device,
                peer=None,
                tag=0,
                is_awaited=False,
            )
            with collective_context(replace(records.purpose, strategy=self._strategy)):
                self._announced = sink.collectives.announce(call)
            if self._announced is not None:
                self._announced.log.launched(self._announced.number, host_now_ns())
        except Exception as error:
            sink.disable_recording(error)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Mark the start and end of everything that is enqueued inside, on the current stream of a device."""
        begin = self._mark_on(device)
        yield
        self.marks = begin, self._mark_on(device)

    def _mark_on(self, device: torch.device) -> Mark:
        if self._sink is None or self._records is None or not self._sink.is_on:
            return None
        try:
            return self._sink.get_timer(device).mark()
        except Exception as error:
            self._sink.disable_recording(error)
            return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Report the end of the sum that runs inside; on a device it is enqueued there, on the current stream."""
        try:
            yield
        except BaseException:
            self._end_sum(failed=True)
            raise
        self._end_sum(failed=False)

    @contextmanager
    def round(self, segment: Segment) -> Iterator[None]:
        """Record a round: all its messages are launched and waited for inside.

        Args:
            segment: the round, with ranks numbered within the group.
        """
        purpose, body, start = self._begin_round(segment)
        with collective_context(purpose):
            yield
        self._end_round(body, start)

    def _begin_round(self, segment: Segment) -> tuple[CollectiveRole | None, bytes, Mark]:
        sink, records = self._sink, self._records
        if sink is None or records is None or self._announced is None:
            return None, b"", None
        try:
            ranks = self._ranks or self._announced.log.header.ranks
            known = records.segments.get(segment)
            if known is None:
                known = records.segments[segment] = self._make_segment_records(segment, records, ranks)
            if not sink.is_on:
                return known[0], b"", None
            return *known, None if self._timer is None else self._timer.mark()
        except Exception as error:
            sink.disable_recording(error)
            return None, b"", None

    def _make_segment_records(
        self, segment: Segment, records: BucketRecords, ranks: Sequence[int]
    ) -> tuple[CollectiveRole, bytes]:
        purpose = replace(
            records.purpose,
            role="segment",
            strategy=self._strategy,
            phase=segment.phase,
            round=segment.round,
            rounds=segment.rounds,
        )
        if self._sink is None or self._sink.segments is None:
            return purpose, b""
        sends, receives = (
            tuple([(ranks[peer], size) for peer, size in messages]) for messages in (segment.sends, segment.receives)
        )
        number = self._sink.segments.number_of(replace(segment, sends=sends, receives=receives))
        return purpose, records.segment(number)

    def _end_round(self, body: bytes, start: Mark) -> None:
        sink, timer = self._sink, self._timer
        if sink is None or timer is None or not body:
            return
        try:
            timer.write(body, self._step, start, timer.mark())
        except Exception as error:
            sink.disable_recording(error)

    def _end_sum(self, *, failed: bool) -> None:
        announced, sink = self._announced, self._sink
        if announced is None or sink is None or sink.collectives is None:
            return
        try:
            if announced.device.type == "cpu" or failed:
                announced.ended(host_now_ns(), failed)
            else:
                sink.collectives.watch_on_device(announced, None)
        except Exception as error:
            sink.disable_recording(error)
