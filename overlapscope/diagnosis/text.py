"""Text of ranks, collectives, positions and durations in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from overlapscope.diagnosis.evidence import (
    JOINING,
    STARTING,
    UNKNOWN_STEP,
    CallSite,
    Entry,
    Failure,
    GroupOrder,
    RankEvidence,
    RankPosition,
)
from overlapscope.text import capitalize, rank_list
from overlapscope.trace.collective_log import Signature
from overlapscope.trace.schema import NO_BUCKET

_NCCL_ERROR: Final = re.compile(r"^(nccl\w+): (.*?) *\nLast error: *\n(.*?) *$", re.MULTILINE)
"""As torch writes it (NCCLUtils.cpp), below a line with its version and where in torch it was noticed."""
_MOST_NAMES: Final = 3
_MAX_POSITIONS: Final = 4
_PHASES: Final = {
    "forward": "in forward",
    "backward": "in backward",
    "finalize": "waiting for buckets",
    "optimizer": "in the optimizer",
}

_BEFORE_STEPS: Final = {STARTING: "before init_process_group", JOINING: "in init_process_group"}

_ROLES: Final = {
    "construction": "DDP's check at construction",
    "plan": "the bucket plan",
    "bitmap": "the bitmap of used parameters",
    "join": "join()",
}

_KIND_LABELS: Final = {"waits for data": "Stuck in the data loader"}
"""Labels of kinds of verdicts whose names could be taken for something milder."""

_NO_DESCRIPTIONS: Final = ("", "undefined")
"""Descriptions that torch gives to a group without one."""


def format_kind(kind: str) -> str:
    """Format a kind of verdict as a label: ``Replicas differ``."""
    return _KIND_LABELS.get(kind, capitalize(kind))


def join_and(texts: Sequence[str]) -> str:
    """Join texts as in a sentence: ``a, b and c``."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def first_few(names: Sequence[str]) -> str:
    """Join the first few of many names."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def plural(subjects: Iterable[object], one: str, several: str) -> str:
    """Return the singular or plural form of a verb for some ranks or names: ``has`` or ``have``."""
    return one if len(set(subjects)) == 1 else several


def collective_text(entry: Entry, *, with_names: bool = True) -> str:
    """Format a collective: ``all_reduce(sum) of bucket 2, 1000 float32 (head.weight, head.bias)``."""
    signature = entry.signature
    text = signature.op + (f"({signature.reduce_op})" if signature.reduce_op else "")
    if signature.strategy and signature.role == "bucket":
        text += f" by {signature.strategy}"
    what = []
    if signature.bucket != NO_BUCKET:
        what.append(f"bucket {signature.bucket}" + (f" of model {signature.model}" if signature.model else ""))
    elif signature.role not in ("user", ""):
        what.append(_ROLES.get(signature.role, f"DDP's {signature.role}"))
    if signature.round:
        what.append(format_round(signature))
    if signature.elements:
        what.append(f"{signature.elements:,} {signature.dtype}".strip())
    if what:
        text += " of " + ", ".join(what)
    text += _peer_text(signature)
    return text + (f" ({first_few(signature.names)})" if signature.names and with_names else "")


def _peer_text(signature: Signature) -> str:
    """Format the other side: `` to rank 3 with tag 7``; empty if there is none."""
    direction = {"send": "to", "reduce": "to", "gather": "to"}.get(signature.op, "from")
    peer = "" if signature.peer is None else f" {direction} rank {signature.peer}"
    if signature.op == "recv" and not peer:
        peer = " from any rank"
    return f"{peer} with tag {signature.tag}" if signature.tag and signature.role == "user" else peer


def format_device_progress(entry: Entry) -> str:
    """Format the progress of the rank's device in a collective that has not ended; empty if unknown."""
    if entry.state == "completed" or entry.is_reached is None:
        return ""
    return "device in it" if entry.is_reached else "device not there"


def format_round(signature: Signature) -> str:
    """Format a round: ``round 2 of 3 (reduce-scatter)``; the phase alone if ranks number rounds differently."""
    if signature.rounds > 1:
        return f"round {signature.round} of {signature.rounds} ({signature.phase})"
    return signature.phase or f"round {signature.round}"


def exception_text(failure: Failure) -> str:
    """Format an exception: its type, and the line of its message that says most."""
    line = main_line(failure.message)
    return f"{failure.type}: {line}" if line else failure.type


def main_line(message: str) -> str:
    """Return the line of an exception's message that says most: of NCCL's, what it calls its last error."""
    if found := _NCCL_ERROR.search(message):
        return f"{found[1]}: {found[3] or found[2]}"
    return message.strip().partition("\n")[0]


def at_line(site: CallSite | None) -> str:
    """Format a call site: `` at_line train.py:42 (main)``, or an empty text if the line is unknown."""
    return f" at {site}" if site else ""


def group_text(group: GroupOrder) -> str:
    """Format a group: ``the default group``, ``group 'pipeline' of ranks 0-3``."""
    if is_recreated(group):
        return f"the default group{group.name[group.name.index(' ') :]}"
    if group.name in ("default", "0") or group.description in ("default", "default_pg"):
        return "the default group"
    name = group.name if group.description in _NO_DESCRIPTIONS else group.description
    return f"group '{name}' of {rank_list(group.ranks)}" if group.ranks else f"group '{name}'"


def is_recreated(group: GroupOrder) -> bool:
    """Return True for a later default group of the same process, see ``Collectives``."""
    return group.name.startswith(("default (", "0 ("))


def in_step(where: Entry | RankPosition) -> str:
    """Format the step: `` in step 12``, `` after the update of step 12``, or an empty text if steps are not counted."""
    if isinstance(where, RankPosition) and where.phase in _BEFORE_STEPS:
        return f" {_BEFORE_STEPS[where.phase]}"
    if where.step == UNKNOWN_STEP or (isinstance(where, RankPosition) and _has_no_steps(where)):
        return ""
    return f" in step {where.step}" if where.loop_step == where.step else f" after the update of step {where.loop_step}"


def loop_step(where: Entry | RankPosition) -> int | None:
    """Return the iteration of the user's loop, or None if steps are not counted."""
    return None if where.step == UNKNOWN_STEP else where.loop_step


def format_recorded_until(one: RankEvidence) -> str:
    """Format until when a rank is known whose recording ended before it did."""
    return f"not recorded since step {one.position.step}" if one.position else "not recorded"


def format_position(position: RankPosition) -> str:
    """Format a position: ``in backward of step 12, before bucket 2, at_line train.py:42 (main)``."""
    if position.step == UNKNOWN_STEP:
        return f"last seen{at_line(position.call_site)}" if position.call_site else ""
    if position.phase in _BEFORE_STEPS:
        return f"{_BEFORE_STEPS[position.phase]}{at_line(position.call_site)}"
    if _has_no_steps(position) and position.call_site:
        return f"at {position.call_site}"
    if position.is_after_update or position.phase in ("loop", "evaluation"):
        text = _between_steps(position)
    else:
        phase = _PHASES.get(position.phase or "")
        text = f"in step {position.step}" if phase is None else f"{phase} of step {position.step}"
    if position.bucket is not None and position.phase in ("backward", "finalize"):
        text += f", before bucket {position.bucket}"
    return text + (f",{at_line(position.call_site)}" if position.call_site else "")


def _has_no_steps(position: RankPosition) -> bool:
    """Return True if no model or optimizer has indicated by now that the script is in a step."""
    return position.step == 0 and position.phase is None and not position.is_after_update


def _between_steps(position: RankPosition) -> str:
    step, has_begun_next_iteration = position.step, position.has_begun_next_iteration
    if not position.is_after_update and step > 0:
        where = f"after the backward of step {step}"
    elif has_begun_next_iteration or step == 0:
        where = f"before the forward of step {step}"
    else:
        where = (
            f"between steps {step - 1} and {step}"
            if has_begun_next_iteration is None
            else f"after the update of step {step - 1}"
        )
    return f"in an evaluation {where}" if position.phase == "evaluation" else where


def format_positions(standings: Mapping[int, RankPosition]) -> str:
    """Format positions: ``, in forward of step 12`` if all are the same; else each position with its ranks."""
    ranks_at: dict[str, list[int]] = {}
    for rank, position in standings.items():
        if text := format_position(position):
            ranks_at.setdefault(text, []).append(rank)
    if len(ranks_at) == 1:
        return f", {next(iter(ranks_at))}"
    shown = [f"{rank_list(ranks)} {text}" for text, ranks in list(ranks_at.items())[:_MAX_POSITIONS]]
    rest = [f"{len(ranks_at) - _MAX_POSITIONS} more elsewhere"] if len(ranks_at) > _MAX_POSITIONS else []
    return (": " + "; ".join([*shown, *rest])) if shown else ""


def truncate_words(text: str, most: int) -> str:
    """Truncate a text at a word boundary."""
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " …"


def format_seconds(ns: int) -> str:
    """Format a duration: ``1.5 s``, ``12 s``."""
    return f"{ns / 1e9:.1f} s" if ns < 10e9 else f"{ns / 1e9:.0f} s"
