"""Collective log of this process: what is launched, in which group, in which order, and from which call site.

Every collective is written *before* it is launched, in the log of its group (``overlapscope.trace.collective_log``),
and its completion afterwards (``completion``). Code that launches a collective for a known purpose (the
reducer its buckets, the wrapper its buffers) declares it with ``collective_context``; everything else is the user's.
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
from types import FrameType
from typing import Final

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.backends import get_backend_name
from instrumented_ddp.collectives.call_sites import CallSiteTable, LoopTracker, iter_frames
from instrumented_ddp.collectives.completion import CompletionWatch
from instrumented_ddp.collectives.created_groups import CreatedGroups
from instrumented_ddp.collectives.device_events import DeviceEvent
from instrumented_ddp.collectives.dispatch import Call, DispatchInterceptor, find_unknown_operators
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.collectives.roles import CollectiveRole, HostBucket, Launch, current_launch, get_group_role
from instrumented_ddp.collectives.signatures import SignatureTable, TensorNames, read_reduce_op
from instrumented_ddp.collectives.user_reductions import UserReductions
from instrumented_ddp.native import EntryStore
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.collective_log import (
    AFTER_UPDATE,
    AWAITED,
    OTHER_THREAD,
    POINT_TO_POINT,
    REACHED,
    UNREACHED,
    CollectiveLogHeader,
    CollectiveLogWriter,
    Signature,
    group_file,
)
from overlapscope.trace.schema import EVENTS_FILE, NO_CALL_SITE

_log = logging.getLogger(__name__)

_IN_BACKWARD: Final = ("bucket", "bitmap", "hook")
_OF_USERS_CODE: Final = ("user", "join")
"""Roles of collectives that the user's loop waits for beside those of its backward."""
_JOIN: Final = CollectiveRole(role="join")
_LAUNCHING_MODULES: Final = (
    "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d",
    "torch.distributed.utils",
)
_JOINING_FUNCTIONS: Final = {
    "torch.distributed.algorithms.join": (
        "notify_join_context",
        "_get_num_nonjoined_procs",
        "_notify_procs_to_terminate",
    ),
    "torch.nn.parallel.distributed": (
        "_check_global_requires_backward_grad_sync",
        "_find_common_rank",
        "_sync_final_model",
    ),
}
"""Functions of torch that launch the collectives of ``join()``, by module."""


@dataclass(slots=True, kw_only=True)
class AnnouncedCollective:
    """A log entry whose collective is being launched."""

    log: CollectiveLogWriter
    number: int
    device: torch.device
    launch: Launch | None
    is_awaited: bool
    """True if the launching code continues only once it has ended, which on the host is right after the launch."""
    before: DeviceEvent | None = None
    """Event that is complete once the device has reached the collective."""

    def ended(self, now_ns: int, failed: bool) -> None:
        """Record that the collective was seen to have ended."""
        self.log.completed(self.number, now_ns, failed=failed)

    def record_reached(self, is_reached: bool) -> None:
        """Record whether the device has reached a collective that is slow to end."""
        self.log.seen(self.number, REACHED if is_reached else UNREACHED)


@dataclass(slots=True, kw_only=True)
class _KnownLaunch:
    """What all entries of one bucket have in common, as long as its tensor looks the same."""

    purpose: CollectiveRole
    """Declared purpose; kept, so that its identity is not another's."""
    op: str
    shape: torch.Size
    dtype: torch.dtype
    log: CollectiveLogWriter
    number: int
    """Number of its signature."""
    signature: Signature


class CollectiveRecorder:
    """Writer of the collective log of this process.

    Args:
        folder: folder of this rank, inside the run's folder.
        rank: rank of this process in the whole job.
        position: position of this rank, which is stored in every entry.
        on_error: called with an internal error that would leave the log incomplete.

    Raises:
        OverlapScopeError: the folder can't be written, or already holds a recording of this rank.
    """

    def __init__(
        self, folder: Path, rank: int, position: TrainingPosition, on_error: Callable[[Exception], None]
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.position = position
        self.logs: list[CollectiveLogWriter] = []
        """Logs of existing groups, and of the sends and receives in each, in the order of their first use."""
        self.entries_of_destroyed_groups = 0
        self.names = TensorNames()
        self.loop = LoopTracker(self.position)
        self.identify_launch: Callable[[Call], Launch | None] = lambda _: None
        """Identifies collectives without a declared purpose: torch's C++ reducer can't declare one."""
        self.before_collective: Callable[[], None] = lambda: None
        """Called before a collective is written: the only opportunity to track a loop without DDP."""
        self.elements_reduced_by_user = 0
        """Number of elements reduced by collectives of the user."""
        self.user_reductions = UserReductions()
        """What these are, to find gradients among them."""
        self._logs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, CollectiveLogWriter]] = (
            weakref.WeakKeyDictionary()
        )
        self._names: dict[bool, list[str]] = {False: [], True: []}
        """Names of all groups so far, by whether the log is of sends and receives."""
        self._lock = threading.RLock()  # a group may be garbage collected while another's log is created
        self._lines_seen: set[int] = set()
        self._known_launches: dict[tuple[int, int], _KnownLaunch] = {}
        """Launches of buckets seen before, by the identities of their purpose and group."""
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
        self.call_sites = CallSiteTable(folder)
        self.created_groups = CreatedGroups(folder, self.call_sites)
        """Process groups that this rank makes."""
        self.completions = CompletionWatch(on_error)
        """Watch for the ends of all collectives of this process."""
        self._interception = DispatchInterceptor(self)
        if unknown := find_unknown_operators():
            _log.warning(
                "rank %d: torch %s has collectives that are not recorded: %s",
                rank,
                torch.__version__,
                ", ".join(unknown),
            )

    @property
    def signatures(self) -> list[Signature]:
        """Return the known signatures, indexed by number - 1."""
        return self._signatures.known

    # -- called on torch's dispatcher, for every collective ------------------------------------------------------

    def announce(self, call: Call, launch: Launch | None = None) -> AnnouncedCollective | None:
        """Write an entry for a collective that is about to be launched.

        Args:
            launch: its declared launch; None for what this thread has declared, or what is recognized.
        """
        if self._stopped:
            return None
        try:
            return self._announce(call, launch)
        except Exception as error:  # it is launched all the same
            self._on_error(error)
            return None

    def _announce(self, call: Call, launch: Launch | None) -> AnnouncedCollective | None:
        self.completions.poll_oldest()
        launch = launch or current_launch() or self.identify_launch(call)
        if self._stopped:  # if that has failed, an entry without its purpose would differ from other ranks'
            return None
        if launch is not None and launch.launched is not None and (known := self._find_known(call, launch)) is not None:
            return self._enter(call, launch, known.log, known.number, known.signature, self.position.backward_call_site)
        purpose = _find_purpose(call, launch)
        call_site, names = self._find_call_site_and_names(call, purpose)
        self.before_collective()
        log = self._log_of(call)
        number, signature = self._signatures.of(call, purpose, log.header, names)
        if signature.role == "user" and signature.reduce_op:
            self.elements_reduced_by_user += signature.elements
            self.user_reductions.on_reduction(call.tensors, call_site, log.header.ranks)
        if launch is not None and launch.launched is not None and purpose is launch.purpose:
            self._add_known(call, launch, log, number, signature)
        return self._enter(call, launch, log, number, signature, call_site)

    def _find_known(self, call: Call, launch: Launch) -> _KnownLaunch | None:
        """Return what was found out about an earlier launch of the same bucket."""
        known = self._known_launches.get((id(launch.purpose), id(call.group)))
        if known is None or len(call.tensors) != 1:
            return None
        tensor = call.tensors[0]
        if known.op != call.op or known.shape != tensor.shape or known.dtype is not tensor.dtype:
            return None
        is_same = launch.is_reducer or read_reduce_op(call) == known.signature.reduce_op
        return known if is_same else None

    def _add_known(
        self, call: Call, launch: Launch, log: CollectiveLogWriter, number: int, signature: Signature
    ) -> None:
        if number and len(call.tensors) == 1 and launch.purpose.role in _IN_BACKWARD:
            self._known_launches[id(launch.purpose), id(call.group)] = _KnownLaunch(
                purpose=launch.purpose,
                op=call.op,
                shape=call.tensors[0].shape,
                dtype=call.tensors[0].dtype,
                log=log,
                number=number,
                signature=signature,
            )

    def _enter(
        self,
        call: Call,
        launch: Launch | None,
        log: CollectiveLogWriter,
        number: int,
        signature: Signature,
        call_site: int,
    ) -> AnnouncedCollective:
        position, is_on_host = self.position, call.device.type == "cpu"
        is_users = signature.role in _OF_USERS_CODE
        is_on_main_thread = not is_users or threading.current_thread() is threading.main_thread()
        # A wait of another thread, such as one that writes a checkpoint, does not block the training.
        is_awaited = call.is_awaited and is_users and is_on_host and is_on_main_thread
        flags = position.flags | (AWAITED if is_awaited else 0) | (0 if is_on_main_thread else OTHER_THREAD)
        entry = log.announce(
            number,
            signature,
            now_ns=host_now_ns(),
            step=position.step,
            call_site=call_site,
            batch=position.batch,
            phase=position.phase,
            flags=flags | self._get_iteration_flag() if position.has_updated else flags,
        )
        meant = launch if launch is not None and launch.group in (None, call.group) else None
        return AnnouncedCollective(
            log=log,
            number=entry,
            device=call.device,
            launch=meant,
            is_awaited=is_awaited or (meant is not None and meant.is_awaited),
            before=None if is_on_host else self.completions.mark_before(call.device),
        )

    def _get_iteration_flag(self) -> int:
        return AFTER_UPDATE if self.loop.has_begun_next_iteration(iter_frames(sys._getframe(1))) is False else 0

    def _find_call_site_and_names(self, call: Call, purpose: CollectiveRole | None) -> tuple[int, tuple[str, ...]]:
        """Return the call site that launches it, and the names of the tensors in variables there."""
        if purpose is not None and purpose.role in _IN_BACKWARD:
            return self.position.backward_call_site, ()
        call_site = NO_CALL_SITE
        names: tuple[str, ...] = ()
        try:
            frame = self.call_sites.find_caller_frame()
            call_site = self.call_sites.number_of(frame)
            if purpose is None and frame is not None and call_site not in self._lines_seen:
                self._lines_seen.add(call_site)
                self.names.note_modules(frame)
            if purpose is None and call.tensors:
                names = self.names.names_of(call.tensors, frame)
        except Exception as error:  # variables change while they are read: the entry is correct without these
            _log.debug("rank %d: a collective's line or names are not known: %r", self.rank, error)
        return call_site, names

    def launched(self, announced: AnnouncedCollective | None, work: dist.Work | None) -> None:
        """Record that the backend has accepted the collective, and watch for its end."""
        if announced is None:
            return
        now_ns = host_now_ns()
        try:
            announced.log.launched(announced.number, now_ns)
            bucket = self._tell_launcher(announced, work)
            if announced.device.type != "cpu":
                self.watch_on_device(announced, work)
            elif work is None:
                announced.ended(now_ns, failed=False)
            elif announced.is_awaited:  # some works of gloo report their end only to a waiter
                now_ns, failed = _wait_for_end(work)
                if bucket is not None:
                    bucket.ended(now_ns, failed)
                announced.ended(now_ns, failed)
            elif bucket is None:
                self.completions.add(work, announced.device, announced.ended)
            else:
                self.completions.add_bucket(work, bucket, announced.ended)
        except Exception as error:
            self._on_error(error)

    def watch_on_device(self, announced: AnnouncedCollective, work: dist.Work | None) -> None:
        """Watch for the end of a collective on a device, and until then for whether the device has reached it."""
        self.completions.add(
            work,
            announced.device,
            announced.ended,
            before=announced.before,
            on_reached_change=announced.record_reached,
        )

    def _tell_launcher(self, announced: AnnouncedCollective, work: dist.Work | None) -> HostBucket | None:
        """Return the bucket that is told of the end, if the code that launched it wants to be."""
        if work is None or announced.launch is None or announced.launch.launched is None:
            return None
        return announced.launch.launched(work)

    def failed(self, announced: AnnouncedCollective | None) -> None:
        """Record that the backend has rejected the collective."""
        if announced is None:
            return
        try:
            announced.ended(host_now_ns(), failed=True)
        except Exception as error:
            self._on_error(error)

    def on_unparsed_collective(self, error: Exception) -> None:
        """Handle a collective that could not be announced."""
        self._on_error(error)

    # -- closing -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop writing. May be called on any thread, even one that is announcing a collective."""
        self._stopped = True
        for log in self.logs:
            with suppress(Exception):  # a file can't be truncated to its length: its content is written anyway
                log.close()

    def discard(self) -> None:
        """Stop writing in this copy of a recorded process."""
        self._stopped = True
        self.created_groups.close()
        for log in self.logs:
            log.discard()

    def close(self) -> None:
        """Record the collectives that have ended, and stop writing."""
        self._interception.close()
        self.created_groups.close()
        self.completions.close()
        self.stop()
        self._signatures.close()
        self.call_sites.close()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _log_of(self, call: Call) -> CollectiveLogWriter:
        is_point_to_point = call.op in POINT_TO_POINT
        of_group = self._logs.setdefault(call.group, {})
        log = of_group.get(is_point_to_point)
        return self._add_log(call, is_point_to_point) if log is None else log

    def _add_log(self, call: Call, is_point_to_point: bool) -> CollectiveLogWriter:
        group = call.group
        with self._lock:
            if (known := self._logs[group].get(is_point_to_point)) is not None:  # another thread's first collective
                return known
            names = self._names[is_point_to_point]
            log = CollectiveLogWriter(
                self.folder / group_file(len(names), point_to_point=is_point_to_point),
                CollectiveLogHeader(
                    name=_make_unique_name(_name_of(group), names),
                    ranks=_get_members(group),
                    rank=self.rank,
                    description=getattr(group, "group_desc", "") or "",
                    backend=get_backend_name(group, call.device),
                    point_to_point=is_point_to_point,
                ),
                make_store=EntryStore,
            )
            self._logs[group][is_point_to_point] = log
            self.logs.append(log)
            names.append(log.header.name)
            weakref.finalize(group, self._on_group_destroyed, log).atexit = False
        return log

    def _on_group_destroyed(self, log: CollectiveLogWriter) -> None:
        """Close a group's log: a training may create a group in each epoch, and the number of open files is limited."""
        self._known_launches.clear()  # another group may have its identity
        with suppress(Exception):
            log.close()
        with suppress(ValueError):
            self.logs.remove(log)
            self.entries_of_destroyed_groups += log.latest


def _find_purpose(call: Call, launch: Launch | None) -> CollectiveRole | None:
    """Return the purpose of a collective; None if it is the user's."""
    of_group = get_group_role(call.group)
    if of_group is not None:
        return of_group
    if launch is not None:
        return None if launch.is_users else launch.purpose
    return _JOIN if _is_of_join(call.caller) else None


def _is_of_join(frame: FrameType | None) -> bool:
    """Return whether ``join()`` launches a collective: by the nearest frame, which is the same on all ranks."""
    while frame is not None and frame.f_globals.get("__name__") in _LAUNCHING_MODULES:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in _JOINING_FUNCTIONS.get(frame.f_globals.get("__name__", ""), ())


def _wait_for_end(work: dist.Work) -> tuple[int, bool]:
    """Return when a work ended, and whether it failed; its error is raised again by the caller's own wait."""
    failed = False
    try:
        work.wait()
    except Exception:
        failed = True
    return host_now_ns(), failed


def _make_unique_name(name: str, names: Sequence[str]) -> str:
    """Return a name that is not in use: a process group that is recreated has the name of its predecessor."""
    same = sum(known == name or known.startswith(f"{name} (") for known in names)
    return f"{name} ({same + 1})" if same else name


def _name_of(group: dist.ProcessGroup) -> str:
    try:
        return group.group_name
    except RuntimeError:  # created without init_process_group
        return "unnamed"


def _get_members(group: dist.ProcessGroup) -> tuple[int, ...]:
    with suppress(Exception):  # a group that torch.distributed does not know
        return tuple(dist.get_process_group_ranks(group))
    return tuple(range(group.size()))
