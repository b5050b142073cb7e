"""Show a recording in the browser: overview, timeline, stragglers, and the order of collectives.

Example:
    overlapscope serve traces/

If something is wrong with the job, it opens on the Order page. A folder of PyTorch's Flight Recorder dumps
can be shown too: they hold the order and nothing else.

A run that is still being recorded is read again whenever a page is opened or reloaded. Only this machine can see the
pages, unless --address says otherwise; then everyone who can reach that address can. To view a run on another machine,
forward the port: ssh -L 5006:localhost:5006 HOST overlapscope serve traces/ --no-browser
"""

from __future__ import annotations

import argparse
from pathlib import Path


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("traces", type=Path, help="the folder that 'overlapscope record -o' wrote")
    parser.add_argument("--port", type=_port, help="port to listen on (default: 5006, or the next free one)")
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--no-browser", action="store_true", help="print the address and don't open a browser")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from overlapscope.trace.folders import find_rank_folders

    if not args.traces.is_dir():
        # Nothing can appear in what is not a folder: reading raises what is wrong with it.
        find_rank_folders(args.traces)

    from dashboards.app import serve

    serve(args.traces, address=args.address, port=args.port, show=not args.no_browser)
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not a port: give a number from 0 (any free port) to 65535")
    return port
