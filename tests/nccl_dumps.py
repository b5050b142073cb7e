"""Flight Recorder dumps as ``ProcessGroupNCCL`` has them written.

No NCCL is needed: these are made by hand, after what ``FlightRecorderDetail.hpp`` puts into a dump, and after what
``ProcessGroupNCCL.cpp`` gives it: names of operations, numbers, and which entries a coalesced launch leaves.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECOND = 10**9
START_NS = 1_760_000_000 * SECOND


class NcclRank:
    """Collects what one rank launches, and writes it as the recorder would.

    Args:
        rank: of the job.
        groups: members by name; the first is the default group.
    """

    def __init__(self, rank: int, groups: dict[str, Sequence[int]], version: str = "2.10") -> None:
        self.rank = rank
        self.groups = {name: list(ranks) for name, ranks in groups.items()}
        self.version = version
        self.entries: list[dict[str, Any]] = []
        self._collective = dict.fromkeys(groups, 0)
        self._p2p = dict.fromkeys(groups, 0)
        self._op = dict.fromkeys(groups, 0)

    def launch(self, op: str, *shapes: Sequence[int], group: str = "0", state: str = "completed", **more: Any) -> None:
        """A collective of its own."""
        self._collective[group] += 1
        self._add(op, shapes, group, state, **more)

    def coalesced(
        self, parts: Sequence[tuple[str, Sequence[int]]], *, group: str = "0", state: str = "completed"
    ) -> None:
        """Several collectives in one launch: they share a number, and an entry without tensors ends them."""
        self._collective[group] += 1
        for op, shape in parts:
            self._add(op, [shape], group, state)
        self._add("coalesced", [], group, state)

    def point_to_point(
        self, op: str, peer: int, shape: Sequence[int], *, group: str = "0", state: str = "completed"
    ) -> None:
        """``op`` is send or recv; ``peer`` is a rank of the group."""
        self._p2p[group] += 1
        own = self.groups[group].index(self.rank)
        name = f"send {own}->{peer}" if op == "send" else f"recv {own}<-{peer}"
        self._add(name, [shape], group, state, is_p2p=True)

    def as_dict(self, keep: int = 2000) -> dict[str, Any]:
        """What is dumped, with the newest entries only."""
        return {
            "version": self.version,
            "pg_config": {
                name: {"name": name, "desc": self._description(name), "ranks": str(ranks)}
                for name, ranks in self.groups.items()
            },
            "comm_lib_version": "2.27.5",
            "pg_status": {},
            "entries": self.entries[-keep:],
        }

    def write(self, folder: Path, *, keep: int = 2000) -> None:
        """A pickle, as it is dumped on a timeout."""
        folder.mkdir(exist_ok=True)
        (folder / f"nccl_trace_rank_{self.rank}").write_bytes(pickle.dumps(self.as_dict(keep), 2))

    def write_json(self, folder: Path) -> None:
        """JSON, as ``_dump_nccl_trace_json`` gives it: no frames, no None."""
        content = self.as_dict()
        for entry in content["entries"]:
            entry.pop("frames")
            entry["time_discovered_started_ns"] = entry["time_discovered_started_ns"] or 0
            entry["time_discovered_completed_ns"] = entry["time_discovered_completed_ns"] or 0
        (folder / f"nccl_trace_rank_{self.rank}.json").write_text(json.dumps(content, separators=(",", ":")))

    def _add(
        self,
        op: str,
        shapes: Sequence[Sequence[int]],
        group: str,
        state: str,
        *,
        dtype: str = "Float",
        line: int = 10,
        is_p2p: bool = False,
        is_retired: bool | None = None,
    ) -> None:
        self._op[group] += 1
        created_ns = START_NS + len(self.entries) * SECOND
        self.entries.append(
            {
                "frames": [
                    {
                        "name": "wrapper",
                        "filename": "/usr/lib/python3/site-packages/torch/distributed/c10d_logger.py",
                        "line": 83,
                    },
                    {"name": "train", "filename": "/workspace/train.py", "line": line},
                    {"name": "<module>", "filename": "/workspace/train.py", "line": 99},
                ],
                "record_id": len(self.entries),
                "pg_id": list(self.groups).index(group),
                "process_group": (group, self._description(group)),
                "thread_name": "python",
                "thread_id": "140000000000000",
                "collective_seq_id": self._collective[group],
                "p2p_seq_id": self._p2p[group],
                "op_id": self._op[group],
                "profiling_name": f"nccl:{op}",
                "time_created_ns": created_ns,
                "input_sizes": [list(shape) for shape in shapes],
                "input_dtypes": [dtype for _ in shapes],
                "output_sizes": [list(shape) for shape in shapes],
                "output_dtypes": [dtype for _ in shapes],
                "state": state,
                "time_discovered_started_ns": None if state == "scheduled" else created_ns + SECOND // 10,
                "time_discovered_completed_ns": created_ns + SECOND // 5 if state == "completed" else None,
                "retired": state == "completed" if is_retired is None else is_retired,
                "timeout_ms": 600_000,
                "is_p2p": is_p2p,
            }
        )

    def _description(self, group: str) -> str:
        return "default_pg" if group == next(iter(self.groups)) else "undefined"
