"""Startup hook that runs in every Python process under ``overlapscope record`` and records those that become ranks.

A process becomes a rank when it creates a process group. Until ``torch.distributed`` is imported, this costs one
comparison per import, and until a process group is created, one function around ``init_process_group``. A
``sitecustomize`` of the user, which ours hides, runs as if ours did not exist.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_TARGET_MODULE = "torch.distributed.distributed_c10d"
_HERE = os.path.dirname(os.path.abspath(__file__))
_CHILD_EXITS = os.path.join(os.path.dirname(_HERE), "recording", "child_exits.py")


class _TorchImportHook:
    """Import hook that removes itself once the module that it waits for is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Return the spec of a module, as ``sys.meta_path`` requests it."""
        if name != _TARGET_MODULE:
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _wrap_after(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
        return spec


def _wrap_after(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_and_wrap(module: ModuleType) -> None:
        execute(module)
        _watch_children()
        original = module.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            with _joining(original, args, kwargs):
                original(*args, **kwargs)
            _attach()

        module.init_process_group = init_process_group  # type: ignore[attr-defined]

    return execute_and_wrap


def _watch_children() -> None:
    """Watch children, as launchers import torch.distributed too. Runs the file alone: its package needs this import."""
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    try:
        spec = spec_from_file_location("overlapscope_child_exits", _CHILD_EXITS)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.watch_children(Path(os.environ["OVERLAPSCOPE_TRACE"]))
    except Exception as error:
        print(f"overlapscope: how children of this process end is not recorded: {error!r}", file=sys.stderr)


def _joining(
    original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[None]:
    try:
        from instrumented_ddp.watchdog.init_watch import watch_rendezvous
    except Exception:  # for example a Python with torch but without this package: reported after joining
        return nullcontext()
    return watch_rendezvous(original, args, kwargs)


def _attach() -> None:
    try:
        from instrumented_ddp.attach import attach

        attach()
    except Exception as error:
        print(f"overlapscope: training continues unrecorded: {type(error).__name__}: {error}", file=sys.stderr)


def _run_user_sitecustomize() -> None:
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


if os.environ.get("OVERLAPSCOPE_TRACE") and __name__ == "sitecustomize":
    sys.meta_path.insert(0, _TorchImportHook)
if __name__ == "sitecustomize":
    _run_user_sitecustomize()
