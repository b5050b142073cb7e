"""Facts about a report and its recording: when, where and with which versions they were made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from markupsafe import escape

from dashboards.pages.shell import list_run_facts
from overlapscope import __version__
from overlapscope.text import format_count
from overlapscope.trace.recording import Trace

Fact = tuple[str, str]
"""Label and value."""

_MAX_HOSTS: Final = 8


def get_recording_name(folder: Path) -> str:
    """Return the name of a recording: reports are shared, and paths reveal more than others need to know."""
    return folder.resolve().name or "recording"


def redact_path(text: str, folder: Path) -> str:
    """Return a text in which the path of a folder is replaced by its name."""
    name, given = get_recording_name(folder), str(folder)
    for path in dict.fromkeys([str(folder.resolve()), os.path.abspath(folder), given]):
        if "/" not in path.rstrip("/"):
            continue
        # A short relative path may mean something else elsewhere in the text.
        for end in ("",) if path.startswith("/") else ("/", ":"):
            for before, after in ((path, name), (str(escape(path)), str(escape(name)))):
                text = text.replace(before + end, after + end)
    return text


def list_report_facts(trace: Trace, now: datetime) -> list[Fact]:
    """Return label and value of the known facts."""
    return [(label, value) for label, value in _yield_facts(trace, now) if value]


def _yield_facts(trace: Trace, now: datetime) -> Iterator[Fact]:
    run, versions = trace.run, trace.run.get("versions", {})
    yield "recording", get_recording_name(trace.path)
    yield from list_run_facts(trace)
    yield "recorded with", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "detail", str(run.get("detail", ""))
    hosts = [host for host in trace.ranks["host"].drop_duplicates().astype(str) if host != "unknown"]
    more = f" and {len(hosts) - _MAX_HOSTS:,} more" if len(hosts) > _MAX_HOSTS else ""
    yield "hosts", ", ".join(hosts[:_MAX_HOSTS]) + more
    devices = trace.ranks.loc[trace.ranks["device"] != "unknown", "device"].astype(str).value_counts()
    yield "devices", ", ".join(f"{device} ×{count}" if count > 1 else str(device) for device, count in devices.items())
    if steps := int(trace.steps["step"].nunique()):
        first, last = trace.steps["step"].min(), trace.steps["step"].max()
        chosen = f"{first:,} to {last:,} of those recorded"
        yield "steps", f"{format_count(steps)} recorded" if trace.extent == "all" else chosen
    for model in run.get("models") or ():
        arguments = model.get("ddp_arguments") or {}
        settings = ", ".join(f"{name}={value}" for name, value in arguments.items())
        yield f"DDP arguments of {model.get('class', '?')}", settings
    yield "report", f"made on {now:%d %b %Y, %H:%M} by OverlapScope {__version__}"
