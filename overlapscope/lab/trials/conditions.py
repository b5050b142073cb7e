"""Conditions under which trials are measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from overlapscope.units import format_bytes, format_ns


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Hosts, devices, versions and links of a measurement."""

    hosts: tuple[str, ...]
    """Host name of each rank."""
    device: str
    versions: Mapping[str, str]
    link_latency_ns: float
    """Time of an all-reduce of 1 kB by all ranks."""
    link_bytes_per_s: float
    """Rate of each link in an all-reduce of some MB, as nccl-tests' busbw."""
    argv: tuple[str, ...]

    def columns(self) -> dict[str, Any]:
        """Return the conditions as columns of a row."""
        return {
            "hosts": list(self.hosts),
            "device": self.device,
            "versions": json.dumps(dict(self.versions), sort_keys=True),
            "link_latency_ns": self.link_latency_ns,
            "link_bytes_per_s": self.link_bytes_per_s,
            "argv": list(self.argv),
        }


def describe_conditions(rows: pd.DataFrame) -> str:
    """Describe the conditions of results: ranks, hosts, links and versions, as the end of a sentence."""
    row = rows.iloc[-1]
    hosts = len(set(row["hosts"]))
    where = f"{len(row['hosts'])} ranks on {hosts} host{'s' * (hosts != 1)}, {row['device']}"
    link = (
        f"links carry {format_bytes(row['link_bytes_per_s'])}/s, an all-reduce of 1 kB takes "
        f"{format_ns(row['link_latency_ns'])}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in json.loads(row["versions"]).items())
    return f"{where}; {link}; {versions}."
