"""Files for the owner of pseudonyms alone: their key, and the name behind each of them."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from overlapscope.cli.output_file import refuse_existing
from overlapscope.errors import OverlapScopeError

if TYPE_CHECKING:
    from overlapscope.trace.confidential.pseudonyms import Pseudonyms

_KEY_BYTES: Final = 32


def add_names_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--names``, for the file that ``write_names`` writes."""
    parser.add_argument(
        "--names", type=Path, metavar="FILE", help="new file for the name behind each pseudonym, for you alone"
    )


def refuse_unfit_files(folder: Path, names: Path | None, key: Path | None) -> None:
    """Refuse files that would be lost, or given away with a folder.

    Raises:
        OverlapScopeError: one is in that folder or in none, both are the same, or the file for names exists.
    """
    if names is not None and key is not None and names.resolve() == key.resolve():
        raise OverlapScopeError(f"{names}: given with both --names and --key; give two files")
    for path in filter(None, (names, key)):
        if path.resolve().is_relative_to(folder.resolve()):
            raise OverlapScopeError(f"{path}: would be given away with {folder}; give a file elsewhere")
        if not path.absolute().parent.is_dir():
            raise OverlapScopeError(f"{path}: can't be written (no such folder)")
    if names is not None:
        refuse_existing(names, "with --names")


def make_key(path: Path | None = None) -> bytes:
    """Return a new key, and write it to a new file if there is a path.

    Raises:
        OverlapScopeError: it can't be written.
    """
    key = secrets.token_bytes(_KEY_BYTES)
    if path is not None:
        _write_private(path, key.hex() + "\n")
    return key


def read_key(path: Path) -> bytes:
    """Return the key in a file.

    Raises:
        OverlapScopeError: it can't be read, or holds no key.
    """
    with suppress(ValueError, OSError):
        found = bytes.fromhex(path.read_text(encoding="ascii"))
        if len(found) == _KEY_BYTES:
            return found
    raise OverlapScopeError(f"{path}: holds no key, which would be {2 * _KEY_BYTES} hexadecimal digits")


def write_names(path: Path, pseudonyms: Pseudonyms) -> None:
    """Write what each pseudonym stands for.

    Raises:
        OverlapScopeError: the file exists, or can't be written.
    """
    _write_private(path, json.dumps(dict(sorted(pseudonyms.names.items())), indent=1) + "\n")


def _write_private(path: Path, text: str) -> None:
    """Write a new file that nobody else may read.

    Raises:
        OverlapScopeError: it exists, or can't be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be written ({error.strerror})") from None
