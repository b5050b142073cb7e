"""Find what many runs have in common: hosts that are late again and again, step time by model, verdicts by week.

    overlapscope fleet /shared/traces
    overlapscope fleet /shared/traces s3://bucket/runs --since 2026-11-01 --html fleet.html
    overlapscope fleet /shared/traces --metrics /var/lib/node_exporter/fleet.prom

Finds all recordings in folders, at any depth, and below URLs; of a restarted job the latest attempt counts. A host,
device, rank or link is named if it is late, slow or at fault in more runs than chance explains, whoever else took part
in them: in less than 1 % of fleets where only chance decides, anything is named. The tables show the others, too. Of
what is missing, such as hosts or verdicts, the number of runs is said. docs/fleet.md has the details.

What was read of a run is kept in ~/.cache/overlapscope (or $XDG_CACHE_HOME), so that the next time only new runs are
read; nothing is written beside recordings, but the tables of those that don't fit into memory. With --dask nothing is
kept.

The exit code is 1 if no run could be read. With --json the output is one JSON object, which docs/json.md describes.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

from overlapscope import pages
from overlapscope.cli.arguments import parse_folder_or_url
from overlapscope.cli.metrics_process import refuse_foreign
from overlapscope.cli.output_file import create_file, refuse_existing
from overlapscope.cli.reading import add_workers_argument, print_report
from overlapscope.console import Progress
from overlapscope.errors import OverlapScopeError, make_printable

if TYPE_CHECKING:
    from overlapscope.fleet.fleet import Fleet
    from overlapscope.workers import Workers

_FEW_RUNS: Final = 8
_MAX_LISTED: Final = 10


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "places",
        nargs="+",
        type=parse_folder_or_url,
        metavar="FOLDER",
        help="folder of recordings, at any depth, or a URL such as s3://bucket/runs",
    )
    parser.add_argument(
        "--since",
        type=_parse_day,
        metavar="DATE",
        help="only runs that started on this day, in UTC, or later, and those without a date",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, with every run")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page, as a new file")
    parser.add_argument(
        "--metrics", type=Path, metavar="FILE", help="also write OpenMetrics text, such as DIR/fleet.prom; replaces it"
    )
    add_workers_argument(parser)
    parser.add_argument("--no-cache", action="store_true", help="read all runs again, and keep nothing")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if no run could be read."""
    from overlapscope.fleet.collect import drop_copies, find_locations, read_runs
    from overlapscope.fleet.fleet import Fleet, select_since
    from overlapscope.fleet.result_cache import find_cache_folder
    from overlapscope.report.fleet import build_fleet_report

    if args.html is not None:
        refuse_existing(args.html, "with --html")
    if args.metrics is not None:
        refuse_foreign(args.metrics)
    with Progress() as progress:
        progress.begin("looking for runs")
        found = find_locations(args.places)
        cache = None if args.no_cache or args.dask else find_cache_folder()
        progress.begin("reading runs")
        with _choose_workers(args.dask, len(found.runs)) as workers:
            runs = read_runs(found.runs, workers, cache, progress.count)
        progress.begin("comparing runs")
        fleet = Fleet(*drop_copies(select_since(runs, args.since)))
        if not fleet.runs:
            latest = max(day for run in runs if (day := run.day) is not None)
            raise OverlapScopeError(f"no run started on {args.since} or later; the latest started on {latest}")
        report = build_fleet_report(fleet, [str(place) for place in args.places])
        progress.begin("writing")
        if args.html is not None:
            with create_file(args.html) as file:
                file.write(pages.render_fleet(fleet, report).encode())
        if args.metrics is not None:
            _write_metrics(args.metrics, fleet)
    print_report(report, as_json=args.json)
    unreadable = [each.reason for each in fleet.runs if each.state == "unreadable"]
    more = [f"{len(unreadable) - _MAX_LISTED:,} more runs can't be read"] * (len(unreadable) > _MAX_LISTED)
    for line in (*found.left_out, *unreadable[:_MAX_LISTED], *more):
        print(f"note: {make_printable(line)}", file=sys.stderr)
    return 0 if fleet.read else 1


def _choose_workers(address: str | None, runs: int) -> AbstractContextManager[Workers]:
    """Return the workers: a cluster, processes, or for a few runs this process, as others take a second to start."""
    from overlapscope.workers import SerialWorkers, dask, processes

    if address:
        return dask(address)
    return processes() if runs > _FEW_RUNS else nullcontext(SerialWorkers())


def _write_metrics(path: Path, fleet: Fleet) -> None:
    from overlapscope.interop.fleet_metrics import format_fleet_metrics
    from overlapscope.interop.open_metrics import replace_file

    replace_file(path, format_fleet_metrics(fleet))


def _parse_day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no day: give one like 2026-11-23") from None
