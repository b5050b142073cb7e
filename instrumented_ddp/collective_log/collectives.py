"""The collective log of this process: what is launched, in which group, in which order, by which line.

Every collective is written down *before* it is launched, in the log of its group (``overlapscope.trace.group_log``),
and its completion afterwards, by a thread that looks now and then. Who launches something on purpose (the reducer its
buckets, the wrapper its buffers) says so in ``purposes``; everything else is the user's own.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TextIO

import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import ParameterSpec, dtype_name
from instrumented_ddp.collective_log.call_sites import CallSites
from instrumented_ddp.collective_log.data_position import DataPosition
from instrumented_ddp.collective_log.dispatch import Call, Interception
from instrumented_ddp.collective_log.ends import Ends, InFlight
from instrumented_ddp.collective_log.farewell import Farewell, call_at_exit
from instrumented_ddp.collective_log.purposes import Launch, Purpose, current_purpose
from instrumented_ddp.collective_log.tensor_names import TensorNames
from instrumented_ddp.timing import host_now_ns
from instrumented_ddp.watchdog.watchdog import Watchdog
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import OnIncident
from overlapscope.trace.format import (
    EVENTS_FILE,
    NO_CALL_SITE,
    PARAMETERS_FILE,
    SIGNATURES_FILE,
    UNREDUCED_FILE,
    rank_folder,
    write_json,
)
from overlapscope.trace.group_log import SHADOW, UNEVEN_INPUTS, UNKNOWN_PHASE, GroupHeader, GroupLog, group_file
from overlapscope.trace.signature import POINT_TO_POINT, Signature

if TYPE_CHECKING:
    from instrumented_ddp.recorder import Recorder

_MOST_SIGNATURES: Final = 100_000
"""Of collectives whose shapes change all the time; those beyond are numbered 0, and still hashed as what they are."""
_IN_BACKWARD: Final = ("bucket", "bitmap", "hook")
_FRAMES_TO_REDUCTION: Final = 6
"""From the kernel to the function that the user has called, through its decorators."""


class Collectives:
    """Writes down the collectives of this process.

    Args:
        trace_folder: the run's folder, the same for all ranks of a host.
        rank: of this process in the whole job.
        on_incident: whether there is a watchdog, and what it does when it finds something.

    Raises:
        OverlapScopeError: the folder can't be written, or already holds a recording of this rank.
    """

    def __init__(self, trace_folder: Path, rank: int, on_incident: OnIncident = "report") -> None:
        self.folder = rank_folder(trace_folder, rank)
        self.rank = rank
        self.logs: list[GroupLog] = []
        """Of each group, and of the sends and receives in each, in the order of their first use."""
        self.signatures: list[Signature] = []
        """By number - 1."""
        self.names = TensorNames()
        self.where: Callable[[], tuple[int, int]] = lambda: (0, UNKNOWN_PHASE)
        """Step and phase that the process is in."""
        self.flags = 0
        """Of all entries from now on, see ``overlapscope.trace.group_log``."""
        self.recorder: Recorder | None = None
        """Of steps and phases, if this process trains with our DDP."""
        self.recognise: Callable[[Call], Launch | None] = lambda _: None
        """Asked about collectives of which nobody has said what for: torch's own reducer is in C++ and can't."""
        self.elements_reduced_by_user = 0
        """By collectives that are nobody's but the user's."""
        self.unreduced: dict[str, Any] | None = None
        """The first update that has used gradients of this rank alone, see ``gradients_were_not_reduced``."""
        self.is_provisional = False
        """Whether nothing but the environment asked for it."""
        self.line_of_backward = NO_CALL_SITE
        """Call site of what DDP launches during a backward."""
        self._logs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, GroupLog]] = weakref.WeakKeyDictionary()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._lock = threading.Lock()
        self._lines_seen: set[int] = set()
        self._models = 0
        self._has_complained = False
        self._closed = False
        self._pid = os.getpid()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / EVENTS_FILE).exists():  # of a run that had no collective log
                raise FileExistsError
            self._signatures_file: TextIO = (self.folder / SIGNATURES_FILE).open("x", encoding="utf-8")
        except FileExistsError:
            raise OverlapScopeError(
                f"{self.folder}: already holds a recording; move it away or record elsewhere"
            ) from None
        except OSError as error:
            raise OverlapScopeError(f"{self.folder}: can't be made ({error.strerror})") from None
        self.call_sites = CallSites(self.folder)
        self.position = DataPosition()
        self.farewell = Farewell(self.folder, self.call_sites, self._fails)
        self._ends = Ends()
        self._interception = Interception(self)
        self._watchdog = None if on_incident == "off" else Watchdog(self, stops_job=on_incident == "raise")
        call_at_exit(self.close)

    # -- called on torch's dispatcher, for every collective ------------------------------------------------------

    def announce(self, call: Call) -> InFlight | None:
        """A collective is about to be launched."""
        if self._closed or os.getpid() != self._pid:
            return None
        try:
            return self._announce(call)
        except Exception as error:  # the disk is full, or variables change while they are looked at: it is launched
            self._complain_once(error)
            return None

    def _announce(self, call: Call) -> InFlight:
        purpose, on_launch = current_purpose(), None
        if purpose is None and (launch := self.recognise(call)) is not None:
            purpose, on_launch = launch.purpose, launch.launched
        if purpose is not None and purpose.role in _IN_BACKWARD:
            frame, call_site = None, self.line_of_backward
        else:
            frame = self.call_sites.frame_of_caller()
            call_site = self.call_sites.number_of(frame)
            if purpose is None and frame is not None and call_site not in self._lines_seen:
                self._lines_seen.add(call_site)
                self.names.note_modules(frame)
        step, phase = self.where()
        log = self._log_of(call)
        number, signature = self._signature_of(call, purpose, log.header, frame)
        if signature.role == "user" and signature.reduce_op:
            self.elements_reduced_by_user += signature.elements
        entry = log.announce(
            number,
            signature,
            now_ns=host_now_ns(),
            step=step,
            call_site=call_site,
            batch=self.position.batch,
            phase=phase,
            flags=self.flags | (purpose.flags if purpose is not None else 0),
        )
        return InFlight(log=log, number=entry, on_launch=on_launch)

    def launched(self, announced: InFlight | None, work: dist.Work | None) -> None:
        """The backend has taken it."""
        if announced is None:
            return
        now_ns = host_now_ns()
        announced.log.launched(announced.number, now_ns)
        if work is None:
            announced.log.completed(announced.number, now_ns)
        else:
            announced.work = work
            self._ends.add(announced)
            if announced.on_launch is not None:
                try:
                    announced.on_launch(work)
                except Exception as error:
                    self._complain_once(error)

    def failed(self, announced: InFlight | None) -> None:
        """The backend has refused it."""
        if announced is not None:
            announced.log.completed(announced.number, host_now_ns(), failed=True)

    # -- what DDP says -------------------------------------------------------------------------------------------

    def add_model(self, module: torch.nn.Module, parameters: Sequence[ParameterSpec], frozen: Sequence[str]) -> int:
        """Write down what a DDP instance is given, before ranks compare it.

        Returns:
            Its number within the process.
        """
        number = self._models
        self._models += 1
        self.names.add_module(module)
        line = {
            "model": number,
            "class": type(module).__name__,
            "parameters": [parameter.signature for parameter in parameters],
            "frozen": list(frozen),
            "modules": {name: type(part).__name__ for name, part in module.named_modules() if name},
        }
        with suppress(OSError), (self.folder / PARAMETERS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return number

    def gradients_were_not_reduced(self, model: int, call_site: int) -> None:
        """An update uses gradients that were never averaged. Written down once; every step would say the same.

        Args:
            call_site: where the module was called instead of its wrapper.
        """
        if self.unreduced is not None:
            return
        file, line, function = self.call_sites.place(call_site) or (None, None, None)
        self.unreduced = {
            "model": model,
            "step": self.where()[0],
            "call_site": call_site,
            "file": file,
            "line": line,
            "function": function,
            "time_ns": host_now_ns(),
        }
        with suppress(OSError):
            write_json(self.folder / UNREDUCED_FILE, self.unreduced)

    def training_forward(self, *, has_uneven_inputs: bool) -> None:
        """A forward begins whose gradients are wanted.

        Args:
            has_uneven_inputs: it is under ``join()``, where ranks may be at different steps.
        """
        self.flags = UNEVEN_INPUTS if has_uneven_inputs else 0
        self.position.forward_begins(self.call_sites.frame_of_caller())

    @contextmanager
    def has_joined(self) -> Iterator[None]:
        """What is launched inside stands in for what a rank without inputs has not."""
        before, self.flags = self.flags, UNEVEN_INPUTS | SHADOW
        try:
            yield
        finally:
            self.flags = before

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write down what has ended, and nothing from now on. Called at exit; may be called before, and twice."""
        if self._closed or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        self.farewell.close()
        if self._watchdog is not None:
            self._watchdog.close()
        self._interception.close()
        self._closed = True
        self._ends.close()
        for log in self.logs:
            log.close()
        self.position.close()
        self._signatures_file.close()
        self.call_sites.close()

    @property
    def closed(self) -> bool:
        """``close`` has been called."""
        return self._closed

    def _complain_once(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            print(f"overlapscope: {self.folder}: a collective is missing in the log: {error!r}", file=sys.stderr)

    def _fails(self, what: dict[str, Any]) -> None:
        if self._watchdog is not None:
            self._watchdog.failed(what)

    # -- small parts ---------------------------------------------------------------------------------------------

    def _log_of(self, call: Call) -> GroupLog:
        is_point_to_point = call.op in POINT_TO_POINT
        of_group = self._logs.setdefault(call.group, {})
        log = of_group.get(is_point_to_point)
        return self._add_log(call.group, is_point_to_point) if log is None else log

    def _add_log(self, group: dist.ProcessGroup, is_point_to_point: bool) -> GroupLog:
        with self._lock:
            groups = sum(log.header.point_to_point == is_point_to_point for log in self.logs)
            log = GroupLog(
                self.folder / group_file(groups, point_to_point=is_point_to_point),
                GroupHeader(
                    name=self._unused_name(_name_of(group), is_point_to_point),
                    ranks=_members_of(group),
                    rank=self.rank,
                    description=getattr(group, "group_desc", "") or "",
                    backend=group.name(),
                    point_to_point=is_point_to_point,
                ),
            )
            self._logs[group][is_point_to_point] = log
            self.logs.append(log)
        return log

    def _unused_name(self, name: str, is_point_to_point: bool) -> str:
        """A process group that is made anew has the name of the one before."""
        of_kind = [log.header.name for log in self.logs if log.header.point_to_point == is_point_to_point]
        same = sum(known == name or known.startswith(f"{name} (") for known in of_kind)
        return f"{name} ({same + 1})" if same else name

    def _signature_of(
        self, call: Call, purpose: Purpose | None, header: GroupHeader, frame: FrameType | None
    ) -> tuple[int, Signature]:
        tensors = call.tensors
        names = self.names.names_of(tensors, frame) if purpose is None and tensors else ()
        reduce_op = _reduce_op() if "reduce" in call.op else ""
        key = (
            call.op,
            purpose,
            names,
            reduce_op,
            call.peer,
            call.tag,
            header.ranks,
            tensors[0].dtype if tensors else None,
            *(tensor.shape for tensor in tensors),
        )
        number = self._numbers.get(key)
        if number is not None:
            return number, self.signatures[number - 1]
        what = purpose or Purpose(role="user")
        is_known_peer = call.peer is not None and 0 <= call.peer < len(header.ranks)
        signature = Signature(
            op=call.op,
            reduce_op=reduce_op,
            dtype=dtype_name(tensors[0].dtype) if tensors else "",
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            elements=sum(tensor.numel() for tensor in tensors),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            peer=header.ranks[call.peer] if call.peer is not None and is_known_peer else call.peer,
            tag=call.tag,
            names=names,
            role=what.role,
            model=what.model,
            plan_epoch=what.plan_epoch,
            plan_hash=what.plan_hash,
            bucket=what.bucket,
        )
        with self._lock:
            if len(self.signatures) >= _MOST_SIGNATURES:
                return 0, signature
            self.signatures.append(signature)
            number = self._numbers[key] = len(self.signatures)
            with suppress(OSError, ValueError):  # a full disk, or closed a moment ago
                self._signatures_file.write(signature.to_json(number) + "\n")
                self._signatures_file.flush()
        return number, signature


def _name_of(group: dist.ProcessGroup) -> str:
    try:
        return group.group_name
    except RuntimeError:  # made without init_process_group
        return "unnamed"


def _members_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    with suppress(Exception):  # one that torch.distributed does not know
        return tuple(dist.get_process_group_ranks(group))
    return tuple(range(group.size()))


def _reduce_op() -> str:
    """What a function of ``torch.distributed`` was asked to do: the dispatcher is given a box that can't be opened.

    Returns:
        ``sum``, ``max`` ...; empty if a process group was called by other ways.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_TO_REDUCTION):
        if frame is None:
            break
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d" and "op" in frame.f_locals:
            op = frame.f_locals["op"]
            return str(getattr(op, "op", op)).rpartition(".")[2].lower()
        frame = frame.f_back
    return ""


_of_this_process: Collectives | None = None


def collectives_of_this_process() -> Collectives | None:
    """What writes down this process's collectives; None if nothing does."""
    return _of_this_process if _of_this_process is not None and not _of_this_process.closed else None


def start_collective_log(trace_folder: Path, rank: int, on_incident: OnIncident = "report") -> Collectives:
    """Write down the collectives of this process from now on.

    A script that names a folder is followed there from a log that was only started because of the environment.

    Raises:
        OverlapScopeError: the folder can't be written, or the process already records into another one.
    """
    global _of_this_process
    existing = collectives_of_this_process()
    is_elsewhere = existing is not None and existing.folder != rank_folder(trace_folder, rank)
    if existing is not None and is_elsewhere and existing.is_provisional and existing.recorder is None:
        existing.close()
        existing, is_elsewhere = None, False
    if existing is None:
        existing = _of_this_process = Collectives(trace_folder, rank, on_incident)
    elif is_elsewhere:
        raise OverlapScopeError(f"{trace_folder}: this process already records into {existing.folder.parent}")
    return existing
