"""Text of ranks, collectives, positions and durations in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from overlapscope.diagnosis.evidence import JOINING, UNKNOWN_STEP, CallSite, Entry, GroupOrder, RankEvidence, Standing
from overlapscope.trace.signature import NO_BUCKET, Signature

_MOST_NAMES: Final = 3
_MOST_PLACES: Final = 4
_PHASES: Final = {
    "forward": "in forward",
    "backward": "in backward",
    "finalise": "waiting for buckets",
    "optimizer": "in the optimizer",
}

_ROLES: Final = {
    "construction": "DDP's check at construction",
    "plan": "the bucket plan",
    "bitmap": "the bitmap of used parameters",
}

_NO_DESCRIPTIONS: Final = ("", "undefined")
"""Descriptions that torch gives to a group without one."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks: ``rank 1``, ``ranks 0-5 and 7``."""
    numbers = sorted(set(ranks))
    return ("rank " if len(numbers) == 1 else "ranks ") + joined(ranges(numbers))


def ranges(numbers: Sequence[int]) -> list[str]:
    """Format sorted numbers, with three or more in a row as a range.

    Example: 0, 1, 2, 3, 5, 6 give ``0-3``, ``5`` and ``6``.
    """
    texts: list[str] = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            continue
        run = numbers[start:end]
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
        start = end
    return texts


def joined(texts: Sequence[str]) -> str:
    """Join texts as in a sentence: ``a, b and c``."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def some(names: Sequence[str]) -> str:
    """Join the first few of many names."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def verb(ranks: Iterable[int], one: str, several: str) -> str:
    """Return the singular or plural form of a verb for some ranks: ``has`` or ``have``."""
    return one if len(set(ranks)) == 1 else several


def capitalised(sentence: str) -> str:
    """Capitalize the first letter only."""
    return sentence[:1].upper() + sentence[1:]


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
        what.append(round_text(signature))
    if signature.elements:
        what.append(f"{signature.elements:,} {signature.dtype}".strip())
    if what:
        text += " of " + ", ".join(what)
    if signature.peer is not None:
        direction = {"send": "to", "reduce": "to", "gather": "to"}.get(signature.op, "from")
        text += f" {direction} rank {signature.peer}"
    return text + (f" ({some(signature.names)})" if signature.names and with_names else "")


def device_text(entry: Entry) -> str:
    """Format the progress of the rank's device in a collective that has not ended; empty if unknown."""
    if entry.state == "completed" or entry.is_reached is None:
        return ""
    return "device in it" if entry.is_reached else "device not there"


def round_text(signature: Signature) -> str:
    """Format a round: ``round 2 of 3 (reduce-scatter)``; the phase alone if ranks number rounds differently."""
    if signature.rounds > 1:
        return f"round {signature.round} of {signature.rounds} ({signature.phase})"
    return signature.phase or f"round {signature.round}"


def at(site: CallSite | None) -> str:
    """Format a call site: `` at train.py:42 (main)``, or an empty text if the line is unknown."""
    return f" at {site}" if site else ""


def group_text(group: GroupOrder) -> str:
    """Format a group: ``the default group``, ``group 'pipeline' of ranks 0-3``."""
    if is_made_again(group):
        return f"the default group{group.name[group.name.index(' ') :]}"
    if group.name in ("default", "0") or group.description in ("default", "default_pg"):
        return "the default group"
    name = group.name if group.description in _NO_DESCRIPTIONS else group.description
    return f"group '{name}' of {ranks_text(group.ranks)}"


def is_made_again(group: GroupOrder) -> bool:
    """Return True for a later default group of the same process, see ``Collectives``."""
    return group.name.startswith(("default (", "0 ("))


def in_step(where: Entry | Standing) -> str:
    """Format the step: `` in step 12``, `` after the update of step 12``, or an empty text if steps are not counted."""
    if where.step == UNKNOWN_STEP or (isinstance(where, Standing) and _has_no_steps(where)):
        return ""
    return f" in step {where.step}" if where.loop_step == where.step else f" after the update of step {where.loop_step}"


def loop_step(where: Entry | Standing) -> int | None:
    """Return the iteration of the user's loop, or None if steps are not counted."""
    return None if where.step == UNKNOWN_STEP else where.loop_step


def unrecorded_text(one: RankEvidence) -> str:
    """Format until when a rank is known whose recording ended before it did."""
    return f"not recorded since step {one.standing.step}" if one.standing else "not recorded"


def standing_text(standing: Standing) -> str:
    """Format a position: ``in backward of step 12, before bucket 2, at train.py:42 (main)``."""
    if standing.step == UNKNOWN_STEP:
        return f"last seen{at(standing.call_site)}" if standing.call_site else ""
    if standing.phase == JOINING:
        return f"in init_process_group{at(standing.call_site)}"
    if _has_no_steps(standing) and standing.call_site:
        return f"at {standing.call_site}"
    if standing.is_after_update or standing.phase in ("loop", "evaluation"):
        text = _between_steps(standing)
    else:
        phase = _PHASES.get(standing.phase or "")
        text = f"in step {standing.step}" if phase is None else f"{phase} of step {standing.step}"
    if standing.bucket is not None and standing.phase in ("backward", "finalise"):
        text += f", before bucket {standing.bucket}"
    return text + (f",{at(standing.call_site)}" if standing.call_site else "")


def _has_no_steps(standing: Standing) -> bool:
    """Return True if no model or optimizer has indicated by now that the script is in a step."""
    return standing.step == 0 and standing.phase is None and not standing.is_after_update


def _between_steps(standing: Standing) -> str:
    step, has_begun_next = standing.step, standing.has_begun_next
    if not standing.is_after_update and step > 0:
        where = f"after the backward of step {step}"
    elif has_begun_next or step == 0:
        where = f"before the forward of step {step}"
    else:
        where = (
            f"between steps {step - 1} and {step}" if has_begun_next is None else f"after the update of step {step - 1}"
        )
    return f"in an evaluation {where}" if standing.phase == "evaluation" else where


def standings_text(standings: Mapping[int, Standing]) -> str:
    """Format positions: ``, in forward of step 12`` if all are the same; else each position with its ranks."""
    ranks_at: dict[str, list[int]] = {}
    for rank, standing in standings.items():
        if text := standing_text(standing):
            ranks_at.setdefault(text, []).append(rank)
    if len(ranks_at) == 1:
        return f", {next(iter(ranks_at))}"
    shown = [f"{ranks_text(ranks)} {text}" for text, ranks in list(ranks_at.items())[:_MOST_PLACES]]
    rest = [f"{len(ranks_at) - _MOST_PLACES} more elsewhere"] if len(ranks_at) > _MOST_PLACES else []
    return (": " + "; ".join([*shown, *rest])) if shown else ""


def shortened(text: str, most: int) -> str:
    """Truncate a text at a word boundary."""
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " …"


def seconds_text(ns: int) -> str:
    """Format a duration: ``1.5 s``, ``12 s``."""
    return f"{ns / 1e9:.1f} s" if ns < 10e9 else f"{ns / 1e9:.0f} s"
