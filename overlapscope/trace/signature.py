"""What a collective *is*: the part that all ranks of its group must have in common, and the part that may differ.

Collectives are matched by their order alone. Two ranks whose n-th collectives have different ``hash``es reduce
different things together, abort or hang. Names of tensors are kept apart: ``if rank == 0: broadcast(a) else:
broadcast(b)`` is correct, so different names alone are no fault, while *swapped* names are.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

from overlapscope.trace.checksum import json_line

NO_BUCKET: Final = -1

POINT_TO_POINT: Final = ("send", "recv")
"""Operations of two ranks. They have their own log, because the others of the group take no part in them."""

_SIZES_MAY_DIFFER: Final = ("all_to_all", "gather", "scatter", "barrier", "monitored_barrier")
"""Operations whose element count on one rank says nothing about that on another."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Everything about a collective that is the same each time its line runs. One line of ``signatures.jsonl``."""

    op: str
    """Name in ``torch.distributed``: all_reduce, broadcast, all_gather, reduce_scatter, reduce, gather, scatter,
    all_to_all, barrier, monitored_barrier, send, recv."""
    reduce_op: str = ""
    """sum, avg, max ...; empty if nothing is reduced."""
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors that this rank gives (of a scatter and a recv: takes)."""
    elements: int = 0
    """Number of elements of all tensors."""
    bytes: int = 0
    peer: int | None = None
    """Rank in the job: the root, or the other side of a send or recv; None: any, or none."""
    tag: int = 0
    names: tuple[str, ...] = ()
    """Names of the tensors: parameters and buffers as in the module, others as in the user's variables."""
    role: str = "user"
    """What for: bucket, buffers, bitmap (of used parameters), construction (what DDP compares and broadcasts when
    it is made), plan (the one of rank 0, at a rebuild), join, hook (a communication hook does it), segment (a part of a
    bucket's sum, of a strategy that makes it of several), user."""
    model: int = 0
    """Number of the DDP instance in its process, if DDP launches it."""
    plan_epoch: int = 0
    plan_hash: str = ""
    """Hash of a bucket's plan: names, shapes, dtypes and order of all parameters, and their assignment to buckets."""
    bucket: int = NO_BUCKET
    strategy: str = ""
    """Of a bucket's sum, or a segment of it: by which it is made of segments; empty if the backend makes it."""
    phase: str = ""
    """Of a segment: the part of the sum, as the strategy calls it."""
    round: int = 0
    """Of a segment: its round within the phase, from 1."""
    rounds: int = 0
    """How many the phase has on all ranks alike; 0: unknown, and ``round`` is the rank's own count."""

    @cached_property
    def hash(self) -> int:
        """64 bits of what all ranks must have in common."""
        size = 0 if self.op in _SIZES_MAY_DIFFER else self.elements
        what = [self.op, self.reduce_op, self.dtype if size else "", size, self.peer]
        if self.bucket != NO_BUCKET:
            what += [self.model, self.plan_hash, self.bucket, *filter(None, [self.strategy])]
        return _hash64(what)

    @property
    def is_of_gradients(self) -> bool:
        """Whether it averages the gradients of a bucket, and does not gather its parameters."""
        return self.bucket != NO_BUCKET and self.op != "all_gather"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters of a bucket, whose gradients are reduced or which are gathered; none but of one."""
        return self.names if self.bucket != NO_BUCKET else ()

    @cached_property
    def names_hash(self) -> int:
        """64 bits of the tensors' names; 0 if unknown."""
        return _hash64(self.names) if self.names else 0

    def to_json(self, number: int) -> str:
        """A line of ``signatures.jsonl``, with its end."""
        return json_line({"signature": number, **asdict(self)})

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> tuple[int, Signature]:
        """The number and the signature of a line.

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
