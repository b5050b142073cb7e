"""Convert torch.profiler or Nsight Systems traces to a recording.

    overlapscope import rank0.json.gz rank1.json.gz -o traces/imported
    overlapscope import rank0.sqlite rank1.sqlite -o traces/imported
    overlapscope import tensorboard_logs -o traces/imported

The traces are those of one job, a file for each rank, as prof.export_chrome_trace() and
tensorboard_trace_handler() write them (.json or .json.gz, of any size), or as 'nsys export --type sqlite' does of a
training under torch.autograd.profiler.emit_nvtx(); also a folder, .tar.gz or .zip of them. A truncated trace is left
out. The result is a recording like any other, for 'overlapscope serve', 'summary', 'stragglers', 'compare' and
'report'. The rank is read from the trace, or else from the name of its file.

Phases are those of stock DDP: its forward, the backward that follows, the wait for buckets, the optimizer's step.
Buckets are its all-reduces during the backward. Such traces hold no parameters, so the recording has none. Of a job
without stock DDP there are no steps; then 'summary' shows its communication by process group and operation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from overlapscope.cli import recording_folder
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of, format_ns, format_share, rank_list

if TYPE_CHECKING:
    from overlapscope.interop.into_recording import ImportedRank
    from overlapscope.interop.kineto import Profile, TraceMetadata
    from overlapscope.interop.trace_files import TraceFile
    from overlapscope.interop.training import ImportedTraining


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="trace of one rank, or a folder or archive of traces"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the recording")
    parser.add_argument("--force", action="store_true", help="replace an existing recording in that folder")


def run(args: argparse.Namespace) -> int:
    """Read the traces and write the recording; return 1 if a damaged trace was left out."""
    from overlapscope.interop import into_recording
    from overlapscope.interop.trace_files import find_trace_files

    if not args.force and recording_folder.has_recording(args.output):
        raise OverlapScopeError(f"{args.output}: already holds a recording; give another folder with -o, or --force")
    with find_trace_files(args.files) as (files, left_out), Progress() as progress:
        traces = _read_traces(files, progress)
    if not traces.trainings:
        raise OverlapScopeError("; ".join(traces.damaged))
    sources = [source for source, _ in traces.trainings]
    into_recording.refuse_different_jobs(sources)
    ranks = into_recording.assign_ranks(sources)
    imported = [
        into_recording.ImportedRank(rank=rank, source=source, training=training)
        for rank, (source, training) in sorted(zip(ranks, traces.trainings, strict=True), key=lambda pair: pair[0])
    ]
    if args.force:
        recording_folder.clear(args.output)
    recording_folder.create_empty_folder(args.output)
    into_recording.write_recording(args.output, imported)
    notes = _merge_notes(imported)
    if distance := into_recording.describe_distance(imported):
        notes.append(distance)
    for line in (*left_out, *traces.overlaps, *notes, *traces.damaged):
        _print_status(line)
    recorded = recording_folder.describe(args.output)
    assert recorded is not None
    what = count_of(recorded.steps, "step") if recorded.steps else "no steps"
    _print_status(f"imported {count_of(len(imported), 'rank')}, {what}, into {args.output}")
    _print_status(f"view it: overlapscope {'serve' if recorded.steps else 'summary'} {args.output}")
    return 1 if traces.damaged else 0


def _merge_notes(imported: Sequence[ImportedRank]) -> list[str]:
    """Return the notes on all ranks, each with the ranks that it is true of."""
    ranks: dict[str, list[int]] = {}
    for one in imported:
        for note in (*one.source.notes, *one.training.notes):
            ranks.setdefault(note, []).append(one.rank)
    return [f"{rank_list(of)}: {note}" for note, of in ranks.items()]


@dataclass(frozen=True)
class _Traces:
    """What was read from the files."""

    trainings: list[tuple[TraceMetadata, ImportedTraining]] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    """A line per trace: how much communication was hidden."""
    damaged: list[str] = field(default_factory=list)
    """A line per trace that was left out."""


def _read_traces(files: Sequence[TraceFile], progress: Progress) -> _Traces:
    from overlapscope.interop.training import convert_profile

    traces = _Traces()
    for file in files:
        progress.begin(f"reading {file.path.name}")
        for profile in _read_profiles(file, progress):
            if profile.source.problem is not None:
                traces.damaged.append(f"{file.label}: left out: {profile.source.problem}; export it again")
                continue
            traces.trainings.append((profile.source, convert_profile(profile)))
            traces.overlaps.append(f"{file.label}: {_describe_overlap(profile)}")
    return traces


def _read_profiles(file: TraceFile, progress: Progress) -> list[Profile]:
    """Read a file, which is then called what the user calls it, also in errors."""
    from overlapscope.interop.kineto import read_profile
    from overlapscope.interop.nccl_inspector import is_inspector_dump
    from overlapscope.interop.nsight import is_sqlite_report, read_report
    from overlapscope.interop.trace_files import describe_other_kind

    path = file.path
    if is_inspector_dump(path):
        raise OverlapScopeError(
            f"{file.label}: a dump of NCCL's Inspector, in which there are no steps; 'overlapscope calibrate "
            "--inspector FILE ...' takes from such dumps how long all-reduces take"
        )
    if kind := describe_other_kind(path):
        raise OverlapScopeError(f"{file.label}: {kind}; give traces of torch.profiler's export_chrome_trace()")
    try:
        profiles = read_report(path) if is_sqlite_report(path) else [read_profile(path, progress.count)]
    except OverlapScopeError as error:
        raise OverlapScopeError(str(error).replace(str(path), file.label)) from None
    return [replace(profile, source=replace(profile.source, path=Path(file.label))) for profile in profiles]


def _describe_overlap(profile: Profile) -> str:
    from overlapscope.interop.communication import compute_overlap, has_device

    found, is_of_device = compute_overlap(profile), has_device(profile)
    where = "on the device" if is_of_device else "on the host"
    if not found.communication_ns:
        return f"no communication {where}"
    others = "other kernels" if is_of_device else "operators"
    return (
        f"{format_ns(found.communication_ns)} of communication {where}, {format_ns(found.hidden_ns)} "
        f"({format_share(found.hidden_ns / found.communication_ns)}) of it while {others} ran"
    )


def _print_status(text: str) -> None:
    print(f"overlapscope import: {text}", file=sys.stderr)
