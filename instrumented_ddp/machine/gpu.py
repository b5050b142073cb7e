"""An NVIDIA GPU through NVML, by its official Python package ``nvidia-ml-py`` (module ``pynvml``), if it is installed.

NVML is called by ctypes, which releases Python's lock, on a thread of ours, because a GPU in trouble may answer late.
What a GPU, driver or container does not support is asked for once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import torch

from instrumented_ddp.machine.source import SourceLostError
from overlapscope.trace.machine_facts import GPU

_W: Final = 1e-3
"""NVML's milliwatts in watts."""
_MOST_EVENTS: Final = 64
_NVLINK_ERRORS: Final = (0, 1, 2, 3)
"""``NVML_NVLINK_ERROR_DL_*``: replays, recoveries, CRC errors of flits and of data."""

Query = Callable[[], float]


class GpuUnreadableError(Exception):
    """A GPU can't be read: the package, the driver or the permission is missing."""


class Gpu:
    """A source: the GPU that a rank computes on.

    Args:
        device: device of the rank, as torch numbers it.

    Raises:
        GpuUnreadableError: NVML does not know it, or can't be used here.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = _load_nvml()
        uuid = _get_uuid(device)
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            model = self._nvml.nvmlDeviceGetName(self._handle)
        except self._nvml.NVMLError as error:
            raise GpuUnreadableError(f"NVML: {error}") from None
        self.name = f"{GPU} {uuid}"
        self.label = model.decode() if isinstance(model, bytes) else str(model)
        self._missing: dict[str, str] = {}
        self._links = self._find_links()
        self._queries: dict[str, Query] = self._list_queries()
        self._is_lost = False
        constants = self._list_constants()
        self._constants = {name: value for name, query in constants.items() for value in self._ask(name, query)}
        self._events = self._register_events()

    def read(self) -> dict[str, float]:
        """Return its facts.

        Raises:
            SourceLostError: the GPU no longer answers.
        """
        found = dict(self._constants)
        for name, query in list(self._queries.items()):
            for value in self._ask(name, query):
                found[name] = value
        if self._is_lost:
            raise SourceLostError("the GPU no longer answers")
        return found

    def take_events(self) -> list[tuple[str, float]]:
        """Return the driver's errors since the last call, without waiting for one."""
        found: list[tuple[str, float]] = []
        if self._events is not None:
            for _ in range(_MOST_EVENTS):
                try:
                    event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                except self._nvml.NVMLError:  # none so far
                    break
                if int(event.eventType) & self._nvml.nvmlEventTypeXidCriticalError:
                    found.append(("xid", float(event.eventData)))
        if self._is_lost:
            found.append(("lost", 1.0))
        return found

    def missing(self) -> dict[str, str]:
        """Return what this GPU or driver does not tell, and why."""
        return dict(self._missing)

    def close(self) -> None:
        """Let go of NVML, which counts its users."""
        with suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _ask(self, name: str, query: Query) -> Iterator[float]:
        """Yield the answer to a query, if there is one."""
        try:
            yield float(query())
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                self._is_lost = True
            else:
                self._missing[name] = str(error)
                self._queries.pop(name, None)

    def _list_constants(self) -> dict[str, Query]:
        nvml, handle = self._nvml, self._handle
        return {
            "max_sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "default_power_cap_w": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) * _W,
            "max_pcie_width": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
            **({"nvlinks": lambda: len(self._links)} if self._links else {}),
        }

    def _list_queries(self) -> dict[str, Query]:
        nvml, handle = self._nvml, self._handle
        limits = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        limits = limits or nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # its name until 2023

        def count_ecc(errors: int) -> float:
            return float(nvml.nvmlDeviceGetTotalEccErrors(handle, errors, nvml.NVML_VOLATILE_ECC))

        def limited_ns(policy: int) -> float:
            return float(nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime)

        queries: dict[str, Query] = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "clock_limits": lambda: limits(handle),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) * _W,
            "power_cap_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) * _W,
            "thermal_limited_ns": lambda: limited_ns(nvml.NVML_PERF_POLICY_THERMAL),
            "power_limited_ns": lambda: limited_ns(nvml.NVML_PERF_POLICY_POWER),
            "ecc_corrected": lambda: count_ecc(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            "ecc_uncorrected": lambda: count_ecc(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            "pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
        }
        if self._links:
            queries |= {"nvlinks_active": self._count_active_links, "nvlink_errors": self._count_link_errors}
        return queries

    def _find_links(self) -> list[int]:
        """Return the numbers of the NVLinks that the GPU has, up or down."""
        links = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            try:
                self._nvml.nvmlDeviceGetNvLinkState(self._handle, link)
            except self._nvml.NVMLError:  # of this number, or of all
                continue
            links.append(link)
        return links

    def _count_active_links(self) -> float:
        return sum(bool(self._nvml.nvmlDeviceGetNvLinkState(self._handle, link)) for link in self._links)

    def _count_link_errors(self) -> float:
        count = self._nvml.nvmlDeviceGetNvLinkErrorCounter
        return sum(count(self._handle, link, errors) for link in self._links for errors in _NVLINK_ERRORS)

    def _register_events(self) -> Any:
        """Return a set that collects the driver's errors; None if this driver or container has none."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            self._missing["xid"] = str(error)
            return None
        return events


def _load_nvml() -> Any:
    if torch.version.cuda is None:
        raise GpuUnreadableError("it is no NVIDIA GPU")
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise GpuUnreadableError("the package nvidia-ml-py is not installed") from None


def _get_uuid(device: torch.device) -> str:
    """Return the name of a device that does not depend on CUDA_VISIBLE_DEVICES."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    if not uuid:
        raise GpuUnreadableError("torch does not tell its UUID")
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
