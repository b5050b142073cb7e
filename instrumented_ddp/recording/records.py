"""Records packed ahead of time: everything but the times is known once a plan is."""

from __future__ import annotations

from typing import Any, Final

from instrumented_ddp.bucket_plan import BucketPlan, Traffic, dtype_name
from instrumented_ddp.collective_log.purposes import CollectiveRole
from overlapscope.trace.format import NO_CALL_SITE, NO_INDEX, Flag, Kind, Phase, pack_body
from overlapscope.trace.segments import Segment


class PlanRecords:
    """Packed records of one bucket plan."""

    def __init__(self, timer_flags: Flag, model: int, epoch: int, plan: BucketPlan) -> None:
        self.devices = [parameter.device for parameter in plan.parameters]
        """Device of each parameter."""
        self._common: dict[str, Any] = {"model": model, "plan_epoch": epoch, "plan_hash": int(plan.hash[:8], 16)}
        all_elements = sum(parameter.elements for parameter in plan.parameters)
        self.plan = pack_body(Kind.PLAN, elements=all_elements, **self._common)
        numbers = range(len(plan.buckets))
        purposes = [
            CollectiveRole(role="bucket", model=model, plan_epoch=epoch, plan_hash=plan.hash, bucket=number)
            for number in numbers
        ]

        def records_of(number: int, traffic: Traffic) -> BucketRecords:
            what = {"dtype": dtype_name(traffic.dtype), "elements": traffic.elements, **self._common}
            return BucketRecords(timer_flags, purposes[number], traffic.op, index=number, **what)

        self.buckets = [records_of(number, plan.reduced(number)) for number in numbers]
        self.gathers = [
            None if (traffic := plan.gathered(number)) is None else records_of(number, traffic) for number in numbers
        ]
        """Records of the all-gather of each bucket's parameters; None if there is none."""
        self.gradient_ready = [
            pack_body(
                Kind.GRADIENT_READY,
                flags=timer_flags,
                index=index,
                dtype=dtype_name(parameter.dtype),
                elements=parameter.elements,
                **self._common,
            )
            for index, parameter in enumerate(plan.parameters)
        ]


class BucketRecords:
    """Packed records of one bucket, or of the buffers, which are broadcast like one."""

    def __init__(self, timer_flags: Flag, purpose: CollectiveRole, op: str = "all_reduce", **what: Any) -> None:
        self.purpose = purpose
        self.segments: dict[Segment, tuple[CollectiveRole, bytes]] = {}
        """Rounds of its sum seen so far: the purpose of their messages, and their records."""
        self._flags = timer_flags
        self.ready = pack_body(Kind.BUCKET_READY, flags=timer_flags, **what)
        self.copy_in = pack_body(Kind.COPY_IN, flags=timer_flags, **what)
        self.copy_out = pack_body(Kind.COPY_OUT, flags=timer_flags, **what)
        self.collective = pack_body(Kind.COLLECTIVE, op=op, flags=timer_flags, **what)
        bounds = timer_flags | Flag.START_IS_LOWER_BOUND | Flag.END_IS_UPPER_BOUND
        self.collective_bounds = pack_body(Kind.COLLECTIVE, op=op, flags=bounds, **what)
        self._timer_flags, self._fields = timer_flags, {"op": op, **what}
        self._by_operation: dict[str, BucketRecords] = {}
        self._launch = {NO_CALL_SITE: pack_body(Kind.LAUNCH, **self._fields)}

    def for_operation(self, op: str, elements: int | None = None) -> BucketRecords:
        """Return the records of one of several operations that this bucket's sum consists of; packed once.

        Args:
            elements: number of elements of its buffer; None uses that of the bucket.
        """
        if op not in self._by_operation:
            what = self._fields | {"op": op} | ({} if elements is None else {"elements": elements})
            self._by_operation[op] = BucketRecords(self._timer_flags, self.purpose, **what)
        return self._by_operation[op]

    def launch(self, call_site: int) -> bytes:
        """Return the launch record for a line of user code; packed once per line."""
        body = self._launch.get(call_site)
        if body is None:
            body = self._launch[call_site] = pack_body(Kind.LAUNCH, call_site=call_site, **self._fields)
        return body

    def segment(self, number: int) -> bytes:
        """Return the record of a round of the sum, by the number of its line in ``segments.jsonl``."""
        known = {name: self._fields[name] for name in ("model", "plan_epoch", "plan_hash")}
        return pack_body(Kind.SEGMENT, flags=self._flags, index=number, **known)


def make_buffer_records(timer_flags: Flag, model: int, elements: int, dtype: str) -> BucketRecords:
    """Return the records of a broadcast of buffers."""
    purpose = CollectiveRole(role="buffers", model=model)
    return BucketRecords(
        timer_flags, purpose, op="broadcast", index=NO_INDEX, model=model, elements=elements, dtype=dtype
    )


def make_bitmap_records(timer_flags: Flag, model: int, elements: int, dtype: str) -> BucketRecords:
    """Return the records of the all-reduce of the bitmap of used parameters."""
    purpose = CollectiveRole(role="bitmap", model=model)
    return BucketRecords(timer_flags, purpose, index=NO_INDEX, model=model, elements=elements, dtype=dtype)


ENTER_RECORDS: Final = tuple(pack_body(Kind.PHASE_BEGIN, index=phase) for phase in Phase)
"""Records of the start of each phase, indexed by phase."""


def make_phase_records(timer_flags: Flag, *, no_sync: bool) -> tuple[bytes, ...]:
    """Return the records of the end of each phase, indexed by phase, for a pass with or without ``no_sync()``."""
    flags = timer_flags | (Flag.NO_SYNC if no_sync else Flag.NONE)
    return tuple(pack_body(Kind.PHASE, index=phase, flags=flags) for phase in Phase)
