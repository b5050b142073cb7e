"""Recording of a process that trains with torch's own DDP, or without DDP: ``attach``.

Example::

    from instrumented_ddp import attach

    attach("traces")  # before or after init_process_group

``overlapscope record`` does the same for scripts that must not be changed at all.
"""

from __future__ import annotations

import functools
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_group

from instrumented_ddp.recording.metadata import describe_rank, describe_run
from instrumented_ddp.session import Session, get_current_session, open_session, warn_unrecorded
from instrumented_ddp.stock.ddp import observe_stock_ddp
from instrumented_ddp.stock.own_loops import observe_own_loops
from instrumented_ddp.stock.plain_steps import OptimizerStepCounter
from instrumented_ddp.stock.wrapping import call_after_import
from instrumented_ddp.watchdog.init_watch import watch_rendezvous
from overlapscope.trace.environment import RecordingOptions, read_recording_options
from overlapscope.trace.json_files import write_json
from overlapscope.trace.schema import RANK_FILE, RUN_FILE

_log = logging.getLogger(__name__)

_FSDP: Final = "torch.distributed.fsdp._fully_shard._fsdp_state"

_trace: str | None = None
_is_waiting_for_groups = False


def attach(trace: str | Path | None = None) -> None:
    """Record this process as soon as it has a default process group, whatever it trains with.

    DDP instances that already exist are not observed; their collectives are. Calling this again leaves a recording that
    is in progress unchanged.

    Args:
        trace: record into this folder. None records if the process was started by ``overlapscope record``.
    """
    global _trace
    _trace = None if trace is None else str(trace)
    _wrap_init_process_group()
    _record_if_initialized()


def _wrap_init_process_group() -> None:
    """Wrap ``init_process_group`` so that recording starts with the next default process group."""
    global _is_waiting_for_groups
    if _is_waiting_for_groups:
        return
    _is_waiting_for_groups = True
    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        with watch_rendezvous(original, args, kwargs):
            original(*args, **kwargs)
        _record_if_initialized()

    for module in list(sys.modules.values()):  # also modules that imported it by name
        if getattr(module, "__dict__", {}).get("init_process_group") is original:
            module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _record_if_initialized() -> None:
    if not dist.is_initialized() or get_current_session() is not None:
        return
    try:
        recording = read_recording_options(_trace)
        if recording is not None:
            _record(open_session(recording.folder, dist.get_rank(), recording.on_incident), recording)
    except Exception as error:
        if (session := get_current_session()) is not None:
            session.disable_recording(error)
        else:
            warn_unrecorded(dist.get_rank(), error)


def _record(session: Session, recording: RecordingOptions) -> None:
    group = _get_default_group()
    device = _device_of(group)
    with suppress(OSError):  # a full disk: training continues
        write_json(session.folder / RANK_FILE, describe_rank(session.rank, device))
        write_json(session.folder / RUN_FILE, describe_run(group, device, recording.detail))
    session.is_provisional = _trace is None
    OptimizerStepCounter(session)
    session.watch_outside()  # after what counts its updates
    observe_stock_ddp(session)
    observe_own_loops(session)
    call_after_import(_FSDP, functools.partial(_observe_fsdp, session))


def _observe_fsdp(session: Session) -> None:
    try:
        from instrumented_ddp.stock.fsdp import observe_fsdp  # imports torch's, which takes half a second

        observe_fsdp(session)
    except (ImportError, AttributeError) as error:
        _log.warning("rank %d: fully_shard is not followed, as this torch has it otherwise: %s", session.rank, error)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which the process computes, if known yet; asking CUDA would allocate memory on a device."""
    if group.bound_device_id is not None:
        return group.bound_device_id
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    # Don't use the group's name: with one backend per device type it is the name of one of them, or of none.
    return torch.device("cuda" if "nccl" in dist.get_backend_config(group) else "cpu")
