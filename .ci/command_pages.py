"""A hook of mkdocs: the page commands.md, made of what each command says with --help."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from overlapscope.cli.main import build_parser


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, "commands.md", content=_page()))
    return files


def _page() -> str:
    os.environ["COLUMNS"] = "100"  # argparse asks for it
    sections = [f"## {name}\n\n```\n{verb.format_help().rstrip()}\n```\n" for name, verb in _verbs(build_parser())]
    return "\n".join(["# Commands\n", *sections])


def _verbs(of: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands, and commands of commands, by their whole name."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield verb.prog, verb
                yield from _verbs(verb)
