"""The communication lane of a device: where a bucket's collective runs, and how its begin and end are seen.

``HostLane``
    CPU tensors over gloo. The work runs on gloo's threads; ``CompletionWatch`` sees it end.
``StreamLane``
    CUDA tensors over NCCL or gloo. The work runs behind a stream of our own between two timing events; no host
    thread waits for it. ``Work.block_current_stream`` (torch 2.8) makes that true for gloo as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from instrumented_ddp.collective_log.purposes import Purpose, launched_for
from instrumented_ddp.completion import Collective
from instrumented_ddp.observer import Observer
from instrumented_ddp.records import BucketRecords
from instrumented_ddp.timing import Timeline, host_now_ns


class Lane(Protocol):
    """Runs the collectives of one process group in the order in which they are launched."""

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None) -> Collective:
        """Launch a sum over all ranks. The launch record is on disk before the collective is enqueued."""

    def run_hook(self, hook: Callable[[], torch._C.Future[Any]], records: BucketRecords | None) -> Collective:
        """Call a communication hook, which launches what it likes and returns a future."""

    def announce(self, records: BucketRecords | None) -> Collective:
        """Somebody else is about to launch: the launch record is on disk when this returns."""

    def launched(self, collective: Collective, work: dist.Work) -> None:
        """Somebody else has launched, and waits for it himself: see it end."""

    def wait(self, collective: Collective) -> None:
        """Make the current stream (on CPU, the host) wait for a collective.

        Raises:
            RuntimeError: what the backend says of a collective that failed.
        """


class HostLane:
    """See the module's docstring."""

    def __init__(self, group: dist.ProcessGroup, observer: Observer | None) -> None:
        self._group = group
        self._observer = observer
        self._sum = dist.AllreduceOptions()
        self._newest: Collective | None = None

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None) -> Collective:
        """Launch on gloo's threads."""
        collective = self.announce(records)
        # The future and not the work, as in torch: a process group written in Python may have its own idea of an end.
        with launched_for(records.purpose if records is not None else None):
            collective.work = self._group.allreduce([buffer], self._sum).get_future()
        self._watch(collective)
        return collective

    def run_hook(self, hook: Callable[[], torch._C.Future[Any]], records: BucketRecords | None) -> Collective:
        """Call the hook on this thread."""
        collective = self.announce(records)
        with launched_for(_of_hook(records)):
            collective.work = hook()
        self._watch(collective)
        return collective

    def wait(self, collective: Collective) -> None:
        """Block the host; called at the end of backward and nowhere else."""
        if self._observer is None:
            collective.wait()
            return
        _note_if_running(collective)
        collective.wait()
        collective.over_ns = host_now_ns()

    def announce(self, records: BucketRecords | None) -> Collective:
        """Write the launch record."""
        observer = self._observer
        if observer is None:
            return Collective(records, step=0)
        if self._newest is not None:
            _note_if_running(self._newest)
        collective = self._newest = Collective(records, observer.step)
        if records is not None:
            collective.launch_ns = collective.running_ns = observer.launches(records)
        return collective

    def launched(self, collective: Collective, work: dist.Work) -> None:
        """Have its end noticed."""
        collective.work = work.get_future()
        self._watch(collective)

    def _watch(self, collective: Collective) -> None:
        if self._observer is not None:
            self._observer.completions.add(collective)


def _note_if_running(collective: Collective) -> None:
    # The clock first: a collective that ends between the two must not be said to have run any longer.
    now_ns = host_now_ns()
    if not collective.is_over:
        collective.running_ns = now_ns


class StreamLane:
    """See the module's docstring."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, observer: Observer | None) -> None:
        self._group = group
        self._device = device
        self._observer = observer
        self._timeline: Timeline | None = observer.timeline_on(device) if observer is not None else None
        self._sum = dist.AllreduceOptions()
        self._stream = torch.cuda.Stream(device)
        self._work_can_block_a_stream = hasattr(dist.Work, "block_current_stream")

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None) -> Collective:
        """Launch behind our stream, which has waited for what the current stream was given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            collective = self.announce(records)
            with launched_for(records.purpose if records is not None else None):
                work = collective.work = self._group.allreduce([buffer], self._sum)
            if self._timeline is not None and records is not None and self._work_can_block_a_stream:
                work.block_current_stream()
                collective.end = self._timeline.mark()
        return collective

    def run_hook(self, hook: Callable[[], torch._C.Future[Any]], records: BucketRecords | None) -> Collective:
        """Call the hook on the current stream, which is where its own kernels belong. Its end is seen by ``wait``."""
        collective = self.announce(records)
        with launched_for(_of_hook(records)):
            collective.work = hook()
        return collective

    def wait(self, collective: Collective) -> None:
        """Make the current stream wait; over gloo this also blocks the host, as in stock DDP."""
        collective.wait()
        timeline, records = self._timeline, collective.records
        if timeline is None or records is None:
            return
        if collective.end is None:  # a hook, or torch 2.7: the end is seen from the stream that waits for it
            timeline.write(records.collective_bounds, collective.step, collective.start, timeline.mark())
        else:
            timeline.write(records.collective, collective.step, collective.start, collective.end)

    def launched(self, collective: Collective, work: dist.Work) -> None:
        """Mark its end behind our stream. With torch 2.7 that would make the host wait, so the end stays unknown."""
        timeline, records = self._timeline, collective.records
        if timeline is None or records is None or not self._work_can_block_a_stream:
            return
        with torch.cuda.stream(self._stream):
            work.block_current_stream()
            timeline.write(records.collective, collective.step, collective.start, timeline.mark())

    def announce(self, records: BucketRecords | None) -> Collective:
        """Write the launch record, and mark the current stream."""
        observer, timeline = self._observer, self._timeline
        if observer is None or timeline is None or records is None:
            return Collective(records, step=0)
        collective = Collective(records, observer.step)
        observer.launches(records)
        collective.start = timeline.mark()
        return collective


def _of_hook(records: BucketRecords | None) -> Purpose | None:
    """What a communication hook launches while it is called, which is most often one all-reduce of the bucket."""
    return None if records is None else replace(records.purpose, role="hook")


def lane_of(device: torch.device, group: dist.ProcessGroup, observer: Observer | None) -> Lane:
    """The lane on which a device communicates."""
    if device.type == "cuda":
        return StreamLane(group, device, observer)
    return HostLane(group, observer)
