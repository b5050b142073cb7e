"""The command line: one module per verb, in ``overlapscope.commands``.

A module's docstring is the help of its verb; it has ``prepare_parser(parser)`` and ``run(args) -> int``. Modules
import heavy packages (pandas, torch, panel) inside ``run``, so that ``overlapscope --help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from overlapscope import __version__
from overlapscope.commands import (
    calibrate,
    compare,
    demo,
    diagnose,
    export,
    import_,
    lab,
    recommend,
    record,
    report,
    serve,
    stragglers,
    summary,
)
from overlapscope.errors import OverlapScopeError
from overlapscope.pipe import outlive_the_reader

_DESCRIPTION = "See how much gradient communication hides under backward, and why the rest does not."
_EPILOG = "Start with 'overlapscope demo': it records a short training run on this machine and opens it in the browser."
COMMANDS = {
    "calibrate": calibrate,
    "compare": compare,
    "demo": demo,
    "diagnose": diagnose,
    "export": export,
    "import": import_,
    "lab": lab,
    "record": record,
    "recommend": recommend,
    "report": report,
    "serve": serve,
    "stragglers": stragglers,
    "summary": summary,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 1 with one line on stderr saying what is wrong."""
    parser = argparse.ArgumentParser(prog="overlapscope", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"overlapscope {__version__}")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        verb = verbs.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.prepare_parser(verb)
        verb.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        # argparse itself would show how to use all commands, and not this one.
        verbs.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(args.run(args))
    except OverlapScopeError as error:
        print(f"overlapscope {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def entry_point() -> None:
    """Run the console script."""
    outlive_the_reader()
    sys.exit(main())
