"""The order in which torch gathers, waits and reduces, for each setting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.sharded_model.model import Part, Settings, ShardedModel, merge_all, merge_units, with_prefetch
from overlapscope.sharded_model.program import build_program, find_peak_bytes
from tests.sharded_model.ticking import make_default

PARTS = tuple(Part(name=name, gather_bytes=10, reduce_bytes=10) for name in ("", "a", "b", "c"))
MODEL = ShardedModel(parts=PARTS, has_root=True)


def collectives(model: ShardedModel, settings: Settings) -> list[str]:
    """Such as ``g1``: the first inner part is gathered."""
    program = build_program(model, settings)
    return [op.kind[0] + "".join(map(str, op.unit)) for op in program if op.kind in ("gather", "reduce")]


def test_by_default_the_unit_whose_backward_comes_next_is_prefetched() -> None:
    assert collectives(MODEL, make_default(3)) == ["g0", "g1", "g2", "g3", "g3", "g2", "r3", "g1", "r2", "r1", "r0"]


def test_the_first_unit_is_reduced_last_if_its_input_needs_no_gradient() -> None:
    """As torch did in a recording of ``tests/cluster/test_fsdp_recording.py``."""
    late = (PARTS[0], replace(PARTS[1], is_late=True), PARTS[2])
    model = ShardedModel(parts=late, has_root=True)
    assert collectives(model, make_default(2)) == ["g0", "g1", "g2", "g2", "g1", "r2", "r0", "r1"]


def test_what_is_kept_after_the_forward_is_not_gathered_again() -> None:
    assert collectives(MODEL, make_default(3, reshards=False)) == ["g0", "g1", "g2", "g3", "r3", "r2", "r1", "r0"]


def test_prefetching_gathers_ahead_after_the_own_wait() -> None:
    settings = with_prefetch(make_default(3), 2)
    assert collectives(MODEL, settings) == ["g0", "g1", "g2", "g3", "g3", "g2", "g1", "r3", "r2", "r1", "r0"]
    program = build_program(MODEL, replace(settings, root_forward_prefetch=()))
    forward = [op.kind + str(op.unit[0]) for op in program if op.during == "forward" and op.kind != "free"]
    assert forward[:6] == ["gather0", "wait0", "compute0", "gather1", "wait1", "gather2"]


def test_units_of_several_parts_are_gathered_at_once() -> None:
    assert collectives(MODEL, merge_units(make_default(3), 2)) == ["g0", "g12", "g3", "g3", "g12", "r3", "r12", "r0"]
    assert collectives(MODEL, merge_all(make_default(3))) == ["g0123", "r0123"]


@pytest.mark.parametrize(
    ("settings", "units"),
    [
        (make_default(3), 3),
        (make_default(3, reshards=False), 4),
        (merge_units(make_default(3), 2), 4),
        (with_prefetch(make_default(3), 2), 4),
        (merge_all(make_default(3)), 4),
    ],
)
def test_memory_is_that_of_the_units_that_are_gathered_at_the_same_time(settings: Settings, units: int) -> None:
    assert find_peak_bytes(MODEL, build_program(MODEL, settings)) == 10 * units


def test_the_backward_of_a_unit_encloses_that_of_the_units_within_it() -> None:
    """As torch did with two layers, each of which holds two units: 1 holds 2 and 3, 4 holds 5 and 6."""
    names = ("", "a", "a.x", "a.y", "b", "b.x", "b.y")
    parents = (None, None, 1, 1, None, 4, 4)
    parts = tuple(
        Part(name=name, gather_bytes=1, reduce_bytes=1, parent=parent)
        for name, parent in zip(names, parents, strict=True)
    )
    model = ShardedModel(parts=parts, has_root=True)
    forward = ["g0", "g1", "g2", "g3", "g4", "g5", "g6"]
    backward = ["g4", "g6", "g5", "r6", "g1", "r5", "r4", "g3", "g2", "r3", "r2", "r1", "r0"]
    assert collectives(model, make_default(6)) == forward + backward
    assert collectives(model, merge_all(make_default(6))) == ["g0123456", "r0123456"]
    segments = [op.segment for op in build_program(model, merge_all(make_default(6))) if op.during == "backward"]
    assert {*range(8), 8, 11} <= {*segments}


def test_replicas_only_reduce() -> None:
    parts = tuple(replace(part, gather_bytes=0) for part in PARTS)
    model = ShardedModel(parts=parts, has_root=True)
    assert collectives(model, make_default(3, reshards=False)) == ["r3", "r2", "r1", "r0"]
