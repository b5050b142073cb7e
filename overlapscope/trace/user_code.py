"""Which lines are the user's: of frames, of stacks that faulthandler has written, and of dumps of other tools."""

from __future__ import annotations

import re
from typing import Final

PASSED_OVER: Final = frozenset(
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
"""Top-level packages between whose lines and where a process is stands the user's line: torch, training frameworks,
libraries that do what they are told, and ours."""

_NOT_THE_USERS: Final = re.compile(
    rf"/(site|dist)-packages/({'|'.join(sorted(PASSED_OVER))})/"
    r"|(?<!/tests)/instrumented_ddp/"
    r"|/torch/(_\w+(/|\.py)|(autograd|cuda|distributed|fx|multiprocessing|nn|optim|utils)/)"
    r"|/site-packages/typing_extensions\.py$"
    r"|/lib/python3\.\d+/(?!(site|dist)-packages/)"
    r"|\.(c|cc|cpp|cu|h|hpp|so|\d+)$"
    r"|^(<(?!ipython)|\?\?|$)"
)


def is_users_file(file: str) -> bool:
    """Whether a file is neither of ``PASSED_OVER``, nor of Python's own library, nor C++, nor generated code."""
    return _NOT_THE_USERS.search(file) is None
