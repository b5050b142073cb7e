"""The command line: one module per subcommand, in ``overlapscope.cli``.

A module's docstring is the help text of its subcommand; it defines ``prepare_parser(build_parser)`` and ``run(args) ->
int``. Modules import heavy packages (pandas, torch, panel) inside ``run``, so that ``overlapscope --help`` is fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlapscope import __version__
from overlapscope.cli import (
    calibrate,
    compare,
    control,
    demo,
    diagnose,
    export,
    fleet,
    import_,
    lab,
    mcp,
    recommend,
    record,
    redact,
    report,
    serve,
    stragglers,
    summary,
    tune,
)
from overlapscope.cli.arguments import parse_folder, parse_folder_or_url
from overlapscope.errors import OverlapScopeError
from overlapscope.pipe import ignore_broken_pipe

_DESCRIPTION = "See how much gradient communication hides under backward, and why the rest does not."
_EPILOG = "Start with 'overlapscope demo': it records a short training run on this machine and opens it in the browser."
COMMANDS = {
    "calibrate": calibrate,
    "compare": compare,
    "control": control,
    "demo": demo,
    "diagnose": diagnose,
    "export": export,
    "fleet": fleet,
    "import": import_,
    "lab": lab,
    "mcp": mcp,
    "record": record,
    "recommend": recommend,
    "redact": redact,
    "report": report,
    "serve": serve,
    "stragglers": stragglers,
    "summary": summary,
    "tune": tune,
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all subcommands; in its result, ``run`` is the function to call, ``verb`` the subparser."""
    root_parser = argparse.ArgumentParser(prog="overlapscope", description=_DESCRIPTION, epilog=_EPILOG)
    root_parser.add_argument("--version", action="version", version=f"overlapscope {__version__}")
    root_parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "fish", "tcsh"),
        help="print what this shell completes commands and options by, and exit; see the README",
    )
    subparsers = root_parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        text = (module.__doc__ or "").strip()
        verb = subparsers.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.prepare_parser(verb)
        verb.set_defaults(run=module.run, verb=verb)
    return root_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; an ``OverlapScopeError`` is one line on stderr and code 1."""
    args, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        # argparse itself would print the usage of the top-level parser instead of this subcommand's.
        args.verb.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(args.run(args))
    except OverlapScopeError as error:
        print(f"overlapscope {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _PrintCompletion(argparse.Action):
    """Action that prints a completion script for a shell and exits."""

    def __call__(self, target_parser: argparse.ArgumentParser, _: object, shell: Any, *option: Any) -> None:  # noqa: ARG002
        import shtab

        _complete_paths(target_parser)
        print(shtab.complete(target_parser, shell))
        target_parser.exit()


def _complete_paths(target_parser: argparse.ArgumentParser) -> None:
    """Enable file-name completion for the arguments that are paths."""
    import shtab

    for action in target_parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _complete_paths(verb)
        elif action.type in (Path, parse_folder, parse_folder_or_url):
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def entry_point() -> None:
    """Run the console script."""
    ignore_broken_pipe()
    sys.exit(main())
