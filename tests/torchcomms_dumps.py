"""Flight Recorder dumps as torchcomms has them written: made by hand, after its ``hooks/fr/FlightRecorder.cpp``."""

from __future__ import annotations

from typing import Any

from tests.nccl_dumps import NcclRank


class TorchcommsRank(NcclRank):
    """Collects what one rank launches in its communicators, and writes it as the hook's ``dump_file`` would."""

    def as_dict(self, keep: int = 2000) -> dict[str, Any]:
        """What is dumped: numbered as the process has launched it, whatever it is, and seldom seen to be completed."""
        content = super().as_dict(keep)
        content["pg_config"] = {
            name: {"name": name, "desc": "ncclx", "ranks": str(ranks)} for name, ranks in self.groups.items()
        }
        for entry in content["entries"]:
            entry |= {
                "collective_seq_id": entry["record_id"],
                "p2p_seq_id": 0,
                "is_p2p": False,
                "profiling_name": entry["profiling_name"].replace("nccl:", "ncclx:").partition(" ")[0],
                "process_group": (entry["process_group"][0], "ncclx"),
                "state": "started" if entry["state"] == "completed" else entry["state"],
                "time_discovered_completed_ns": None,
                "frames": [],
            }
        return content
