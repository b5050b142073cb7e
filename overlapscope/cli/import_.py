"""Convert torch.profiler or Nsight Systems traces to a recording.

    overlapscope import rank0.json.gz rank1.json.gz -o traces/imported
    overlapscope import rank0.sqlite rank1.sqlite -o traces/imported

The traces are those of one training, a file for each rank, as prof.export_chrome_trace() and
tensorboard_trace_handler() write them (.json or .json.gz, of any size), or as 'nsys export --type sqlite' does of a
training under torch.autograd.profiler.emit_nvtx(); one that is cut short is left out. What comes of them is a recording
like any other, for 'overlapscope serve', 'summary', 'stragglers', 'compare' and 'report'. The rank is what a trace
says, else what its file's name does.

Phases are those of stock DDP: its forward, what autograd does after it, the wait for buckets, the optimizer's step.
Buckets are its all-reduces during the backward. Parameters are not in such a trace, so neither are they here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from overlapscope.cli import recording_folder
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError
from overlapscope.text import format_ns

if TYPE_CHECKING:
    from overlapscope.interop.kineto import KernelOverlap, TraceMetadata
    from overlapscope.interop.training import ImportedTraining


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="trace of one rank")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the recording")
    parser.add_argument("--force", action="store_true", help="replace an existing recording in that folder")


def run(args: argparse.Namespace) -> int:
    """Read the traces and write the recording; return 1 if a damaged trace was left out."""
    from overlapscope.interop.into_recording import ImportedRank, assign_ranks, write_recording
    from overlapscope.interop.kineto import compute_kernel_overlap, read_profile
    from overlapscope.interop.nccl_inspector import is_inspector_dump
    from overlapscope.interop.nsight import is_sqlite_report, read_report
    from overlapscope.interop.training import convert_profile

    if not args.force and recording_folder.has_recording(args.output):
        raise OverlapScopeError(f"{args.output}: already holds a recording; give another folder with -o, or --force")
    with Progress() as progress:
        found: list[tuple[TraceMetadata, ImportedTraining]] = []
        damaged, kernels = [], []
        for path in args.files:
            if is_inspector_dump(path):
                raise OverlapScopeError(
                    f"{path}: a dump of NCCL's Inspector, in which there are no steps; 'overlapscope calibrate "
                    "--inspector FILE ...' takes from such dumps how long all-reduces take"
                )
            progress.begin(f"reading {path.name}")
            for profile in read_report(path) if is_sqlite_report(path) else [read_profile(path, progress.count)]:
                if profile.source.problem is not None:
                    damaged.append(f"{path}: left out: {profile.source.problem}; export it again")
                    continue
                found.append((profile.source, convert_profile(profile)))
                if len(profile.kernels):
                    kernels.append(f"{path}: {_kernels_text(compute_kernel_overlap(profile))}")
    if not found:
        raise OverlapScopeError("; ".join(damaged))
    ranks = assign_ranks([source for source, _ in found])
    imported = [
        ImportedRank(rank=rank, source=source, training=training)
        for rank, (source, training) in sorted(zip(ranks, found, strict=True), key=lambda pair: pair[0])
    ]
    if args.force:
        recording_folder.clear(args.output)
    recording_folder.create_empty_folder(args.output)
    write_recording(args.output, imported)
    for line in kernels:
        _print_status(line)
    for one in imported:
        for note in (*one.source.notes, *one.training.notes):
            _print_status(f"rank {one.rank}: {note}")
    for line in damaged:
        _print_status(line)
    recorded = recording_folder.describe(args.output)
    steps = 0 if recorded is None else recorded.steps
    _print_status(
        f"imported {len(imported)} rank{'s' * (len(imported) != 1)}, steps up to {steps - 1}, into {args.output}"
    )
    _print_status(f"view it: overlapscope serve {args.output}")
    return 1 if damaged else 0


def _kernels_text(found: KernelOverlap) -> str:
    if not found.communication_ns:
        return "no communication on the device"
    share = found.hidden_ns / found.communication_ns
    return (
        f"{format_ns(found.communication_ns)} of communication on the device, {format_ns(found.hidden_ns)} "
        f"({share:.1%}) of it while other kernels ran"
    )


def _print_status(text: str) -> None:
    print(f"overlapscope import: {text}", file=sys.stderr)
