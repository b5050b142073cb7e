"""Copies of binary files: their entries are numbers, and what is damaged is copied as damage, not as bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.collective_log import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    CollectiveLogHeader,
    Entries,
    Signature,
    entry_digest,
)
from overlapscope.trace.collective_log_reader import compute_entry_checks, verify_entries
from overlapscope.trace.confidential.pseudonyms import Pseudonyms
from overlapscope.trace.confidential.rules import description, group, hide_plan_number, tokens
from overlapscope.trace.event_log import RECORD_DTYPE, Records, compute_record_checksums, is_complete
from overlapscope.trace.live_files import (
    compute_pass_checksums,
    find_complete_passes,
    fingerprint_pass_dtype,
    pack_liveness,
    read_alive_file,
    read_is_ready,
)
from overlapscope.trace.regular_file import open_regular_file, read_regular_file
from overlapscope.trace.schema import HEADER_BYTES, RECORD_BYTES, LogHeader

DAMAGED: Final = b"damaged"
"""Content of a copy of a file that can't be read."""
_CHUNK_SLOTS: Final = 64 * 1024
_GRADIENT_BYTES: Final = 8


def copy_event_log(source: Path, target: Path, pseudonyms: Pseudonyms) -> None:
    """Copy an event log, or one of an incident.

    Args:
        pseudonyms: hides the hashes of plans.

    Raises:
        OSError: it can't be read or written.
    """
    _copy_log(source, target, LogHeader.unpack, RECORD_DTYPE, lambda slots: _clean_records(slots, pseudonyms))


def _clean_records(slots: Records, pseudonyms: Pseudonyms) -> Records:
    known, cleaned = is_complete(slots), slots.copy()
    plans, inverse = np.unique(slots["plan_hash"], return_inverse=True)
    hidden = [hide_plan_number(pseudonyms, one) for one in plans.tolist()]
    cleaned["plan_hash"] = np.array(hidden, dtype=np.uint32)[inverse]
    cleaned["crc32"][known] = compute_record_checksums(cleaned[known])
    damaged = ~known & (_has_content(slots, RECORD_BYTES))
    marks = np.zeros(int(damaged.sum()), dtype=RECORD_DTYPE)
    marks["sequence"] = np.where(slots["sequence"][damaged] < 2**40, slots["sequence"][damaged], 0)
    marks["crc32"] = compute_record_checksums(marks) ^ np.uint32(1)
    cleaned[damaged] = marks
    return cleaned


def copy_collective_log(
    source: Path, target: Path, pseudonyms: Pseudonyms, signatures: Mapping[int, Signature]
) -> None:
    """Copy a collective log. Its sums over names are made anew, since short names could be guessed from them.

    Args:
        pseudonyms: hides the name of the group.
        signatures: signatures of the rank in the copy, by number.

    Raises:
        OSError: it can't be read or written.
    """

    def unpack(page: bytes, path: Path) -> CollectiveLogHeader:
        header = CollectiveLogHeader.unpack(page, path)
        return replace(
            header,
            name=group(pseudonyms, header.name),
            description=description(pseudonyms, header.description) if header.description else "",
            backend=tokens(pseudonyms, header.backend),
            written=header.written if isinstance(header.written, int) else None,
        )

    _copy_log(source, target, unpack, ENTRY_DTYPE, lambda slots: _clean_entries(slots, signatures), is_whole=True)


def _clean_entries(slots: Entries, signatures: Mapping[int, Signature]) -> Entries:
    intact, is_intact = verify_entries(slots)
    is_intact = is_intact & (slots["number"] != 0)
    cleaned = np.zeros(len(slots), dtype=ENTRY_DTYPE)
    cleaned[is_intact] = intact[is_intact]
    order = np.flatnonzero(is_intact)[np.argsort(cleaned["number"][is_intact], kind="stable")]
    numbers, inverse = np.unique(cleaned["signature"][order], return_inverse=True)
    known = [signatures.get(one) for one in numbers.tolist()]
    hashes = np.array([0 if one is None else one.names_hash for one in known], dtype=np.uint64)[inverse]
    digests = cast(Any, entry_digest)(hashes, cleaned["number"][order].astype(np.uint64), -1)
    cleaned["names_hash"][order] = np.cumsum(np.where(hashes == 0, np.uint64(0), digests), dtype=np.uint64)
    cleaned["check"][is_intact] = compute_entry_checks(cleaned[is_intact])
    damaged = ~is_intact & _has_content(slots, ENTRY_BYTES)
    cleaned["number"][damaged] = slots["number"][damaged]
    cleaned["check"][damaged] = compute_entry_checks(cleaned[damaged]) ^ np.uint16(1)
    return cleaned


def _copy_log(
    source: Path,
    target: Path,
    unpack: Callable[[bytes, Path], Any],
    dtype: np.dtype[Any],
    clean: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    *,
    is_whole: bool = False,
) -> None:
    """Copy a log of a header page and slots; holes stay holes.

    Args:
        clean: returns what the copy holds in place of some slots.
        is_whole: True to clean all slots at once.
    """
    with open_regular_file(source) as file, target.open("xb") as copy:
        try:
            page = unpack(file.read(HEADER_BYTES), source).pack()
        except (OverlapScopeError, ValueError):  # or pseudonyms are too long for the page
            copy.write(DAMAGED)
            return
        copy.write(page)
        begin = 0
        while data := file.read(-1 if is_whole else _CHUNK_SLOTS * dtype.itemsize):
            slots = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype=dtype)
            used = np.flatnonzero(_has_content(slots, dtype.itemsize))
            if len(used):
                copy.seek(HEADER_BYTES + begin * dtype.itemsize)
                copy.write(clean(slots[: used[-1] + 1]).tobytes())
            begin += len(slots)
        copy.truncate(max(HEADER_BYTES, source.stat().st_size))


def _has_content(slots: npt.NDArray[Any], size: int) -> npt.NDArray[np.bool_]:
    """Return which slots hold anything but zeros."""
    words = np.frombuffer(slots.tobytes(), dtype=np.uint64).reshape(-1, size // 8)
    found: npt.NDArray[np.bool_] = (words != 0).any(axis=1)
    return found


def copy_fingerprints(source: Path, target: Path, pseudonyms: Pseudonyms, tensors: int) -> None:
    """Copy the fingerprints of a model as other numbers: equal ones stay equal, and none can be recognized.

    Args:
        tensors: number of fingerprints in a pass.

    Raises:
        OSError: it can't be read or written.
    """
    data, dtype = read_regular_file(source), fingerprint_pass_dtype(tensors)
    slots = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
    is_kept = find_complete_passes(slots)
    cleaned = np.zeros(len(slots), dtype)
    cleaned[is_kept] = slots[is_kept]
    distinct, inverse = np.unique(cleaned["values"], return_inverse=True)
    hidden = [0 if one == 0 else _hide_number(pseudonyms, one) for one in distinct.tolist()]
    cleaned["values"] = np.array(hidden, dtype=np.int64)[inverse].reshape(cleaned["values"].shape)
    cleaned["crc32"][is_kept] = compute_pass_checksums(cleaned[is_kept])
    with target.open("xb") as copy:
        copy.write(cleaned.tobytes())
        copy.truncate(len(data))


def _hide_number(pseudonyms: Pseudonyms, value: int) -> int:
    return int.from_bytes(pseudonyms.digest("fingerprint", str(value), 8), "little", signed=True) or 1


def copy_ready_gradients(source: Path, target: Path, model: int) -> None:
    """Copy which gradients of a model are ready, and since when.

    Raises:
        OSError: it can't be read or written.
    """
    problems: list[Problem] = []
    read_is_ready(source.parent, model, problems)
    data = read_regular_file(source)
    is_damaged = bool(problems)
    target.write_bytes((1).to_bytes(_GRADIENT_BYTES, "little") if is_damaged else data[: len(data) // 8 * 8])


def copy_liveness(source: Path, target: Path) -> None:
    """Copy when the watchdog of a rank last ran.

    Raises:
        OSError: it can't be read or written.
    """
    problems: list[Problem] = []
    found = read_alive_file(source, problems)
    is_empty = not source.stat().st_size
    target.write_bytes(b"" if is_empty else DAMAGED if problems else pack_liveness(*(one or 0 for one in found)))
