"""Signature of a collective: the part that must be equal on all ranks of its group, and the part that may differ.

Collectives are matched by their order alone. Two ranks whose n-th collectives have different ``hash``es reduce
different tensors together, abort or hang. Names of tensors have a separate hash: ``if rank == 0: broadcast(a) else:
broadcast(b)`` is correct, so different names alone are no error, while *swapped* names are.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

from overlapscope.trace.checksum import dump_json_line

NO_BUCKET: Final = -1

POINT_TO_POINT: Final = ("send", "recv")
"""Operations of two ranks. They have their own log, because the other ranks of the group take no part in them."""

_SIZES_MAY_DIFFER: Final = ("all_to_all", "gather", "scatter", "barrier", "monitored_barrier")
"""Operations whose element count may differ between ranks."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Properties of a collective that are the same each time its line runs. One line of ``signatures.jsonl``."""

    op: str
    """Name in ``torch.distributed``: all_reduce, broadcast, all_gather, reduce_scatter, reduce, gather, scatter,
    all_to_all, barrier, monitored_barrier, send, recv."""
    reduce_op: str = ""
    """sum, avg, max ...; empty if nothing is reduced."""
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the input tensors of this rank (for scatter and recv: of the output tensors)."""
    elements: int = 0
    """Number of elements of all tensors."""
    bytes: int = 0
    peer: int | None = None
    """Rank in the job: the root, or the other rank of a send or recv; None: any, or none."""
    tag: int = 0
    names: tuple[str, ...] = ()
    """Names of the tensors: parameters and buffers as in the module, others as the user's variables."""
    role: str = "user"
    """Purpose: bucket, buffers, bitmap (of used parameters), construction (what DDP compares and broadcasts when it is
    created), plan (rank 0's plan, at a rebuild), join, hook (launched by a communication hook), segment (part of a
    bucket's all-reduce, for strategies that split it), user."""
    model: int = 0
    """Number of the DDP instance in its process, if DDP launches it."""
    plan_epoch: int = 0
    plan_hash: str = ""
    """Hash of a bucket's plan: names, shapes, dtypes and order of all parameters, and their assignment to buckets."""
    bucket: int = NO_BUCKET
    strategy: str = ""
    """Strategy that splits a bucket's all-reduce into segments; empty if the backend performs it."""
    phase: str = ""
    """For a segment: phase of the all-reduce, as named by the strategy."""
    round: int = 0
    """For a segment: number of the round within the phase, from 1."""
    rounds: int = 0
    """Number of rounds of the phase, equal on all ranks; 0: unknown, and ``round`` is the rank's own count."""

    @cached_property
    def hash(self) -> int:
        """Return a 64-bit hash of what all ranks must have in common."""
        size = 0 if self.op in _SIZES_MAY_DIFFER else self.elements
        what = [self.op, self.reduce_op, self.dtype if size else "", size, self.peer]
        if self.bucket != NO_BUCKET:
            what += [self.model, self.plan_hash, self.bucket, *filter(None, [self.strategy])]
        return _hash64(what)

    @property
    def is_gradient_reduction(self) -> bool:
        """Return whether it reduces the gradients of a bucket, and doesn't gather its parameters."""
        return self.bucket != NO_BUCKET and self.op != "all_gather"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of a bucket's parameters, reduced or gathered; empty for other collectives."""
        return self.names if self.bucket != NO_BUCKET else ()

    @cached_property
    def names_hash(self) -> int:
        """Return a 64-bit hash of the tensors' names; 0 if unknown."""
        return _hash64(self.names) if self.names else 0

    def to_json(self, number: int) -> str:
        """Serialize a line of ``signatures.jsonl``, with its line end."""
        return dump_json_line({"signature": number, **asdict(self)})

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> tuple[int, Signature]:
        """Parse a line; return the number and the signature.

        Raises:
            KeyError, TypeError, ValueError: the line is damaged.
        """
        number = int(line["signature"])
        known = {name: line[name] for name in cls.__dataclass_fields__ if name in line}
        known["shapes"] = tuple(tuple(int(n) for n in shape) for shape in known.get("shapes", ()))
        known["names"] = tuple(str(name) for name in known.get("names", ()))
        return number, cls(**known)


def _hash64(what: Any) -> int:
    return int.from_bytes(blake2b(json.dumps(what).encode(), digest_size=8).digest(), "little")
