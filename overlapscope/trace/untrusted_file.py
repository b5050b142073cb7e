"""Limits on untrusted files, so that a malicious one costs neither much memory nor much time.

The limits are far above what a Flight Recorder writes: 2,000 entries by default, at most a few megabytes per rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from overlapscope.errors import OverlapScopeError

MAX_BYTES: Final = 64 * 1024**2
"""Size above which a file is rejected: it could hold 60 times the entries that a Flight Recorder keeps by default."""
MAX_VALUES: Final = 10_000_000
"""Number of values, stored in a file or expanded from it, above which the file is rejected."""
MAX_NESTING: Final = 32
"""Maximum depth of nested containers; a dump has five levels."""
_CONTAINERS: Final = (dict, list, tuple)


def read_bytes(path: Path) -> bytes:
    """Read the content of a file.

    Raises:
        OverlapScopeError: the file is not a regular file, empty, too large, or can't be read.
    """
    try:
        if not path.is_file():  # reading a pipe would block
            raise OverlapScopeError(f"{path}: not a file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise OverlapScopeError(
            f"{path}: larger than {MAX_BYTES // 1024**2} MB, unlike any Flight Recorder dump; dump "
            f"again with a smaller TORCH_FR_BUFFER_SIZE"
        )
    if not content:
        raise OverlapScopeError(f"{path}: empty; its process was probably killed before it could write the dump")
    return content


def check_size_and_depth(value: Any, path: Path) -> None:
    """Reject a value that is nested too deeply, contains itself, or is small only because its parts are shared.

    Twenty nested lists of ten references each take little memory, but 10^20 steps to traverse.

    Raises:
        OverlapScopeError: the value is one of these.
    """
    extents: dict[int, tuple[int, int]] = {}  # by id: number of values inside, and depth

    def extent(container: Any, depth: int) -> tuple[int, int]:
        if depth > MAX_NESTING:
            raise OverlapScopeError(f"{path}: refused; nested more than {MAX_NESTING} deep, unlike any real dump")
        known = extents.get(id(container))
        if known is None:
            values, height = len(container), 1
            for part in container.values() if isinstance(container, dict) else container:
                if isinstance(part, _CONTAINERS):
                    inner_values, inner_height = extent(part, depth + 1)
                    values += inner_values
                    height = max(height, inner_height + 1)
            known = extents[id(container)] = values, height
        elif depth + known[1] - 1 > MAX_NESTING:
            raise OverlapScopeError(f"{path}: refused; nested more than {MAX_NESTING} deep, unlike any real dump")
        return known

    if isinstance(value, _CONTAINERS) and extent(value, 1)[0] > MAX_VALUES:
        raise OverlapScopeError(f"{path}: refused; it expands to more than {MAX_VALUES:,} values")
