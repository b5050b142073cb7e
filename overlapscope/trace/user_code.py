"""Which source lines are the user's, in stack frames, faulthandler stacks, and dumps of other tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

SKIPPED_PACKAGES: Final = frozenset(
    {
        "torch",
        "functorch",
        "instrumented_ddp",
        "accelerate",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "transformers",
        "numpy",
        "scipy",
        "pandas",
        "PIL",
        "tqdm",
    }
)
"""Top-level packages whose frames are never the user's, wherever they are installed: torch, training frameworks,
libraries that are called by user code, and ours."""

RAISES: Final = re.compile(r"(?:^|[:;]) *raise\b")
"""A source line that raises an exception, also behind a condition."""
_LIBRARIES: Final = re.compile(
    rf"/(site|dist)-packages/(?!instrumented_ddp/examples/)({'|'.join(sorted(SKIPPED_PACKAGES))})/"
    r"|(?<!/tests)/instrumented_ddp/(?!examples/)"
    r"|/torch/(_\w+(/|\.py)|(autograd|cuda|distributed|fx|multiprocessing|nn|optim|utils)/)"
    r"|/site-packages/typing_extensions\.py$"
    r"|/lib/python3\.\d+/(?!(site|dist)-packages/)"
    r"|\.(c|cc|cpp|cu|h|hpp|so|\d+)$"
    r"|^(<(?!ipython)|\?\?|$)"
)
_INSTALLED: Final = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py$|/|$)")
_CONSOLE_SCRIPT: Final = re.compile(r"/bin/[^/.]+$")
"""A script that an installed package has put there, to call a function of its own."""
_TYPED_IN: Final = ("<string>", "<stdin>")
"""Files of ``python -c`` and of the interactive interpreter, but also of generated code."""

_SPAWN: Final = re.compile(r"/multiprocessing/(spawn|forkserver)\.py$")
"""What ``python -c`` runs to start a process of multiprocessing."""


@lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Return whether a file is of ``SKIPPED_PACKAGES``, Python's standard library, C++, or generated code."""
    return _LIBRARIES.search(file) is not None


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Return whether a file is the user's in any stack: of no library, and not installed by a package manager."""
    return not (is_library_file(file) or _INSTALLED.search(file) or _CONSOLE_SCRIPT.search(file))


def find_user_file(files: Sequence[str]) -> int | None:
    """Return which file of a stack is the user's innermost one.

    A program may be installed like a library, as one that is run by ``python -m package.train``: without any file of
    the user's, it is the package of the outermost frame that is of no known library.

    Args:
        files: files of the frames, innermost first; an empty text is nobody's.

    Returns:
        An index; None if no file can be the user's.
    """
    if (found := _find_first(files, is_user_file)) is not None:
        return found
    for index, (file, called) in enumerate(zip(files, ["", *files], strict=False)):
        if file in _TYPED_IN and not _SPAWN.search(called):
            return index
    program = next((name for file in reversed(files) if (name := _find_package(file))), None)
    if program is not None:
        return _find_first(files, lambda file: _find_package(file) == program)
    return _find_first(files, lambda file: _CONSOLE_SCRIPT.search(file) is not None)


def _find_first(files: Sequence[str], is_wanted: Callable[[str], bool]) -> int | None:
    return next((index for index, file in enumerate(files) if is_wanted(file)), None)


@lru_cache(maxsize=4096)
def _find_package(file: str) -> str | None:
    """Return the top-level package of an installed file that is of no known library."""
    installed = None if is_library_file(file) else _INSTALLED.search(file)
    return installed[1] if installed else None
