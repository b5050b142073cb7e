"""A GPU that does not exist, for this process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

UUID = "GPU-1234"
BUSY_GPU: dict[str, Any] = {
    "Name": "NVIDIA H100 80GB HBM3",
    "MaxClockInfo": 1980,
    "ClockInfo": 1950,
    "Temperature": 60,
    "PowerUsage": 600_000,
    "EnforcedPowerLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "CurrentClocksEventReasons": 0,
    "ViolationStatus0": 0,
    "ViolationStatus1": 0,
    "TotalEccErrors0": 0,
    "TotalEccErrors1": 0,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
    "PcieReplayCounter": 0,
    "NvLinkState": [1, 1, 0, 1],
    "NvLinkErrorCounter": 0,
    "Xids": [],
}


def play_gpu(patch: pytest.MonkeyPatch) -> Any:
    """Have torch and NVML know a busy GPU, and return the NVML, whose ``GPUS`` can be changed."""
    patch.syspath_prepend(str(Path(__file__).parent))
    patch.delitem(sys.modules, "pynvml", raising=False)
    import pynvml

    patch.setitem(sys.modules, "pynvml", pynvml)
    pynvml.GPUS[UUID] = dict(BUSY_GPU, Xids=[])
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    return pynvml
