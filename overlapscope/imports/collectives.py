"""The collectives of a profile: when each was launched, and when it ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from overlapscope.imports.kineto import Profile
from overlapscope.trace.format import DTYPE_BYTES

_OPS: Final = {"allreduce": "all_reduce", "broadcast": "broadcast"}
"""Operations that an event log can hold, by their names in PyTorch's operators."""
_NO_COLLECTIVES: Final = ("", "wait", "init", "barrier", "monitored_barrier")
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


@dataclass(kw_only=True)
class Collective:
    """A collective of this rank."""

    op: str
    dtype: str
    elements: int
    """Number of elements; 0 if the trace does not have it."""
    group: str
    launch_ns: int
    """Launch time on the clock of the host."""
    start_ns: int | None = None
    """Start time; None if the trace does not show when it ran."""
    end_ns: int | None = None


def extract_collectives(profile: Profile) -> tuple[list[Collective], Counter[str]]:
    """Return the collectives that an event log can hold, in launch order, and the number of others by name."""
    found, left_out = [], Counter[str]()
    ran = _device_spans(profile)
    on_host = {op: iter(_host_spans(profile, op)) for op in _OPS.values()}
    columns = ("id", "op", "elements", "dtype", "group", "start_ns")
    for identity, name, elements, dtype, group, launch_ns in zip(
        *(profile.collectives[column].tolist() for column in columns), strict=True
    ):
        if name in _NO_COLLECTIVES:
            continue
        op = _OPS.get(name)
        if op is None:
            left_out[name] += 1
            continue
        # Without a device, annotations of the backend span its collectives: the n-th belongs to the n-th launch.
        start_ns, end_ns = ran.get(identity, (None, None)) if len(profile.kernels) else next(on_host[op], (None, None))
        known = _DTYPES.get(dtype.lower(), dtype)
        found.append(
            Collective(
                op=op,
                dtype=known if known in DTYPE_BYTES else "unknown",
                elements=int(elements),
                group=group,
                launch_ns=launch_ns,
                start_ns=start_ns,
                end_ns=end_ns,
            )
        )
    return found, left_out


def _device_spans(profile: Profile) -> dict[int, tuple[int, int]]:
    """Return (start, end) of each collective by id: from its first kernel until its last."""
    kernels = profile.kernels[profile.kernels["op"] != ""]
    edges = kernels.groupby("id").agg({"start_ns": "min", "end_ns": "max"})
    return {
        int(str(identity)): (start, end)
        for identity, (start, end) in zip(edges.index, edges.to_numpy().tolist(), strict=True)
    }


def _host_spans(profile: Profile, op: str) -> list[tuple[int, int]]:
    spans = profile.spans
    own = spans.loc[(spans["kind"] == "backend") & spans["name"].str.endswith(f":{op}"), ["start_ns", "end_ns"]]
    return [(start, end) for start, end in own.to_numpy().tolist()]
