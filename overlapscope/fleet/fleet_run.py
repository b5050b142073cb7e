"""What is kept of a run to compare it with many others: its figures, who was late, where, and when it was."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from overlapscope.analysis import Analysis
from overlapscope.chunked_analysis import analyze_recording
from overlapscope.compare.comparison import collect_parameters
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.kinds import KINDS
from overlapscope.diagnosis.rank_state import is_running
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.fleet.run_figures import RunFigures, compute_run_figures, diagnose_trace
from overlapscope.fleet.standouts import Place
from overlapscope.stragglers.finding import Finding
from overlapscope.stragglers.stragglers import get_hosts
from overlapscope.stragglers.transfers import measure_link_rates
from overlapscope.text import format_count
from overlapscope.trace.description import describe_models
from overlapscope.trace.flight_recorder import holds_dumps
from overlapscope.trace.folders import find_rank_folders, is_remote
from overlapscope.trace.load import partition_recording
from overlapscope.trace.recording import Trace, empty_trace
from overlapscope.trace.regular_file import remember_small_files
from overlapscope.workers import SerialWorkers

State = Literal["read", "running", "unreadable"]

_UNKNOWN_HOSTS: Final = ("", "unknown")
_NUMBERED_DEVICE: Final = re.compile(r".*:\d+$")
_DIGEST_LENGTH: Final = 8


@dataclass(frozen=True, kw_only=True)
class LateRanks:
    """Ranks that a finding of the straggler analysis names."""

    ranks: tuple[int, ...]
    cause: str
    saving_ns: float
    """What fixing this alone would save per step."""


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Links from one host to another, or within one."""

    sender: str
    receiver: str
    links: int
    """Number of links of ranks that were measured."""
    slow: int
    """Number of them that were slow."""


@dataclass(frozen=True, kw_only=True)
class FleetRun:
    """One run, as JSON and other processes can have it."""

    name: str
    path: str
    state: State
    reason: str = ""
    """Why it was not read; empty if it was."""
    figures: RunFigures | None = None
    """Figures, as on the page Runs; None if it was not read."""
    code: str = ""
    """Code of the verdict, as ``diagnose --json`` has it; empty without one."""
    errors: int = 0
    """Number of problems that mean that data is missing."""
    started_unix_ns: int | None = None
    world_size: int | None = None
    model: str = ""
    """Classes and number of parameters."""
    model_digest: str = ""
    """Digest of the names and shapes of all parameters; empty if they are unknown."""
    script: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    """Host of each rank; empty if unknown."""
    devices: tuple[str, ...] = ()
    """Device of each rank if it has one of its own, else empty."""
    compared: tuple[int, ...] = ()
    """Ranks whose times could be compared with each other; none if there is no analysis of stragglers."""
    late: tuple[LateRanks, ...] = ()
    host_links: tuple[HostLink, ...] = ()
    """Links by hosts, of a run with a slow one."""
    at_fault: tuple[int, ...] = ()
    """Ranks that the verdict names, if their hosts may be the cause."""
    identity: str = ""
    """Equal of copies of one run; empty if it can't be known."""

    @property
    def day(self) -> date | None:
        """Return the day on which it started, in UTC; None if that is unknown."""
        if not self.started_unix_ns:
            return None
        try:
            return datetime.fromtimestamp(self.started_unix_ns / 1e9, UTC).date()
        except (ValueError, OverflowError, OSError):
            return None

    @property
    def week(self) -> date | None:
        """Return the Monday of the week in which it started, in UTC; None if that is unknown."""
        day = self.day
        return None if day is None else day - timedelta(days=day.weekday())

    @property
    def places(self) -> dict[int, Place]:
        """Return where each rank ran."""
        places = (Place(*each) for each in zip(self.hosts, self.devices, strict=True))
        return dict(zip(self.ranks, places, strict=True))

    @property
    def late_ranks(self) -> frozenset[int]:
        """Return all ranks that are late by any finding."""
        return frozenset(rank for each in self.late for rank in each.ranks)


def read_run(name: str, path: Path) -> FleetRun:
    """Read and analyze one run, of a restarted job one attempt; one that can't be read says why."""
    try:
        if is_remote(path):
            return _describe_run(name, _analyze(path), None)
        with remember_small_files():
            if is_running(path):
                return FleetRun(name=name, path=str(path), state="running", reason="it is being recorded")
            if holds_dumps(path):
                diagnosis = Diagnosis.of_dumps(path)
                return _describe_run(name, Analysis(empty_trace(path, diagnosis.evidence.ranks)), diagnosis)
            analysis = _analyze(path)
            return _describe_run(name, analysis, diagnose_trace(analysis.trace))
    except OverlapScopeError as error:
        return FleetRun(name=name, path=str(path), state="unreadable", reason=str(error))
    except Exception as error:  # an unforeseen recording must not stop the analysis of others
        return FleetRun(name=name, path=str(path), state="unreadable", reason=f"{path}: can't be judged ({error!r})")


def _analyze(path: Path) -> Analysis:
    """Analyze a recording, and leave no tables beside one that fits into memory."""
    is_large = not is_remote(path) and len(partition_recording(find_rank_folders(path)).shards) > 1
    return analyze_recording(path, SerialWorkers(), None, lambda _: None, write_tables=is_large)


def _describe_run(name: str, analysis: Analysis, diagnosis: Diagnosis | None) -> FleetRun:
    trace = analysis.trace
    run, ranks = trace.run, trace.ranks
    found = analysis.stragglers
    findings = () if found is None else found.findings
    started_ns, world_size = run.get("started_unix_ns"), run.get("world_size")
    verdict = None if diagnosis is None else diagnosis.verdict
    return FleetRun(
        name=name,
        path=str(trace.path),
        state="read",
        figures=compute_run_figures(analysis, diagnosis),
        code="" if verdict is None else KINDS[verdict.kind].code,
        errors=len(_collect_errors(trace, diagnosis)),
        started_unix_ns=started_ns if isinstance(started_ns, int) else None,
        world_size=world_size if isinstance(world_size, int) else len(ranks),
        model=_describe_model(trace),
        model_digest=_digest(sorted(map(str, collect_parameters(trace)))),
        script=_get_script(run),
        ranks=tuple(ranks["rank"].tolist()),
        hosts=tuple(map(_get_host, ranks["host"])),
        devices=tuple(map(_get_device, ranks["device"])),
        compared=() if found is None else tuple(found.cycles.ranks.tolist()),
        late=tuple(_list_late(findings)),
        host_links=_count_links(trace, findings),
        at_fault=_find_ranks_at_fault(verdict),
        identity=_digest([started_ns, ranks["host"].tolist(), ranks["pid"].tolist()]) if started_ns else "",
    )


def _get_script(run: Mapping[str, Any]) -> str:
    argv = run.get("argv")
    return Path(str(argv[0])).name if isinstance(argv, list) and argv else ""


def _get_host(recorded: object) -> str:
    return "" if recorded in _UNKNOWN_HOSTS else str(recorded)


def _get_device(recorded: object) -> str:
    return str(recorded) if _NUMBERED_DEVICE.match(str(recorded)) else ""


def _list_late(findings: Iterable[Finding]) -> Iterator[LateRanks]:
    for each in findings:
        if each.ranks and each.link is None:
            yield LateRanks(ranks=each.ranks, cause=each.cause, saving_ns=each.saving.step.value)


def _collect_errors(trace: Trace, diagnosis: Diagnosis | None) -> set[Problem]:
    of_diagnosis = () if diagnosis is None else diagnosis.problems
    return {problem for problem in (*trace.problems, *of_diagnosis) if problem.severity == "error"}


def _describe_model(trace: Trace) -> str:
    names = describe_models(trace.run)
    parameters = trace.plans.drop_duplicates(["model", "parameter"])
    count = f"{format_count(int(parameters['elements'].sum()))} parameters" if len(parameters) else ""
    return ", ".join(filter(None, (names, count)))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:_DIGEST_LENGTH] if content else ""


def _find_ranks_at_fault(verdict: Verdict | None) -> tuple[int, ...]:
    is_of_host = verdict is not None and KINDS[verdict.kind].may_be_host
    return verdict.named if verdict is not None and is_of_host else ()


def _count_links(trace: Trace, findings: Iterable[Finding]) -> tuple[HostLink, ...]:
    """Count the links of a run by hosts; none without a slow one, as then nothing is compared."""
    slow = [(each.link.rank, each.link.peer_rank) for each in findings if each.link is not None]
    hosts = get_hosts(trace)
    if not slow or any(host in _UNKNOWN_HOSTS for host in hosts.values()):
        return ()
    rates = measure_link_rates(trace)
    pairs = zip(rates["rank"].tolist(), rates["peer_rank"].tolist(), strict=True)
    all_links, slow_links = (Counter((hosts[rank], hosts[peer]) for rank, peer in each) for each in (pairs, slow))
    return tuple(
        HostLink(sender=sender, receiver=receiver, links=number, slow=slow_links[sender, receiver])
        for (sender, receiver), number in sorted(all_links.items())
    )
