"""Let an AI agent ask about recordings: a server of the Model Context Protocol (MCP).

The agent's client starts it and speaks to it through stdin and stdout; docs/agents.md says how to add it to one. Its
tools are list_recordings and the four questions about a recording: summary, stragglers, recommend and diagnose. They
answer with what these commands print with --json, shortened for large jobs.

Only recordings in the given folders are read, nothing is written, and no port is opened.
"""

from __future__ import annotations

import argparse
import signal
import sys

from overlapscope.cli.arguments import parse_folder
from overlapscope.errors import OverlapScopeError


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        type=parse_folder,
        nargs="+",
        help="folder that 'overlapscope record -o' wrote or will write, or a folder of such folders",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until the client hangs up."""
    from overlapscope.trace.folders import find_rank_folders

    for path in args.folders:
        if path.exists() and not path.is_dir():
            find_rank_folders(path)  # raises the reason
    try:
        from overlapscope.cli.mcp_server import serve
    except ImportError:
        raise OverlapScopeError("needs the MCP SDK: pip install 'overlapscope[mcp]'") from None
    if sys.stdin.isatty():
        print("Waiting for an MCP client on stdin: see docs/agents.md. Ctrl-C ends it.", file=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C waits for the thread that reads stdin
    serve(args.folders)
    return 0
