"""Write a recording for other tools: Perfetto, chrome://tracing, Prometheus, torch.compile, or as tables.

    overlapscope export traces/ -o run.pftrace                          # open it at ui.perfetto.dev
    overlapscope export traces/ -o run.json.gz --format chrome --steps 100:110 --ranks 0-7
    overlapscope export traces/ -o metrics.prom --format openmetrics    # for the textfile collector of node_exporter
    overlapscope export traces/ -o tables/ --format parquet             # or csv: a folder with a file for each table
    overlapscope export traces/ -o collectives.json --format inductor-pge

perfetto, chrome: hosts, their ranks, and for each rank steps, phases, gradients, buckets, communication, rounds and
garbage collection, with all that is known of each, arrows along the path of a bucket and between the ranks of a
collective, and exposed and hidden communication as counters. Times are those of the common clock. Nothing overlaps
within a track, so viewers draw it as it was. perfetto needs one more package: pip install 'overlapscope[perfetto]'.

openmetrics: the breakdown of a step, stragglers and the verdict, as they are now; 'overlapscope serve --metrics'
answers scrapes with the same.

inductor-pge: how long collectives of DDP and FSDP2 take once their last rank has arrived, by size, for torch.compile:
torch._inductor.config.aten_distributed_optimizations.profile_guided_estimations_profile_path = "collectives.json".

An existing file is not overwritten, and a file that could not be finished is removed. A name that ends in .gz is
compressed. Problems with the recording go to stderr, one per line; the exit code is 1 if any part of it is missing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from overlapscope.cli.arguments import RECORDING, parse_folder_or_url, steps
from overlapscope.cli.output_file import create_file, refuse_existing
from overlapscope.cli.reading import report_problems
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of, format_ranks, parse_ranks
from overlapscope.trace.folders import is_remote

if TYPE_CHECKING:
    from overlapscope.analysis import Analysis

_TRACES: Final = ("perfetto", "chrome")
_TABLES: Final = ("csv", "parquet")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("traces", type=parse_folder_or_url, help=RECORDING)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PATH", help="new file, or folder for tables"
    )
    parser.add_argument(
        "--format",
        choices=(*_TRACES, "openmetrics", "inductor-pge", *_TABLES),
        default="perfetto",
        help="output format (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=steps,
        metavar="START:STOP",
        help="limit a trace to these steps, STOP exclusive (default: all steps)",
    )
    parser.add_argument(
        "--ranks", metavar="RANKS", help="limit a trace to these ranks, such as 0-7,12 (default: all ranks)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the export; return 1 if a part of the recording could not be read."""
    from overlapscope.analysis import Analysis
    from overlapscope.interop.trace_viewers import require_perfetto
    from overlapscope.trace.recording import NEIGHBOR_STEPS, read_trace
    from overlapscope.trace.table_file import ALL_STEPS, step_range_of_slice

    if args.format not in _TRACES and (args.steps or args.ranks):
        raise OverlapScopeError(f"--steps and --ranks choose from a trace: {args.format} has the whole recording")
    if args.format == "openmetrics" and is_remote(args.traces):
        raise OverlapScopeError(f"{args.traces}: openmetrics tells faults, which needs logs: copy the recording here")
    if not (args.format in _TABLES and args.output.is_dir()):
        refuse_existing(args.output)
    if args.format == "perfetto":
        require_perfetto()
    with Progress() as progress:
        step_range = step_range_of_slice(*args.steps) if args.steps else ALL_STEPS
        analysis = Analysis(read_trace(args.traces, progress.count, steps=step_range, neighbors=NEIGHBOR_STEPS))
        if args.format in _TABLES:
            message = _write_tables(analysis, args, progress)
        elif args.format == "openmetrics":
            message = _write_metrics(analysis, args, progress)
        elif args.format == "inductor-pge":
            message = _write_inductor_profile(analysis, args)
        else:
            message = _write_trace(analysis, args, progress)
    print(f"overlapscope export: {message}", file=sys.stderr)
    return report_problems(analysis.trace)


def _write_trace(analysis: Analysis, args: argparse.Namespace, progress: Progress) -> str:
    from overlapscope.interop.trace_viewers import ChromeFile, PerfettoFile
    from overlapscope.interop.tracks import Tracks

    about = analysis.trace.ranks.set_index("rank").sort_index()
    known: list[int] = about.index.tolist()
    ranks, unknown = (known, []) if args.ranks is None else parse_ranks(args.ranks, known)
    if unknown or not ranks:
        has = format_ranks(known)
        raise OverlapScopeError(f"--ranks {args.ranks}: {args.traces} has no such rank; it has {has}")
    progress.begin("dividing steps")
    tracks = Tracks(analysis, slice(*args.steps) if args.steps else slice(None))
    progress.begin("writing")
    slices = 0
    with create_file(args.output) as file:
        kind = PerfettoFile if args.format == "perfetto" else ChromeFile
        written = kind(file, args.traces.resolve().name)
        for done, rank in enumerate(ranks):
            progress.count(done, len(ranks))
            host, device, clock = about.loc[rank, ["host", "device", "clock"]]
            # In the file itself, as whoever receives the file does not see our messages.
            what = f"{device}, clock not aligned" if clock == "none" else str(device)
            slices += written.add_rank(rank, str(host), what, tracks.tracks_of_rank(rank))
        if not slices:
            raise OverlapScopeError(f"{args.traces}: nothing was recorded in these steps")
        written.close()
    return f"{args.output}: {count_of(slices, 'slice')} of {count_of(len(ranks), 'rank')}"


def _write_metrics(analysis: Analysis, args: argparse.Namespace, progress: Progress) -> str:
    from overlapscope.diagnosis.diagnosis import Diagnosis
    from overlapscope.interop.open_metrics import format_open_metrics, generate_samples

    progress.begin("looking for faults")
    samples = list(generate_samples(analysis, Diagnosis.of(args.traces)))
    with create_file(args.output) as file:
        file.write(format_open_metrics({args.traces.resolve().name: samples}).encode())
    return f"{args.output}: {count_of(len(samples), 'sample')}"


def _write_inductor_profile(analysis: Analysis, args: argparse.Namespace) -> str:
    import json

    from overlapscope.interop.inductor_profile import build_inductor_profile

    profile = build_inductor_profile(analysis)
    with create_file(args.output) as file:
        file.write(json.dumps(profile, indent=1).encode())
    return f"{args.output}: {count_of(len(profile['traceEvents']), 'kind')} of collectives"


def _write_tables(analysis: Analysis, args: argparse.Namespace, progress: Progress) -> str:
    from overlapscope.interop.table_files import collect_tables, encode_table

    progress.begin("dividing steps")
    tables = collect_tables(analysis)
    for path in (args.output / f"{name}.{args.format}" for name in tables):
        refuse_existing(path)
    progress.begin("writing")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        for done, (name, table) in enumerate(tables.items()):
            progress.count(done, len(tables))
            path = args.output / f"{name}.{args.format}"
            with create_file(path) as file:
                file.writelines(encode_table(table, args.format))
    except OSError as error:
        raise OverlapScopeError(f"{args.output}: can't be made ({error.strerror})") from None
    return f"{args.output}: {', '.join(tables)}"
