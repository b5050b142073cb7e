"""Files that commands write: none replaces an existing one, and one that could not be finished is removed."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, cast

from overlapscope.errors import OverlapScopeError


def refuse_existing(path: Path, option: str = "with -o") -> None:
    """Refuse to write to a path where there is something.

    Args:
        option: How the user gives another name.

    Raises:
        OverlapScopeError: The path exists.
    """
    if path.exists():
        raise OverlapScopeError(f"{path}: already exists: remove it, or give another name {option}")


@contextmanager
def create_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a new file, which is removed if writing fails; gzip-compressed if its name ends in ``.gz``.

    Raises:
        OverlapScopeError: It exists, or can't be written.
    """
    try:
        with path.open("xb") as file, ExitStack() as until_written:
            try:
                yield until_written.enter_context(_open_gzip(file)) if path.suffix == ".gz" else file
            except BaseException:
                path.unlink()
                raise
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be written ({error.strerror})") from None


def _open_gzip(file: IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    return cast("AbstractContextManager[IO[bytes]]", gzip.open(file, "wb"))
