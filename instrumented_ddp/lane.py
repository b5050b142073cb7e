"""The communication lane of a device: where a bucket's collective runs, and how its begin and end are seen.

``HostLane``
    CPU tensors over gloo. The work runs on gloo's threads. A callback on its future needs the GIL and comes
    milliseconds late, so while recording, completion is looked for in the gradient hooks: each look bounds the
    end from above or below, and the last wait at the end of backward sees it as it happens.
``StreamLane``
    CUDA tensors over NCCL or gloo. The work runs behind a stream of our own between two timing events; no host
    thread waits for it. ``Work.block_current_stream`` (torch 2.8) makes that true for gloo as well.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final, Protocol

import torch
import torch.distributed as dist

from instrumented_ddp.recorder import Recorder
from instrumented_ddp.records import BucketRecords
from instrumented_ddp.timing import Mark, host_now_ns

_LOOKS_AHEAD: Final = 2
"""gloo runs two collectives of a group at a time, so only the two oldest can have just completed."""

_LONGEST_UNCERTAINTY_NS: Final = 0xFFFFFFFF


class Collective:
    """One all-reduce under way."""

    __slots__ = ("end", "launch_ns", "records", "running_ns", "start", "work")

    def __init__(self, records: BucketRecords | None) -> None:
        self.records = records
        self.work: dist.Work
        self.launch_ns = 0
        self.running_ns = 0
        """Host: it was last seen running."""
        self.start: Mark = None
        self.end: Mark = None


class Lane(Protocol):
    """Runs the collectives of one process group in the order in which they are launched."""

    running: deque[Collective]
    """Those that ``look`` may find completed."""

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None, call_site: int) -> Collective:
        """Launch a sum over all ranks. The launch record is on disk before the collective is enqueued."""

    def look(self) -> None:
        """Note what has completed. Called often, from hooks; never waits."""

    def wait(self, collective: Collective) -> None:
        """Make the current stream (on CPU, the host) wait for a collective.

        Raises:
            RuntimeError: what the backend says of a collective that failed.
        """


class HostLane:
    """See the module's docstring."""

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder | None) -> None:
        self._group = group
        self._recorder = recorder
        self.running: deque[Collective] = deque()

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None, call_site: int) -> Collective:
        """Launch on gloo's threads."""
        collective = Collective(records)
        if self._recorder is not None and records is not None:
            collective.launch_ns = collective.running_ns = self._recorder.launches(records, call_site)
            self.running.append(collective)
        collective.work = self._group.allreduce([buffer])
        return collective

    def look(self) -> None:
        """Bound the ends of the collectives that may just have completed."""
        running = self.running
        now_ns = host_now_ns()
        for collective in tuple(islice(running, _LOOKS_AHEAD)):
            if collective.work.is_completed():
                self._write(collective, now_ns, now_ns - collective.running_ns)
            else:
                collective.running_ns = now_ns

    def wait(self, collective: Collective) -> None:
        """Block the host; called at the end of backward and nowhere else."""
        if collective in self.running:
            self.look()
        collective.work.wait()
        if collective in self.running:
            # The host slept until it ended: what is left of uncertainty is the time to wake up.
            self._write(collective, host_now_ns(), 0)

    def _write(self, collective: Collective, end_ns: int, end_uncertainty_ns: int) -> None:
        assert self._recorder is not None
        assert collective.records is not None
        self.running.remove(collective)
        self._recorder.log.append(
            collective.records.collective_bounds,
            self._recorder.step,
            collective.launch_ns,
            end_ns,
            min(end_uncertainty_ns, _LONGEST_UNCERTAINTY_NS),
        )


class StreamLane:
    """See the module's docstring."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, recorder: Recorder | None) -> None:
        self._group = group
        self._device = device
        self._recorder = recorder
        self.running: deque[Collective] = deque()
        self._stream = torch.cuda.Stream(device)
        self._work_can_block_a_stream = hasattr(dist.Work, "block_current_stream")

    def all_reduce(self, buffer: torch.Tensor, records: BucketRecords | None, call_site: int) -> Collective:
        """Launch behind our stream, which has waited for what the current stream was given so far."""
        collective = Collective(records)
        recorder = self._recorder
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if recorder is not None and records is not None:
                recorder.launches(records, call_site)
                collective.start = recorder.timeline.mark()
            collective.work = self._group.allreduce([buffer])
            if recorder is not None and self._work_can_block_a_stream:
                collective.work.block_current_stream()
                collective.end = recorder.timeline.mark()
        return collective

    def look(self) -> None:
        """Nothing to look for: the device notes the end by itself."""

    def wait(self, collective: Collective) -> None:
        """Make the current stream wait; over gloo this also blocks the host, as in stock DDP."""
        collective.work.wait()
        recorder, records = self._recorder, collective.records
        if recorder is None or records is None:
            return
        if collective.end is None:
            collective.end = recorder.timeline.mark()
            recorder.timeline.write(records.collective_bounds, recorder.step, collective.start, collective.end)
        else:
            recorder.timeline.write(records.collective, recorder.step, collective.start, collective.end)


def lane_of(device: torch.device, group: dist.ProcessGroup, recorder: Recorder | None) -> Lane:
    """The lane on which a device communicates."""
    if device.type == "cuda":
        return StreamLane(group, device, recorder)
    return HostLane(group, recorder)
