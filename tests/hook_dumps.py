"""Flight Recorder dumps as torch's ``FlightRecorderHook`` has them written, for backends that don't record themselves.

Made by hand, after dumps of torch 2.14 and 2.15 with the backend ``fake`` and after ``FlightRecorderHook.hpp``.
"""

from __future__ import annotations

from typing import Any, Final

from tests.nccl_dumps import NcclRank

_NAMES_OF_214: Final = {"all_reduce": "allreduce", "all_gather": "allgather", "_all_gather_base": "allgather"}


class HookRank(NcclRank):
    """Collects what one rank launches over nccl2 in torch 2.15, whose ends the hook is told of."""

    def as_dict(self, keep: int = 2000) -> dict[str, Any]:
        """What is dumped: no entry is ever seen to be started."""
        content = super().as_dict(keep)
        for entry in content["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("nccl:", "nccl2:")
            entry["state"] = "scheduled" if entry["state"] == "started" else entry["state"]
            entry["time_discovered_started_ns"] = None
        return content


class HookRankOf214(NcclRank):
    """The same in torch 2.14, whose hook is not told of ends: what has been launched is retired."""

    def as_dict(self, keep: int = 2000) -> dict[str, Any]:
        """What is dumped: no backend's name, and of sends and receives not between whom."""
        content = super().as_dict(keep)
        for entry in content["entries"]:
            op = entry["profiling_name"].removeprefix("nccl:").partition(" ")[0]
            entry |= {
                "profiling_name": f"c10d:{_NAMES_OF_214.get(op, op)}",
                "state": "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": True,
            }
        return content
