"""Table of distinct collective signatures: a number for each, and a line in ``signatures.jsonl``."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from instrumented_ddp.bucket_plan import dtype_name
from instrumented_ddp.collective_log.dispatch import Call
from instrumented_ddp.collective_log.purposes import CollectiveRole
from overlapscope.trace.format import SIGNATURES_FILE
from overlapscope.trace.group_log import CollectiveLogHeader
from overlapscope.trace.signature import Signature

_MAX_SIGNATURES: Final = 100_000
"""Limit for collectives whose shapes change all the time; signatures beyond it get number 0, but the right hash."""
_MAX_FRAMES_TO_REDUCTION: Final = 6
"""Maximum number of frames from this table to the ``torch.distributed`` function called by the user."""


class SignatureTable:
    """The signatures of this process, each written when it is first seen.

    Args:
        folder: folder of this rank.

    Raises:
        OSError: the file can't be written; ``FileExistsError`` if it exists.
    """

    def __init__(self, folder: Path) -> None:
        self.known: list[Signature] = []
        """Known signatures, indexed by number - 1."""
        self._file = (folder / SIGNATURES_FILE).open("x", encoding="utf-8")
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._lock = threading.Lock()

    def of(
        self, call: Call, purpose: CollectiveRole | None, header: CollectiveLogHeader, names: tuple[str, ...]
    ) -> tuple[int, Signature]:
        """Return the number and the signature of a call.

        Args:
            purpose: declared purpose, if any.
            header: header of its group.
            names: names of its tensors.
        """
        tensors = call.tensors
        reduce_op = _reduce_op() if "reduce" in call.op else ""
        key = (
            call.op,
            purpose,
            names,
            reduce_op,
            call.peer,
            call.tag,
            header.ranks,
            tensors[0].dtype if tensors else None,
            *(tensor.shape for tensor in tensors),
        )
        number = self._numbers.get(key)
        if number is not None:
            return number, self.known[number - 1]
        what = purpose or CollectiveRole(role="user")
        is_known_peer = call.peer is not None and 0 <= call.peer < len(header.ranks)
        signature = Signature(
            op=call.op,
            reduce_op=reduce_op,
            dtype=dtype_name(tensors[0].dtype) if tensors else "",
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            elements=sum(tensor.numel() for tensor in tensors),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            peer=header.ranks[call.peer] if call.peer is not None and is_known_peer else call.peer,
            tag=call.tag,
            names=names,
            role=what.role,
            model=what.model,
            plan_epoch=what.plan_epoch,
            plan_hash=what.plan_hash,
            bucket=what.bucket,
            strategy=what.strategy,
            phase=what.phase,
            round=what.round,
            rounds=what.rounds,
        )
        with self._lock:
            if len(self.known) >= _MAX_SIGNATURES:
                return 0, signature
            self.known.append(signature)
            number = self._numbers[key] = len(self.known)
            with suppress(OSError, ValueError):  # a full disk, or closed a moment ago
                self._file.write(signature.to_json(number))
                self._file.flush()
        return number, signature

    def close(self) -> None:
        """Close the file; signatures stay known."""
        self._file.close()


def _reduce_op() -> str:
    """Return the reduce operation from the caller's frame: the dispatcher's boxed argument can't be unpacked.

    Returns:
        ``sum``, ``max`` ...; empty if a process group was called in another way.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MAX_FRAMES_TO_REDUCTION):
        if frame is None:
            break
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d" and "op" in frame.f_locals:
            op = frame.f_locals["op"]
            return str(getattr(op, "op", op)).rpartition(".")[2].lower()
        frame = frame.f_back
    return ""
