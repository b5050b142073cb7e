"""What runs for every gradient, record and collective: in C where it could be compiled, else its twins in Python."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

from instrumented_ddp.native import countdown, finite
from overlapscope.trace import collective_log, event_log

INTERFACE: Final = 6
"""Version of the interface in ``_native.pyi``. A build of another one is of an earlier checkout, and not used."""

NATIVE_VARIABLE: Final = "OVERLAPSCOPE_NATIVE"
"""Environment variable that, if it is ``0``, selects the twins in Python."""


def _load() -> tuple[ModuleType | None, str]:
    """Return the code in C; if it is not used, None and why."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None, f"{NATIVE_VARIABLE}=0 is set"
    try:
        module = import_module("instrumented_ddp.native._native")
    except ModuleNotFoundError:
        return None, "the one in C was not compiled; install a C compiler, then overlapscope again"
    except ImportError as error:
        return None, f"the one in C can't be loaded ({error}); install overlapscope again"
    if module.INTERFACE != INTERFACE:
        return None, "the one in C was compiled from another version; install overlapscope again"
    return module, ""


_native, WHY_PYTHON = _load()
"""``WHY_PYTHON``: why the code in C is not used, and what to do about it; empty if it is."""

IS_NATIVE: Final = _native is not None
"""Whether the code in C is used."""

if TYPE_CHECKING:
    from instrumented_ddp.native import _native as contract

    DeviceEvents = contract.DeviceEvents
    EventTimer = contract.EventTimer
elif _native is not None:
    DeviceEvents, EventTimer = _native.DeviceEvents, _native.EventTimer
    # whose twins are ``collectives.device_events.TorchEvents`` and ``recording.timing.CudaTimer``

if TYPE_CHECKING or _native is None:
    Countdown = countdown.Countdown
    EntryStore = collective_log.EntryStore
    FiniteProbe = finite.FiniteProbe
    RecordStore = event_log.RecordStore
else:
    Countdown, EntryStore, RecordStore = _native.Countdown, _native.EntryStore, _native.RecordStore
    FiniteProbe = _native.FiniteProbe
