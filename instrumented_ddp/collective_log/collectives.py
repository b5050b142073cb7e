"""The collective log of this process: what is launched, in which group, in which order, by which line.

Every collective is written down *before* it is launched, in the log of its group (``overlapscope.trace.group_log``),
and its completion afterwards (``collective_log.completion``). Who launches something on purpose (the reducer its
buckets, the wrapper its buffers) says so in ``purposes``; everything else is the user's own.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from instrumented_ddp.collective_log.backends import backend_of
from instrumented_ddp.collective_log.call_sites import CallSites
from instrumented_ddp.collective_log.completion import CompletionWatch
from instrumented_ddp.collective_log.device_completion import OnEnd
from instrumented_ddp.collective_log.dispatch import Call, Interception
from instrumented_ddp.collective_log.loop_place import LoopPlace, frames_of
from instrumented_ddp.collective_log.position import Position
from instrumented_ddp.collective_log.purposes import Launch, Purpose, current_launch, purpose_of_group
from instrumented_ddp.collective_log.signatures import SignatureTable
from instrumented_ddp.collective_log.tensor_names import TensorNames
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import EVENTS_FILE, NO_CALL_SITE
from overlapscope.trace.group_log import AFTER_UPDATE, AWAITED, REACHED, UNREACHED, GroupHeader, GroupLog, group_file
from overlapscope.trace.host import host_now_ns
from overlapscope.trace.signature import POINT_TO_POINT, Signature

_log = logging.getLogger(__name__)

_IN_BACKWARD: Final = ("bucket", "bitmap", "hook")


@dataclass(frozen=True, kw_only=True)
class Announced:
    """An entry whose collective is being launched."""

    log: GroupLog
    number: int
    device: torch.device
    launch: Launch | None
    is_awaited: bool
    """Whether who launches it goes on when it is over, which on the host is now."""
    before: torch.cuda.Event | None = None
    """Passed when its device comes to it."""

    def ended(self, now_ns: int, failed: bool) -> None:
        """The collective was seen to be over."""
        self.log.completed(self.number, now_ns, failed=failed)

    def looked_at(self, is_reached: bool) -> None:
        """It was long in coming to its end, and its device has come to it, or has not."""
        self.log.seen(self.number, REACHED if is_reached else UNREACHED)


class Collectives:
    """Writes down the collectives of this process.

    Args:
        folder: of this rank, in the run's folder.
        rank: of this process in the whole job.
        position: where this rank is, which every entry says.
        on_error: called when something of ours went wrong, so that the log would lack something.

    Raises:
        OverlapScopeError: the folder can't be written, or already holds a recording of this rank.
    """

    def __init__(self, folder: Path, rank: int, position: Position, on_error: Callable[[Exception], None]) -> None:
        self.folder = folder
        self.rank = rank
        self.position = position
        self.logs: list[GroupLog] = []
        """Of each group, and of the sends and receives in each, in the order of their first use; while it is there."""
        self.entries_of_gone_groups = 0
        self.names = TensorNames()
        self.loop = LoopPlace(self.position)
        self.recognise: Callable[[Call], Launch | None] = lambda _: None
        """Asked about collectives of which nobody has said what for: torch's own reducer is in C++ and can't."""
        self.before_each: Callable[[], None] = lambda: None
        """Called before a collective is written down: a loop without DDP is only followed there."""
        self.elements_reduced_by_user = 0
        """By collectives that are nobody's but the user's."""
        self._logs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, GroupLog]] = weakref.WeakKeyDictionary()
        self._names: dict[bool, list[str]] = {False: [], True: []}
        """Of all groups so far, and of those that have sent or received."""
        self._lock = threading.RLock()  # a group may go, by the garbage collector, while another's log is made
        self._lines_seen: set[int] = set()
        self._on_error = on_error
        self._stopped = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / EVENTS_FILE).exists():  # of a run that had no collective log
                raise FileExistsError
            self._signatures = SignatureTable(folder)
        except FileExistsError:
            raise OverlapScopeError(f"{folder}: already holds a recording; move it away or record elsewhere") from None
        except OSError as error:
            raise OverlapScopeError(f"{folder}: can't be created ({error.strerror})") from None
        self.call_sites = CallSites(folder)
        self.completions = CompletionWatch(on_error)
        """Of all collectives of this process."""
        self._interception = Interception(self)

    @property
    def signatures(self) -> list[Signature]:
        """By number - 1."""
        return self._signatures.known

    # -- called on torch's dispatcher, for every collective ------------------------------------------------------

    def announce(self, call: Call) -> Announced | None:
        """A collective is about to be launched."""
        if self._stopped:
            return None
        try:
            return self._announce(call)
        except Exception as error:  # it is launched all the same
            self._on_error(error)
            return None

    def _announce(self, call: Call) -> Announced | None:
        self.completions.look_at_oldest()
        launch = current_launch() or self.recognise(call)
        if self._stopped:  # as that has failed: an entry without its purpose would differ from other ranks'
            return None
        purpose = purpose_of_group(call.group) or (None if launch is None else launch.purpose)
        call_site, names = self._line_and_names(call, purpose)
        self.before_each()
        position = self.position
        log = self._log_of(call)
        number, signature = self._signatures.of(call, purpose, log.header, names)
        if signature.role == "user" and signature.reduce_op:
            self.elements_reduced_by_user += signature.elements
        # What another thread waits for, such as that of a checkpoint, does not hold up the training.
        is_training = threading.current_thread() is threading.main_thread()
        is_awaited = call.is_awaited and signature.role == "user" and call.device.type == "cpu" and is_training
        entry = log.announce(
            number,
            signature,
            now_ns=host_now_ns(),
            step=position.step,
            call_site=call_site,
            batch=position.batch,
            phase=position.phase,
            flags=position.flags | (AWAITED if is_awaited else 0) | self._flag_of_iteration(),
        )
        meant = launch if launch is not None and launch.group in (None, call.group) else None
        is_awaited = is_awaited or (meant is not None and meant.is_awaited)
        return Announced(
            log=log,
            number=entry,
            device=call.device,
            launch=meant,
            is_awaited=is_awaited,
            before=self.completions.mark_before(call.device),
        )

    def _flag_of_iteration(self) -> int:
        if not self.position.has_updated:
            return 0
        return AFTER_UPDATE if self.loop.has_begun_next(frames_of(sys._getframe(1))) is False else 0

    def _line_and_names(self, call: Call, purpose: Purpose | None) -> tuple[int, tuple[str, ...]]:
        """The user's line that launches it, and what its variables call the tensors."""
        if purpose is not None and purpose.role in _IN_BACKWARD:
            return self.position.backward_call_site, ()
        call_site = NO_CALL_SITE
        names: tuple[str, ...] = ()
        try:
            frame = self.call_sites.frame_of_caller()
            call_site = self.call_sites.number_of(frame)
            if purpose is None and frame is not None and call_site not in self._lines_seen:
                self._lines_seen.add(call_site)
                self.names.note_modules(frame)
            if purpose is None and call.tensors:
                names = self.names.names_of(call.tensors, frame)
        except Exception as error:  # variables change while they are looked at: an entry is right without these
            _log.debug("rank %d: a collective's line or names are not known: %r", self.rank, error)
        return call_site, names

    def launched(self, announced: Announced | None, work: dist.Work | None) -> None:
        """The backend has taken it."""
        if announced is None:
            return
        now_ns = host_now_ns()
        try:
            announced.log.launched(announced.number, now_ns)
            on_end = self._on_end_of_bucket(announced, work)
            if announced.device.type != "cpu":
                self.completions.add_on_device(
                    work, announced.device, announced.ended, before=announced.before, on_look=announced.looked_at
                )
            elif work is None:
                announced.ended(now_ns, failed=False)
            elif announced.is_awaited:  # some works of gloo's say that they have ended to nobody else
                now_ns, failed = _waited_for(work)
                if on_end is not None:
                    on_end(now_ns, failed)
                announced.ended(now_ns, failed)
            elif on_end is None:
                self.completions.add(work, announced.ended, is_bucket=False)
            else:
                self.completions.add(work, on_end, announced.ended, is_bucket=True)
        except Exception as error:
            self._on_error(error)

    def _on_end_of_bucket(self, announced: Announced, work: dist.Work | None) -> OnEnd | None:
        """Who launches a bucket may want to be told of its end."""
        if work is None or announced.launch is None or announced.launch.launched is None:
            return None
        return announced.launch.launched(work)

    def failed(self, announced: Announced | None) -> None:
        """The backend has refused it."""
        if announced is None:
            return
        try:
            announced.ended(host_now_ns(), failed=True)
        except Exception as error:
            self._on_error(error)

    def is_lost(self, error: Exception) -> None:
        """One that is about to be launched could not be announced."""
        self._on_error(error)

    # -- the end -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Write nothing from now on. May be called on any thread, also where a collective is announced."""
        self._stopped = True
        for log in self.logs:
            with suppress(Exception):  # of a file that can't be cut to its length: what is in it is in it
                log.close()

    def forget(self) -> None:
        """Write nothing in this copy of a recorded process."""
        self._stopped = True
        for log in self.logs:
            log.forget()

    def close(self) -> None:
        """Write down what has ended, and nothing from now on."""
        self._interception.close()
        self.completions.close()
        self.stop()
        self._signatures.close()
        self.call_sites.close()

    # -- small parts ---------------------------------------------------------------------------------------------

    def _log_of(self, call: Call) -> GroupLog:
        is_point_to_point = call.op in POINT_TO_POINT
        of_group = self._logs.setdefault(call.group, {})
        log = of_group.get(is_point_to_point)
        return self._add_log(call, is_point_to_point) if log is None else log

    def _add_log(self, call: Call, is_point_to_point: bool) -> GroupLog:
        group = call.group
        with self._lock:
            if (known := self._logs[group].get(is_point_to_point)) is not None:  # another thread's first collective
                return known
            names = self._names[is_point_to_point]
            log = GroupLog(
                self.folder / group_file(len(names), point_to_point=is_point_to_point),
                GroupHeader(
                    name=_unused_name(_name_of(group), names),
                    ranks=_members_of(group),
                    rank=self.rank,
                    description=getattr(group, "group_desc", "") or "",
                    backend=backend_of(group, call.device),
                    point_to_point=is_point_to_point,
                ),
            )
            self._logs[group][is_point_to_point] = log
            self.logs.append(log)
            names.append(log.header.name)
            weakref.finalize(group, self._group_is_gone, log).atexit = False
        return log

    def _group_is_gone(self, log: GroupLog) -> None:
        """Close its log: a training may make a group in each epoch, and has only so many files to open."""
        with suppress(Exception):
            log.close()
        with suppress(ValueError):
            self.logs.remove(log)
            self.entries_of_gone_groups += log.newest


def _waited_for(work: dist.Work) -> tuple[int, bool]:
    """When it is over, and whether it failed: the caller, who waits as well, is told by its own wait."""
    failed = False
    try:
        work.wait()
    except Exception:
        failed = True
    return host_now_ns(), failed


def _unused_name(name: str, names: Sequence[str]) -> str:
    """A process group that is made anew has the name of the one before."""
    same = sum(known == name or known.startswith(f"{name} (") for known in names)
    return f"{name} ({same + 1})" if same else name


def _name_of(group: dist.ProcessGroup) -> str:
    try:
        return group.group_name
    except RuntimeError:  # made without init_process_group
        return "unnamed"


def _members_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    with suppress(Exception):  # one that torch.distributed does not know
        return tuple(dist.get_process_group_ranks(group))
    return tuple(range(group.size()))
