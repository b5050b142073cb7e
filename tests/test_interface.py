"""What a version accepts, the two minor versions after it accept, too: commands, options, what docs/python.md shows.

``python -m tests.test_interface`` prints the present interface, a name per line. A release keeps it in ``tests/data``.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlapscope.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PUBLISHED = sorted((ROOT / "tests" / "data" / "interfaces").glob("*.txt"))


def names_of_commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A parser's arguments with their choices, and those of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                yield from names_of_commands(subcommand)
            continue
        for name in action.option_strings or [action.dest.upper()]:
            yield f"{parser.prog} {name}"
            yield from (f"{parser.prog} {name} {choice}" for choice in action.choices or ())


def names_in_python() -> Iterator[str]:
    """Documented functions and classes, with their parameters, methods and fields. Nothing is imported for it."""
    for name in re.findall(r"^::: (.+)$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE):
        module, _, defined = name.rpartition(".")
        path = ROOT / module.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        (node,) = (each for each in ast.parse(source.read_text()).body if getattr(each, "name", None) == defined)
        yield from names_of_definition(node, defined)


def names_of_definition(node: ast.stmt, name: str) -> Iterator[str]:
    """A function and its parameters; a class, its fields and its methods with theirs."""
    yield name
    if isinstance(node, ast.FunctionDef):
        taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        yield from (f"{name} {each.arg}" for each in taken if each.arg != "self")
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            called = ast.unparse(member.target) if isinstance(member, ast.AnnAssign) else getattr(member, "name", "_")
            if not called.startswith("_") or called == "__init__":
                yield from names_of_definition(member, f"{name}.{called}")


def interface() -> list[str]:
    return sorted({*names_of_commands(build_parser()), *names_in_python()})


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_what_was_published_is_still_there(file: Path) -> None:
    published = file.read_text().splitlines()
    assert {"overlapscope record --limit-mb", "open path"} <= {*published}
    assert sorted({*published} - {*interface()}) == []


if __name__ == "__main__":
    print("\n".join(interface()))
