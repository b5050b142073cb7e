"""Communicators: how a bucket's collective is launched on CPU or CUDA, and how its start and end are observed.

``HostCommunicator``
    CPU tensors over gloo. The work runs on gloo's threads; ``CompletionWatch`` observes its end.
``StreamCommunicator``
    CUDA tensors. A bucket is launched from the current stream, as by stock DDP. If it is recorded, a separate stream
    waits for what the current one was given before and, over NCCL, for the work: so a timing event on it before the
    launch is at max(ready, end of the previous one), which is when NCCL's serial stream begins with it, and one behind
    it at its end. Nothing that trains waits for that stream, and no host thread for the work.

    Over gloo an event can't be recorded behind a work: ``Work.block_current_stream`` has a kernel spin there until gloo
    has *enqueued* its copy to the device, which is not its end, keeps the next bucket's copy waiting, and takes time
    slices from ranks that share the device. There the end is recorded after a wait, and written as an upper bound; the
    same holds for all backends for which ``find_stream_wait`` knows no better: all but torch's own NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.backends import find_stream_wait
from instrumented_ddp.collectives.device_events import make_device_events
from instrumented_ddp.collectives.dispatch import Call
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.roles import CollectiveRole, Launch, collective_context
from instrumented_ddp.recording.events import EventSink
from instrumented_ddp.recording.records import BucketCollective, BucketRecords
from instrumented_ddp.recording.timing import DeviceTimer, NullTimer
from overlapscope.trace.clocks import host_now_ns

_HOST: Final = torch.device("cpu")


class Communicator(Protocol):
    """Runs the collectives of one process group in the order in which they are launched."""

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None) -> BucketCollective:
        """Launch a sum over all ranks. The launch record is on disk before the collective is enqueued."""

    def run_hook(self, hook: Callable[[], torch._C.Future[Any]], records: BucketRecords | None) -> BucketCollective:
        """Call a communication hook, which launches what it likes and returns a future."""

    def announce(self, records: BucketRecords | None) -> BucketCollective:
        """Write the launch record to disk, before another component launches the collective."""

    def launched(self, collective: BucketCollective, work: dist.Work) -> BucketCollective | None:
        """Note that another component has launched the collective, and waits for it itself.

        Returns:
            The collective, if it is to be told when the host observes its end.
        """

    def waited(self, collective: BucketCollective) -> None:
        """Note that another component has waited for a collective."""

    def superseded(self, collective: BucketCollective) -> None:
        """Note that nobody waits for a collective, but for another one that was launched behind it."""

    def wait(self, collective: BucketCollective) -> None:
        """Make the current stream (on CPU, the host) wait for a collective.

        Raises:
            RuntimeError: the backend's error, if the collective failed.
        """


class HostCommunicator:
    """Communicator for CPU tensors over gloo, whose collectives run on gloo's threads."""

    def __init__(self, group: dist.ProcessGroup, sink: EventSink | None) -> None:
        self._group = group
        self._sink = sink
        self._sum = dist.AllreduceOptions()
        self._backend = _find_plain_backend(group)

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None) -> BucketCollective:
        """Launch on gloo's threads."""
        collective = self.announce(records)
        sink = self._sink
        if sink is None:
            collective.work = self._group.allreduce([buffer], self._sum).get_future()
            return collective
        launch = self._launch_of(collective)
        if launch is not None and sink.collectives is not None and self._may_skip_dispatcher(buffer):
            work = self._launch_directly(buffer, launch, sink.collectives)
        else:
            with collective_context(launch):
                work = self._group.allreduce([buffer], self._sum)
        if collective.work is None:  # no collective log any more, or a group that torch's dispatcher does not see
            collective.work = work.get_future()
            self._watch(collective)
        return collective

    def _may_skip_dispatcher(self, buffer: torch.Tensor) -> bool:
        """Return whether nobody but us could see the call on torch's dispatcher: no profiler, no mode, no wrapper."""
        return (
            self._backend is not None
            and buffer.layout is torch.strided
            and dist.ProcessGroup.allreduce is _ALLREDUCE
            and not _is_profiling()
            and not _count_dispatch_modes()
        )

    def _launch_directly(self, buffer: torch.Tensor, launch: Launch, log: CollectiveRecorder) -> dist.Work:
        """Launch as the operator for the host does, without the dispatcher and our kernel in Python on it."""
        announced = log.announce(
            Call(
                op="all_reduce",
                group=self._group,
                tensors=(buffer,),
                device=_HOST,
                peer=None,
                tag=0,
                is_awaited=False,
            ),
            launch,
        )
        try:
            work: dist.Work = self._backend.allreduce([buffer], self._sum)
        except BaseException:
            log.failed(announced)
            raise
        log.launched(announced, work)
        return work

    def _launch_of(self, collective: BucketCollective) -> Launch | None:
        if collective.records is None:
            return None
        launched = partial(self.launched, collective)
        return Launch(purpose=collective.records.purpose, group=self._group, launched=launched, is_reducer=True)

    def run_hook(self, hook: Callable[[], torch._C.Future[Any]], records: BucketRecords | None) -> BucketCollective:
        """Call the hook on this thread."""
        collective = self.announce(records)
        with collective_context(_hook_role(records)):
            collective.work = hook()
        self._watch(collective)
        return collective

    def superseded(self, collective: BucketCollective) -> None:
        """Do nothing: the thread that waits for the collective observes its end."""

    def wait(self, collective: BucketCollective) -> None:
        """Block the host, at the end of a backward or in place of one under ``join()``."""
        if self._sink is None:
            collective.wait()
            return
        self._poll(self._sink)  # what has ended by now was not waited for
        if not collective.is_over:
            collective.is_waited_for = True
        collective.wait()
        self.waited(collective)

    def waited(self, collective: BucketCollective) -> None:
        """Record the end, if nobody has seen it before."""
        sink = self._sink
        if sink is None or collective.is_over:
            return
        try:
            sink.completions.waited(collective)
            collective.ended(host_now_ns(), failed=False)
        except Exception as error:
            sink.disable_recording(error)

    def announce(self, records: BucketRecords | None) -> BucketCollective:
        """Write the launch record."""
        sink = self._sink
        if sink is None:
            return BucketCollective(records, step=0)
        self._poll(sink)
        log = sink.log if sink.is_on else None
        collective = BucketCollective(records, sink.steps.step, log, is_full=sink.is_full)
        if records is not None and sink.is_on:
            collective.launch_ns = collective.running_ns = sink.record_launch(records)
        return collective

    def _poll(self, sink: EventSink) -> None:
        try:
            sink.completions.poll_buckets()
        except Exception as error:
            sink.disable_recording(error)

    def launched(self, collective: BucketCollective, work: dist.Work) -> BucketCollective:
        """Return the bucket, which the collective log tells of its end."""
        # The future and not the work, as in torch: a process group written in Python may define its end differently.
        try:
            collective.work = work.get_future()
        except RuntimeError:  # not every work of gloo's has one
            collective.work = work
        return collective

    def _watch(self, collective: BucketCollective) -> None:
        if self._sink is None or collective.work is None:
            return
        try:
            self._sink.completions.add_bucket(collective.work, collective)
        except Exception as error:
            self._sink.disable_recording(error)


_ALLREDUCE: Final = dist.ProcessGroup.allreduce
_is_profiling: Final[Callable[[], bool]] = torch._C._autograd._profiler_enabled
_count_dispatch_modes: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack


def _find_plain_backend(group: dist.ProcessGroup) -> Any:
    """Return what a process group's operators call for tensors on the host, and nothing else; None if there is more.

    A group written in Python does what it likes, and since torch 2.14 operators also call the hooks of their group, of
    which nobody can tell whether there are any.
    """
    if type(group) is not dist.ProcessGroup or hasattr(dist.ProcessGroup, "register_pre_hook"):
        return None
    try:
        return group._get_backend(_HOST)
    except RuntimeError:
        return None


class StreamCommunicator:
    """Communicator for CUDA tensors, which times collectives on a separate stream."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sink: EventSink | None) -> None:
        self._group = group
        self._sink = sink
        self._timer = _timer_of_buckets(device, sink)
        self._sum = dist.AllreduceOptions()
        self._stream = torch.cuda.Stream(device)
        self._events = None if self._timer is None else make_device_events(device)
        self._wait_on_stream = find_stream_wait(group, device)

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None) -> BucketCollective:
        """Launch from the current stream."""
        collective = self.announce(records)
        with collective_context(records.purpose if records is not None else None):
            collective.work = self._group.allreduce([buffer], self._sum)
        self.launched(collective, collective.work)
        return collective

    def run_hook(self, hook: Callable[[], torch._C.Future[Any]], records: BucketRecords | None) -> BucketCollective:
        """Call the hook on the current stream, where its kernels belong. ``wait`` records the end."""
        collective = self._announce(records)
        if (timer := self._timer_if_on) is not None:
            collective.start = timer.mark()
        with collective_context(_hook_role(records)):
            collective.work = hook()
        return collective

    def wait(self, collective: BucketCollective) -> None:
        """Make the current stream wait; over gloo this also blocks the host, as in stock DDP."""
        collective.wait()
        if isinstance(collective.work, dist.Work):
            collective.work = None  # it may point at a communicator, which does not outlive its process group
        self.waited(collective)

    def superseded(self, collective: BucketCollective) -> None:
        """Write the times, if the end was recorded where the collective runs."""
        if collective.end is not None:
            self.waited(collective)

    def waited(self, collective: BucketCollective) -> None:
        """Write the times."""
        timer, records = self._timer, collective.records
        if timer is None or records is None or collective.start is None:
            return
        if collective.end is None:  # recorded on the stream that waits for it
            timer.write(records.collective_bounds, collective.step, collective.start, timer.mark())
        else:
            timer.write(records.collective, collective.step, collective.start, collective.end)

    def launched(self, collective: BucketCollective, work: dist.Work) -> None:
        """Record the end on our stream, if that can wait for the work without a kernel. The work is not kept."""
        sink, timer = self._sink, self._timer
        if sink is None or timer is None or collective.start is None or self._wait_on_stream is None:
            return
        try:
            with torch.cuda.stream(self._stream):
                self._wait_on_stream(work)
            collective.end = timer.mark(self._stream)
        except Exception as error:  # of its device the training gets one by itself
            sink.disable_recording(error)

    def announce(self, records: BucketRecords | None) -> BucketCollective:
        """Write the launch record, and record the start on our stream, behind the work of the current one."""
        collective = self._announce(records)
        sink, timer, events = self._sink, self._timer_if_on, self._events
        if sink is None or timer is None or events is None or records is None:
            return collective
        try:
            if events.join(self._stream):
                collective.start = timer.mark(self._stream)
        except Exception as error:
            sink.disable_recording(error)
        return collective

    def _announce(self, records: BucketRecords | None) -> BucketCollective:
        if self._sink is None:
            return BucketCollective(records, step=0)
        if records is not None and self._sink.is_on:
            self._sink.record_launch(records)
        return BucketCollective(records, self._sink.steps.step)

    @property
    def _timer_if_on(self) -> DeviceTimer | None:
        """Return the timer for a bucket that is about to be launched; None if it is not recorded."""
        return self._timer if self._sink is not None and self._sink.is_on else None


def _timer_of_buckets(device: torch.device, sink: EventSink | None) -> DeviceTimer | None:
    """Return the timer for buckets; None if buckets are not timed on this device."""
    if sink is None:
        return None
    try:
        timer = sink.get_timer(device)
    except Exception as error:
        sink.disable_recording(error)
        return None
    return None if isinstance(timer, NullTimer) else timer


def _hook_role(records: BucketRecords | None) -> CollectiveRole | None:
    """Return the role of what a communication hook launches, usually one all-reduce of the bucket."""
    return None if records is None else replace(records.purpose, role="hook")


def communicator_of(device: torch.device, group: dist.ProcessGroup, sink: EventSink | None) -> Communicator:
    """Return a communicator for the tensors of a device."""
    if device.type == "cuda":
        return StreamCommunicator(group, device, sink)
    return HostCommunicator(group, sink)
