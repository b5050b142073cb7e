"""Detection of the user's source files in stack frames, faulthandler stacks, and dumps of other tools."""

from __future__ import annotations

import re
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
"""Top-level packages whose frames are skipped to find the user's line: torch, training frameworks, libraries that are
called by user code, and ours."""

_NOT_THE_USERS: Final = re.compile(
    rf"/(site|dist)-packages/({'|'.join(sorted(SKIPPED_PACKAGES))})/"
    r"|(?<!/tests)/instrumented_ddp/"
    r"|/torch/(_\w+(/|\.py)|(autograd|cuda|distributed|fx|multiprocessing|nn|optim|utils)/)"
    r"|/site-packages/typing_extensions\.py$"
    r"|/lib/python3\.\d+/(?!(site|dist)-packages/)"
    r"|\.(c|cc|cpp|cu|h|hpp|so|\d+)$"
    r"|^(<(?!ipython)|\?\?|$)"
)


def is_user_file(file: str) -> bool:
    """Return whether a file is none of ``SKIPPED_PACKAGES``, Python's standard library, C++, or generated code."""
    return _NOT_THE_USERS.search(file) is None
