"""A driver that does not exist, under the name and with the functions of nvidia-ml-py that we call.

``GPUS`` says what each GPU answers: a number, or an error to raise, by the name of the function without
``nvmlDeviceGet``. A process started with FAKE_NVML=FILE reads them from a JSON file at each call.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 6, 10, 15
NVML_CLOCK_SM = 1
NVML_TEMPERATURE_GPU = 0
NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_VOLATILE_ECC = 0
NVML_NVLINK_MAX_LINKS = 4
nvmlEventTypeXidCriticalError = 8

GPUS: dict[str, dict[str, Any]] = {}
CALLS: list[str] = []


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(
            {3: "Not Supported", 6: "Not Found", 10: "Timeout", 15: "GPU is lost"}.get(value, f"error {value}")
        )


def _gpus() -> dict[str, dict[str, Any]]:
    path = os.environ.get("FAKE_NVML")
    if path:
        with open(path) as file:
            GPUS.clear()
            GPUS.update(json.load(file))
    return GPUS


def _get(handle: str, name: str) -> Any:
    CALLS.append(name)
    known = _gpus()[handle]
    if known.get("lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    if name not in known:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return known[name]


def nvmlInit() -> None:
    CALLS.append("Init")


def nvmlShutdown() -> None:
    CALLS.append("Shutdown")


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    if uuid not in _gpus():
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return uuid


def nvmlDeviceGetName(handle: str) -> str:
    return str(_get(handle, "Name"))


def nvmlDeviceGetMaxClockInfo(handle: str, type: int) -> int:
    return int(_get(handle, "MaxClockInfo"))


def nvmlDeviceGetClockInfo(handle: str, type: int) -> int:
    return int(_get(handle, "ClockInfo"))


def nvmlDeviceGetTemperature(handle: str, sensor: int) -> int:
    return int(_get(handle, "Temperature"))


def nvmlDeviceGetPowerUsage(handle: str) -> int:
    return int(_get(handle, "PowerUsage"))


def nvmlDeviceGetEnforcedPowerLimit(handle: str) -> int:
    return int(_get(handle, "EnforcedPowerLimit"))


def nvmlDeviceGetPowerManagementDefaultLimit(handle: str) -> int:
    return int(_get(handle, "PowerManagementDefaultLimit"))


def nvmlDeviceGetCurrentClocksEventReasons(handle: str) -> int:
    return int(_get(handle, "CurrentClocksEventReasons"))


def nvmlDeviceGetViolationStatus(device: str, perfPolicyType: int) -> SimpleNamespace:
    return SimpleNamespace(referenceTime=0, violationTime=_get(device, f"ViolationStatus{perfPolicyType}"))


def nvmlDeviceGetTotalEccErrors(handle: str, errorType: int, counterType: int) -> int:
    return int(_get(handle, f"TotalEccErrors{errorType}"))


def nvmlDeviceGetCurrPcieLinkWidth(handle: str) -> int:
    return int(_get(handle, "CurrPcieLinkWidth"))


def nvmlDeviceGetMaxPcieLinkWidth(handle: str) -> int:
    return int(_get(handle, "MaxPcieLinkWidth"))


def nvmlDeviceGetPcieReplayCounter(handle: str) -> int:
    return int(_get(handle, "PcieReplayCounter"))


def nvmlDeviceGetNvLinkState(device: str, link: int) -> int:
    return int(_get(device, "NvLinkState")[link])


def nvmlDeviceGetNvLinkErrorCounter(device: str, link: int, counter: int) -> int:
    return int(_get(device, "NvLinkErrorCounter"))


def nvmlEventSetCreate() -> list[str]:
    return []


def nvmlDeviceRegisterEvents(handle: str, eventTypes: int, eventSet: list[str]) -> None:
    _get(handle, "Xids")
    eventSet.append(handle)


def nvmlEventSetWait_v2(eventSet: list[str], timeoutms: int) -> SimpleNamespace:
    assert timeoutms == 0, "nobody may wait for an event"
    for handle in eventSet:
        xids = _gpus()[handle]["Xids"]
        if xids:
            return SimpleNamespace(device=handle, eventType=nvmlEventTypeXidCriticalError, eventData=xids.pop(0))
    raise NVMLError(NVML_ERROR_TIMEOUT)


def nvmlEventSetFree(eventSet: list[str]) -> None:
    eventSet.clear()
