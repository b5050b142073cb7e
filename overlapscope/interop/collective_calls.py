"""The collectives of a profile: what each one is, and which kernels are its own.

Today's traces say both. Those of 2021 to 2024 have ``record_param_comms`` without a name, or not at all, and kernels
whose "External id" is their correlation; then the annotation of the backend or the operator of torch.distributed
tells the name and the size, and the launch of a kernel tells in which collective it was launched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.trace.schema import DTYPE_BYTES

CALL_COLUMNS: Final = (
    *("id", "op", "elements", "dtype"),
    *("group", "description", "group_size", "thread", "start_ns", "end_ns"),
)
"""Columns of launches of collectives. ``op`` is as torch.distributed names it; what is unknown is 0 or empty."""
_MADE_UP_ID: Final = 2**62
"""First id of the calls that have none in their profile."""
GENERIC: Final = "generic"
"""Operation of a kernel whose name does not tell it, as all of RCCL's."""
_OP_MARKS: Final = (
    ("barrier", "barrier"),
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send or recv"),
    ("broadcast", "broadcast"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("recv", "recv"),
)
"""What a name without underscores contains, and the operation; the first that fits counts."""
_DTYPES: Final = {"float": "float32", "double": "float64", "half": "float16", "c10::half": "float16"} | {
    "bfloat16": "bfloat16",
    "c10::bfloat16": "bfloat16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "bool": "bool",
}
"""Element types as event logs name them, by the names of ``c10::ScalarType`` and of C++."""


@lru_cache(maxsize=4096)  # there are few distinct names
def parse_op(name: str) -> str:
    """Return the operation in the name of a call, an annotation or a kernel; empty if there is none.

    Example: ``_allgather_base``, ``c10d::_allgather_base_`` and ``nccl:_all_gather_base`` are all ``all_gather``.
    """
    plain = name.lower().replace("_", "")
    return next((op for mark, op in _OP_MARKS if mark in plain), "")


def parse_dtype(name: str) -> str:
    """Return an element type as event logs name it; empty if it is not one of theirs."""
    found = _DTYPES.get(name.lower(), name)
    return found if found in DTYPE_BYTES else ""


def collect_calls(parameters: pd.DataFrame, annotations: pd.DataFrame, operators: pd.DataFrame) -> pd.DataFrame:
    """Return each collective of a profile once, by its launch.

    Args:
        parameters: ``record_param_comms``, whose ``op`` may be empty; it also stands for waits.
        annotations: those of the backend, ``nccl:all_reduce``, which say what and how large.
        operators: those of torch.distributed, ``c10d::allreduce_``.

    Returns:
        ``CALL_COLUMNS``, in order of start. Where the same collective has several of these, the first says when it was
        launched and the others what it lacks.
    """
    sources = (parameters, operators, annotations)
    found = next((source for source in sources if len(source)), parameters).reset_index(drop=True)
    if not len(parameters) and len(operators):
        found = _add_outside(operators, annotations[annotations["is_of_device"].astype(bool)])
    if len(annotations):
        number = np.arange(len(found))
        inside = _find_begins_within(found.assign(id=number), annotations)
        first = pd.Series(np.arange(len(annotations))).groupby(inside).first().reindex(number)
        found = _fill_in(found, annotations, first.fillna(-1).to_numpy(dtype=np.int64))
    if len(operators):
        found = _fill_in(found, operators, _find_begins_within(operators.assign(id=np.arange(len(operators))), found))
    found = found[found["op"] != ""].reset_index(drop=True)
    identity = found["id"].where(found["id"] >= 0, _MADE_UP_ID + np.arange(len(found))).astype(np.int64)
    return found.assign(id=identity)[list(CALL_COLUMNS)]


def _add_outside(operators: pd.DataFrame, annotations: pd.DataFrame) -> pd.DataFrame:
    """Return operators, and the annotations outside all of them: in 2022 only some collectives had an operator."""
    inside = _find_begins_within(operators.assign(id=np.arange(len(operators))), annotations)
    both = pd.concat([operators, annotations[inside < 0]], ignore_index=True)
    return both.sort_values("start_ns", kind="stable", ignore_index=True)


def _find_begins_within(spans: pd.DataFrame, calls: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return in which of some spans each call (n,) begins, by its id; -1 where in none."""
    return find_enclosing_spans(spans, calls["thread"].to_numpy(), calls["start_ns"].to_numpy())


def _fill_in(calls: pd.DataFrame, others: pd.DataFrame, which: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Return calls with the names and sizes that they lack.

    Args:
        which: (n,) index in ``others`` of what each call is, -1 for none.
    """
    known = others.reset_index(drop=True).reindex(np.where(which >= 0, which, len(others)))
    op = np.where(calls["op"] == "", known["op"].fillna("").to_numpy(), calls["op"])
    lacks_size = (calls["elements"] == 0).to_numpy() & (known["op"].to_numpy() == op)
    elements = np.where(lacks_size, known["elements"].fillna(0), calls["elements"]).astype(np.int64)
    return calls.assign(op=op, elements=elements, dtype=np.where(lacks_size, known["dtype"].fillna(""), calls["dtype"]))


def link_kernels(kernels: pd.DataFrame, launches: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Return kernels whose ``id`` is that of their collective, -1 for others.

    Args:
        kernels: ``id`` is the "External id" of each, or -1; in order of start.
        launches: correlation, thread, start_ns.
    """
    is_backend = (kernels["op"] != "").to_numpy()
    own = kernels[is_backend]
    # "External id" is the correlation itself in some traces, and then meets the ids of calls by chance.
    has_ids = bool((own["id"] != own["correlation"])[own["id"] >= 0].any())
    identity = np.where(own["id"].isin(calls["id"]) & has_ids, own["id"], -1).astype(np.int64)
    known = launches.drop_duplicates("correlation")
    index = pd.Index(known["correlation"]).get_indexer(pd.Index(own["correlation"]))
    launched = known.iloc[index[index >= 0]]
    inside = np.full(len(own), -1, dtype=np.int64)
    inside[index >= 0] = find_enclosing_spans(calls, launched["thread"].to_numpy(), launched["start_ns"].to_numpy())
    identity = np.where(identity >= 0, identity, inside)
    if (identity < 0).all() and not len(launched) and len(own) == len(calls):
        identity = calls["id"].to_numpy(dtype=np.int64)  # nothing but their order is left
    return kernels.assign(id=_scatter(identity, is_backend))


def _scatter(values: npt.NDArray[np.int64], which: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    whole = np.full(len(which), -1, dtype=np.int64)
    whole[which] = values
    return whole


def find_enclosing_spans(
    spans: pd.DataFrame, thread: npt.NDArray[Any], time_ns: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """Find the span in which a thread was at each of n times.

    Args:
        spans: id, thread, start_ns, end_ns; spans of one thread are sorted and don't overlap.

    Returns:
        (n,) ids of the spans; -1 where there is none. Example: a thread with span 0 from 0 to 4 and span 1 from 10 to
        14 gives 1 for time 12 and -1 for time 6.
    """
    found = np.full(len(time_ns), -1, dtype=np.int64)
    for number, own in spans.groupby("thread"):
        here = thread == number
        index = np.searchsorted(own["start_ns"].to_numpy(), time_ns[here], side="right") - 1
        inside = (index >= 0) & (time_ns[here] <= own["end_ns"].to_numpy()[np.maximum(index, 0)])
        found[here] = np.where(inside, own["id"].to_numpy()[np.maximum(index, 0)], -1)
    return found
