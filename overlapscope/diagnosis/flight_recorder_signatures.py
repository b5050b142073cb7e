"""Conversion of operations in a Flight Recorder dump to signatures of collective logs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from overlapscope.trace.flight_recorder import DumpEntry
from overlapscope.trace.format import DTYPE_BYTES
from overlapscope.trace.signature import Signature

_OPS: Final = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_v": "all_gather",
    "ALLGATHER_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_v": "reduce_scatter",
    "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allreduce_coalesced": "all_reduce",
    "sparse_all_reduce": "all_reduce",
    "all_reduce_barrier": "barrier",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
    "recvAnySource": "recv",
}
"""Operations by the names of backends, which depend on how the tensors are passed."""

_DTYPES: Final = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_UNEVEN: Final = ("all_gather_v", "reduce_scatter_v")
"""Operations to which each rank may contribute a different number of elements."""
_COALESCED: Final = "coalesced"
_MOST_NAMES: Final = 3
_OUTPUT_OPS: Final = ("scatter", "recv")
"""Operations whose size on a rank is that of its output."""


def is_end_of_coalesced(entry: DumpEntry) -> bool:
    """Return True if an entry is no operation, but marks the end of those that were launched as one."""
    return entry.name.endswith(_COALESCED) and not any(entry.input_shapes)


def parse_backend(entry: DumpEntry) -> str:
    """Return the backend of an entry: nccl, gloo ..."""
    return entry.name.partition(":")[0] if ":" in entry.name else ""


def make_signature(parts: Sequence[DumpEntry], members: tuple[int, ...]) -> Signature:
    """Return the signature of one launch, recorded as a whole or as several parts with one number.

    A dump holds no names, buckets, root or reduction operation.

    Args:
        parts: the entries with that number, in order.
        members: the ranks of the group, in order: a send identifies its peer by the index in it.
    """
    end = next((part for part in parts if is_end_of_coalesced(part)), None)
    inner = [part for part in parts if part is not end] or list(parts)
    whole = _op(end.name) if end is not None and _op(end.name) != _COALESCED else ""
    return _signature(
        whole or _joined({_op(part.name) for part in inner}, _COALESCED),
        tuple(shape for part in inner for shape in (part.output_shapes if _uses_output(part) else part.input_shapes)),
        tuple(dtype for part in inner for dtype in (part.output_dtypes if _uses_output(part) else part.input_dtypes)),
        _peer(inner[0].name, members) if len(inner) == 1 else None,
        any(part.name.endswith(_UNEVEN) for part in inner),
    )


@lru_cache(maxsize=65536)  # ranks launch the same few thousand operations again and again
def _signature(
    op: str, shapes: tuple[tuple[int, ...], ...], dtype_names: tuple[str, ...], peer: int | None, is_uneven: bool
) -> Signature:
    dtypes = [_DTYPES.get(name, name.lower()) for name in dtype_names]
    return Signature(
        op=op,
        dtype=_joined(set(dtypes), "of several types"),
        shapes=shapes,
        elements=0 if is_uneven else sum(map(math.prod, shapes)),
        bytes=sum(math.prod(shape) * DTYPE_BYTES.get(dtype, 0) for shape, dtype in zip(shapes, dtypes, strict=False)),
        peer=peer,
    )


def _joined(names: set[str], several: str) -> str:
    return " and ".join(sorted(names)) if len(names) <= _MOST_NAMES else several


def _op(name: str) -> str:
    plain = name.rpartition(":")[2].partition(" ")[0]
    return _OPS.get(plain, plain)


def _uses_output(entry: DumpEntry) -> bool:
    return _op(entry.name) in _OUTPUT_OPS


def _peer(name: str, members: Sequence[int]) -> int | None:
    """Return the peer of ``nccl:send 0->1`` or ``nccl:recv 1<-0`` as a global rank.

    Example: of members (4, 6), ``nccl:send 0->1`` has the peer 6.
    """
    match = re.search(r"^(?:.*:)?(?:send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$", name)
    if match is None:
        return None
    index = int(match[2])
    return members[index] if index < len(members) else None
