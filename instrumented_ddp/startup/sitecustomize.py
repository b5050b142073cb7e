"""Startup hook that runs in every Python process under ``overlapscope record`` and records those that become ranks.

A process becomes a rank when it creates a process group. Until ``torch.distributed`` is imported, this costs one
comparison per import, and until a process group is created, one function around ``init_process_group``. What ends a
process before that is recorded too. A ``sitecustomize`` of the user, which ours hides, runs as if ours did not exist.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType
from typing import Any, NoReturn

_TARGET_MODULE = "torch.distributed.distributed_c10d"
_HERE = os.path.dirname(os.path.abspath(__file__))
_CHILD_EXITS = os.path.join(os.path.dirname(_HERE), "recording", "child_exits.py")
_EARLY_END = os.path.join(_HERE, "early_end.py")
_RANK_PROCESS = "OVERLAPSCOPE_RANK_PROCESS"
"""Variable that tells the children of a rank that they are not that rank."""


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
        _EarlyEndRecorder.watch_multiprocessing()
        original = module.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            with _joining(original, args, kwargs):
                original(*args, **kwargs)
            _EarlyEndRecorder.is_over = True
            _attach()

        module.init_process_group = init_process_group  # type: ignore[attr-defined]

    return execute_and_wrap


def _watch_children() -> None:
    """Watch children, as launchers import torch.distributed too."""
    from pathlib import Path

    try:
        child_exits = _load_alone("overlapscope_child_exits", _CHILD_EXITS)
        child_exits.watch_children(Path(os.environ["OVERLAPSCOPE_TRACE"]))
    except Exception as error:
        print(f"overlapscope: how children of this process end is not recorded: {error!r}", file=sys.stderr)


def _load_alone(name: str, path: str) -> Any:
    """Load a file without its package, which imports torch."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _EarlyEndRecorder:
    """Recorder of what ends this process before it joins a process group; nothing is imported until something does."""

    is_over = False
    """True once the process has joined, and records its end itself."""
    _has_written_error = False
    """True if an exception was written: ``multiprocessing`` then exits with a status."""
    _pid_of_rank: int | None = None
    """Process whose environment says which rank it is; None if no rank is known yet."""

    @classmethod
    def watch(cls) -> None:
        """Observe uncaught exceptions and calls of ``sys.exit``, unless this is a child of a rank's process."""
        if "RANK" in os.environ:
            rank = f"{os.environ['RANK']}/{os.environ.get('LOCAL_RANK', '')}"
            above, _, pid = os.environ.get(_RANK_PROCESS, "").rpartition(" ")
            if above == rank and pid != str(os.getpid()):
                return
            os.environ[_RANK_PROCESS] = f"{rank} {os.getpid()}"
            cls._pid_of_rank = os.getpid()
        hook_before, exit_before = sys.excepthook, sys.exit

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            cls._write(error)
            hook_before(kind, error, trace)

        @functools.wraps(exit_before)
        def note_and_exit(status: Any = None, /) -> NoReturn:
            error = sys.exc_info()[1]
            if status not in (None, 0):
                cls._write(error, status)
            exit_before(status)

        sys.excepthook, sys.exit = excepthook, note_and_exit

    @classmethod
    def watch_multiprocessing(cls) -> None:
        """Observe exceptions in processes of ``multiprocessing``, which calls no hook for them."""
        from multiprocessing import parent_process, util

        def watch(_: object) -> None:
            util.Finalize(None, lambda: cls._write(sys.exc_info()[1]), exitpriority=0)

        util.register_after_fork(cls, watch)
        if parent_process() is not None:
            watch(cls)

    @classmethod
    def _write(cls, error: BaseException | None, status: object = None) -> None:
        is_of_rank = cls._pid_of_rank in (None, os.getpid())
        is_error = error is not None and not isinstance(error, SystemExit)
        if cls.is_over or not is_of_rank or not (is_error or (status is not None and not cls._has_written_error)):
            return
        cls._has_written_error |= is_error
        try:
            from pathlib import Path

            early_end = _load_alone("overlapscope_early_end", _EARLY_END)
            early_end.write_early_end(Path(os.environ["OVERLAPSCOPE_TRACE"]), error, status)
        except Exception:  # the folder is gone, the disk is full: the launcher may still know its exit status
            return


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
    _EarlyEndRecorder.watch()
if __name__ == "sitecustomize":
    _run_user_sitecustomize()
