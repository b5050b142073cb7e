"""Convert torch.profiler or Nsight Systems traces to a recording.

    overlapscope import rank0.json.gz rank1.json.gz -o traces/imported
    overlapscope import rank0.sqlite rank1.sqlite -o traces/imported

The traces are those of one training, a file for each rank, as prof.export_chrome_trace() and
tensorboard_trace_handler() write them (.json or .json.gz, of any size), or as 'nsys export --type sqlite' does of a
training under torch.autograd.profiler.emit_nvtx(). A truncated trace is left out. The result is a recording like any
other, for 'overlapscope serve', 'summary', 'stragglers', 'compare' and 'report'. The rank is read from the trace, or
else from the name of its file.

Phases are those of stock DDP: its forward, the backward that follows, the wait for buckets, the optimizer's step.
Buckets are its all-reduces during the backward. Such traces hold no parameters, so the recording has none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from overlapscope.cli import recording_folder
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of, format_ns, format_share

if TYPE_CHECKING:
    from overlapscope.interop.kineto import Profile, TraceMetadata
    from overlapscope.interop.training import ImportedTraining


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="trace of one rank")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the recording")
    parser.add_argument("--force", action="store_true", help="replace an existing recording in that folder")


def run(args: argparse.Namespace) -> int:
    """Read the traces and write the recording; return 1 if a damaged trace was left out."""
    from overlapscope.interop.into_recording import ImportedRank, assign_ranks, write_recording

    if not args.force and recording_folder.has_recording(args.output):
        raise OverlapScopeError(f"{args.output}: already holds a recording; give another folder with -o, or --force")
    with Progress() as progress:
        traces = _read_traces(args.files, progress)
    if not traces.trainings:
        raise OverlapScopeError("; ".join(traces.damaged))
    ranks = assign_ranks([source for source, _ in traces.trainings])
    imported = [
        ImportedRank(rank=rank, source=source, training=training)
        for rank, (source, training) in sorted(zip(ranks, traces.trainings, strict=True), key=lambda pair: pair[0])
    ]
    if args.force:
        recording_folder.clear(args.output)
    recording_folder.create_empty_folder(args.output)
    write_recording(args.output, imported)
    notes = (f"rank {one.rank}: {note}" for one in imported for note in (*one.source.notes, *one.training.notes))
    for line in (*traces.overlaps, *notes, *traces.damaged):
        _print_status(line)
    recorded = recording_folder.describe(args.output)
    assert recorded is not None
    _print_status(f"imported {count_of(len(imported), 'rank')}, steps up to {recorded.steps - 1}, into {args.output}")
    _print_status(f"view it: overlapscope serve {args.output}")
    return 1 if traces.damaged else 0


@dataclass(frozen=True)
class _Traces:
    """What was read from the files."""

    trainings: list[tuple[TraceMetadata, ImportedTraining]] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    """A line per trace with kernels: how much communication was hidden on the device."""
    damaged: list[str] = field(default_factory=list)
    """A line per trace that was left out."""


def _read_traces(files: Sequence[Path], progress: Progress) -> _Traces:
    from overlapscope.interop.kineto import read_profile
    from overlapscope.interop.nccl_inspector import is_inspector_dump
    from overlapscope.interop.nsight import is_sqlite_report, read_report
    from overlapscope.interop.training import convert_profile

    traces = _Traces()
    for path in files:
        if is_inspector_dump(path):
            raise OverlapScopeError(
                f"{path}: a dump of NCCL's Inspector, in which there are no steps; 'overlapscope calibrate "
                "--inspector FILE ...' takes from such dumps how long all-reduces take"
            )
        progress.begin(f"reading {path.name}")
        for profile in read_report(path) if is_sqlite_report(path) else [read_profile(path, progress.count)]:
            if profile.source.problem is not None:
                traces.damaged.append(f"{path}: left out: {profile.source.problem}; export it again")
                continue
            traces.trainings.append((profile.source, convert_profile(profile)))
            if len(profile.kernels):
                traces.overlaps.append(f"{path}: {_describe_kernel_overlap(profile)}")
    return traces


def _describe_kernel_overlap(profile: Profile) -> str:
    from overlapscope.interop.kineto import compute_kernel_overlap

    found = compute_kernel_overlap(profile)
    if not found.communication_ns:
        return "no communication on the device"
    return (
        f"{format_ns(found.communication_ns)} of communication on the device, {format_ns(found.hidden_ns)} "
        f"({format_share(found.hidden_ns / found.communication_ns)}) of it while other kernels ran"
    )


def _print_status(text: str) -> None:
    print(f"overlapscope import: {text}", file=sys.stderr)
