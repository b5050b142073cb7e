"""Show recordings in the browser: a table of runs, and of each its overview, timeline, stragglers and order.

Example:
    overlapscope serve traces/
    overlapscope serve nightly/ /data/runs/

A folder that is one recording is shown by itself, on the Order page if something is wrong with the job. Of a folder of
recordings, nested ones too, and of several folders, there is a table: runs with an incident first, then those that are
being recorded, then the newest. New runs appear while it is open, also in a folder that is not there yet. Tags and
notes are kept in notes.json beside a recording. Two runs that are chosen there are compared, as 'overlapscope compare'
does, and so are two ranges of steps of one. A folder of PyTorch's Flight Recorder dumps can be shown too: they hold the
order and nothing else.

A run that is still being recorded is read again whenever a page is opened or reloaded.

Only this machine can see the pages. To view a run on another machine, forward the port:
ssh -L 5006:localhost:5006 HOST overlapscope serve traces/ --no-browser
With --address others can see them too, if they have the token that is printed, or the one in --token-file, or a name
and password of --basic-auth. docs/serving.md says how to serve many people, behind a proxy that encrypts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from overlapscope import pages
from overlapscope.cli.arguments import parse_folder, port


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "traces",
        type=parse_folder,
        nargs="+",
        help="folder that 'overlapscope record -o' wrote or will write, or a folder of such folders",
    )
    prepare_server(parser)


def prepare_server(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the server, which ``run`` needs beside the folders: address, authentication, metrics."""
    parser.add_argument("--port", type=port, help="port to listen on (default: 5006, or the next free one)")
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--no-browser", action="store_true", help="print the address only, without opening a browser")
    login = parser.add_mutually_exclusive_group()
    login.add_argument("--token-file", type=Path, metavar="FILE", help="require the bearer token stored in FILE")
    login.add_argument(
        "--basic-auth",
        type=Path,
        metavar="FILE",
        help='HTTP basic auth; FILE maps user names to passwords: {"ada": "password"}',
    )
    login.add_argument(
        "--oauth", metavar="PROVIDER", help="OAuth login with PROVIDER, such as okta; see docs/serving.md"
    )
    parser.add_argument("--prefix", default="", help="URL path prefix when behind a reverse proxy")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="extra Host header to accept (repeatable)",
    )
    parser.add_argument(
        "--metrics", action="store_true", help="expose Prometheus metrics at /metrics; see docs/export.md"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from overlapscope.editor_links import read_editor
    from overlapscope.trace.folders import find_rank_folders

    read_editor(in_browser=True)  # a wrong one is reported here, not on a page
    for path in args.traces:
        if path.exists() and not path.is_dir():
            # A folder may still be filled, a file can't: reading it raises the reason.
            find_rank_folders(path)

    pages.serve(
        args.traces,
        address=args.address,
        port=args.port,
        token_file=args.token_file,
        password_file=args.basic_auth,
        oauth=args.oauth,
        hosts=args.allow_host,
        prefix=args.prefix,
        show=not args.no_browser,
        metrics=args.metrics,
    )
    return 0
