"""The files of an import: traces by themselves, in folders, and in archives; and what other files are."""

from __future__ import annotations

import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO, Final

from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of
from overlapscope.trace.regular_file import open_regular_file

_ENDINGS: Final = (".json", ".json.gz", ".sqlite", ".nsys-rep", ".qdrep")
"""Endings of the names of traces."""
_OF_HANDLER: Final = re.compile(r"^(?P<worker>.+)\.(?P<time>\d+)\.pt\.trace\.json(\.gz)?$")
"""Names that ``tensorboard_trace_handler`` gives, one for each cycle of a profiler's schedule."""
_HEAD_BYTES: Final = 64 * 1024
_DIAGNOSE: Final = "'overlapscope diagnose' reads those"
_KINDS: Final = (
    (rb'^\s*\{\s*"schema"\s*:\s*"[^"]*"', "an execution trace (ExecutionTraceObserver), which has no times of kernels"),
    (rb"^\s*\[\s*\[\s*\[?\s*-?\d", "a memory timeline (export_memory_timeline), which has no events"),
    (rb"(?i)^\s*<(!doctype|html|img)", "a web page, such as export_memory_timeline writes"),
    (rb'^\s*\{.{0,4000}"(pg_config|pg_status)"\s*:', f"a Flight Recorder dump; {_DIAGNOSE}"),
    (rb"^\x80[\x02-\x05]", f"a pickle, such as a memory snapshot or a Flight Recorder dump; {_DIAGNOSE}"),
    (rb"^PK\x03\x04", "a damaged zip archive"),
    (rb"^\x28\xb5\x2f\xfd", "compressed with zstd; decompress it first"),
    (rb"^[^\n{}\[\]]*;[^\n]* \d+\n", "a list of stacks (export_stacks), which has no times"),
)
"""How other files of profilers begin, and what they are."""


_UNPACKING_ERRORS: Final = (
    *(OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error),
    *(RuntimeError, NotImplementedError),  # a zip with a password, or a compression of another time
)


@dataclass(frozen=True)
class TraceFile:
    """A trace to read."""

    path: Path
    label: str
    """Where the user finds it: the path, or the archive and the name in it."""


@contextmanager
def find_trace_files(paths: Sequence[Path]) -> Iterator[tuple[list[TraceFile], list[str]]]:
    """Yield the traces in files, folders and archives, and notes on what was left out.

    Archives are unpacked into a temporary folder.

    Raises:
        OverlapScopeError: a folder or archive has no trace, or can't be read.
    """
    with TemporaryDirectory(prefix="overlapscope-import-") as scratch:
        files: list[TraceFile] = []
        notes: list[str] = []
        for number, path in enumerate(paths):
            if path.is_dir():
                found = [TraceFile(one, str(one)) for one in sorted(path.rglob("*")) if _is_trace_name(one.name)]
            elif _is_archive(path):
                found = _unpack(path, Path(scratch) / str(number))
            else:
                files.append(TraceFile(path, str(path)))
                continue
            if not found:
                raise OverlapScopeError(f"{path}: no trace in it; their names end in {', '.join(_ENDINGS[:3])}")
            files += _select_latest_cycle(path, found, notes)
        yield files, notes


def _is_trace_name(name: str) -> bool:
    return name.endswith(_ENDINGS) and not name.startswith(".")


def _is_archive(path: Path) -> bool:
    with suppress(OSError):
        return path.is_file() and (zipfile.is_zipfile(path) or tarfile.is_tarfile(path))
    return False


def _unpack(path: Path, folder: Path) -> list[TraceFile]:
    try:
        with _open_members(path) as members:
            found: list[TraceFile] = []
            for name, content in members:
                plain = PurePosixPath(name)
                # Of the path only two names are used, so that nothing is written elsewhere; a folder may tell the rank.
                parent = "" if plain.parent.name == ".." else plain.parent.name
                target = folder / str(len(found)) / parent / plain.name
                target.parent.mkdir(parents=True)
                with target.open("wb") as copy:
                    shutil.copyfileobj(content, copy)
                found.append(TraceFile(target, f"{path}: {name}"))
            return found
    except (
        OSError,
        EOFError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
        NotImplementedError,
    ) as error:
        raise OverlapScopeError(f"{path}: can't be unpacked ({error})") from None


@contextmanager
def _open_members(path: Path) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """Yield the names and contents of the traces in an archive."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            wanted = [
                one
                for one in archive.infolist()
                if not one.is_dir() and _is_trace_name(PurePosixPath(one.filename).name)
            ]
            yield ((one.filename, archive.open(one)) for one in sorted(wanted, key=lambda one: one.filename))
    else:
        with tarfile.open(path) as tar:
            members = [one for one in tar.getmembers() if one.isfile() and _is_trace_name(PurePosixPath(one.name).name)]
            opened = ((one.name, tar.extractfile(one)) for one in sorted(members, key=lambda one: one.name))
            yield ((name, content) for name, content in opened if content is not None)


def _select_latest_cycle(path: Path, files: Sequence[TraceFile], notes: list[str]) -> list[TraceFile]:
    """Return the latest of the profiles that one process has written, as a profiler's schedule may repeat."""
    latest: dict[tuple[Path, str], tuple[int, TraceFile]] = {}
    selected: list[TraceFile] = []
    for file in files:
        named = _OF_HANDLER.match(file.path.name)
        if named is None:
            selected.append(file)
            continue
        # An archive's files lie in folders of their own.
        key = (file.path.parent if file.label == str(file.path) else path, named["worker"])
        time = int(named["time"])
        if key not in latest or time > latest[key][0]:
            latest[key] = time, file
    selected += [file for _, file in latest.values()]
    if left_out := len(files) - len(selected):
        earlier = count_of(left_out, "earlier profile")
        notes.append(f"{path}: left out: {earlier} of the same processes; give files to choose others")
    return selected


def describe_other_kind(path: Path) -> str | None:
    """Say what a file is that is no trace; None if it may be one."""
    try:
        with open_regular_file(path) as file:
            head = file.read(_HEAD_BYTES)
            if head[:2] == b"\x1f\x8b":
                file.seek(0)
                with suppress(OSError, EOFError, zlib.error):
                    head = GzipFile(fileobj=file).read(_HEAD_BYTES)
    except OSError:
        return None
    if b'"traceEvents"' in head:
        return None
    return next((kind for begin, kind in _KINDS if re.search(begin, head, re.DOTALL)), None)
