"""Sentences about what the machine said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from overlapscope.machine.conditions import KIND_OF, Condition
from overlapscope.machine.evidence import MachineEvidence
from overlapscope.text import capitalize, format_bytes, format_share, rank_list
from overlapscope.trace.machine_facts import CONTROL_GROUP, GPU, HOST, INFINIBAND, INTERFACE, PROCESS, source_kind

_WHOSE: Final = {
    GPU: "GPU",
    CONTROL_GROUP: "control group",
    HOST: "host",
    PROCESS: "main thread",
    INTERFACE: "interface",
    INFINIBAND: "port",
}
CONDITION_LABELS: Final = {
    "thermal limit": "GPU clock held down by heat",
    "hardware slowdown": "GPU clock held down by hardware",
    "power limit": "GPU clock held down by the power cap",
    "narrow PCIe": "PCIe link narrower than it can be",
    "NVLink down": "NVLinks down",
    "NVLink errors": "NVLink errors",
    "PCIe replays": "PCIe packets sent again",
    "corrected memory errors": "GPU memory errors, corrected",
    "uncorrected memory errors": "GPU memory errors, uncorrected",
    "Xid": "Errors of the GPU driver (Xid)",
    "GPU lost": "GPU no longer answers",
    "CPU quota": "CPU quota used up",
    "near the memory limit": "Memory at 90 % of the limit or more",
    "memory limit": "Memory limit reached",
    "killed for memory": "Processes killed for memory",
    "CPU pressure": "Some task of the control group waits for a core",
    "memory pressure": "Some task of the control group waits for memory",
    "I/O pressure": "Some task of the control group waits for I/O",
    "host CPU pressure": "Some task of the host waits for a core",
    "host memory pressure": "Some task of the host waits for memory",
    "host I/O pressure": "Some task of the host waits for I/O",
    "swapping": "Pages moved to swap or back",
    "no core": "Main thread ready, without a core",
    "interface errors": "Packets with errors",
    "interface drops": "Packets dropped",
    "interface down": "Link went up or down",
    "InfiniBand errors": "InfiniBand errors",
    "InfiniBand discards": "InfiniBand packets discarded",
    "InfiniBand retransmits": "InfiniBand packets sent again",
    "InfiniBand down": "InfiniBand link went down",
}
"""Labels of conditions, for tables."""

_XIDS: Final = {
    13: "an exception in a kernel",
    31: "a page fault of the program",
    43: "stopped after an error of the program",
    45: "ended after an error before",
    48: "a memory error that can't be corrected",
    63: "memory is being replaced",
    64: "memory could not be replaced",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many memory errors",
    94: "a memory error, contained",
    95: "a memory error, not contained",
    119: "its firmware does not answer",
    120: "an error of its firmware",
}
"""Meaning of the driver's error numbers that jobs see most."""


def tell(evidence: MachineEvidence, when: str) -> str:
    """Return a sentence: whose source, what, and how it was on other ranks or at other times.

    Args:
        when: the time in question, such as ``of these steps``.
    """
    condition = evidence.condition
    return f"{capitalize(_name_owner(evidence))} {_say(condition, when)}{_compare(evidence)}."


def _name_owner(evidence: MachineEvidence) -> str:
    condition, ranks = evidence.condition, evidence.ranks
    kind = source_kind(condition.source)
    named = kind in (INTERFACE, INFINIBAND)
    what = f"{_WHOSE[kind]} {condition.label}" if named else _WHOSE[kind]
    return f"the {what} of {rank_list(ranks)}" if len(ranks) > 1 else f"{rank_list(ranks)}'s {what}"


def _say(condition: Condition, when: str) -> str:
    """Return what a condition was, as the rest of a sentence about its source."""
    kind, values = condition.kind, condition.values
    share, number = format_share(condition.amount), max(1, round(condition.amount))
    count, is_one = f"{number:,}", number == 1
    if kind in _HELD_DOWN:
        clock = _format_clock(values)
        return f"{clock} {_HELD_DOWN[kind].format(**_format_values(values))} in {share} {when}"
    if kind == "Xid":
        xid = int(values.get("xid", 0))
        meaning = f" ({_XIDS[xid]})" if xid in _XIDS else ""
        return f"reported Xid {xid}{meaning}" + ("" if is_one else f", the latest of {count} errors")
    levels = _format_values(values)
    limit = levels["memory_limit_bytes"] and f" of{levels['memory_limit_bytes']}"
    plurals = {
        "s": "" if is_one else "s",
        "es": "" if is_one else "es",
        "times": "once" if is_one else f"{count} times",
    }
    return _SAYS[kind].format(share=share, count=count, when=when, limit=limit, **plurals, **levels)


_HELD_DOWN: Final = {
    "thermal limit": "for thermal reasons{temperature_c}",
    "hardware slowdown": "because its hardware slowed it down",
    "power limit": "because of its power cap{power_cap_w}",
}
_SAYS: Final = {
    "narrow PCIe": "used{pcie_width} of{max_pcie_width} PCIe lanes in {share} {when}",
    "NVLink down": "had{nvlinks_active} of{nvlinks} NVLinks in {share} {when}",
    "NVLink errors": "had {count} NVLink error{s}",
    "PCIe replays": "sent {count} PCIe packet{s} again",
    "corrected memory errors": "corrected {count} memory error{s}",
    "uncorrected memory errors": "had {count} memory error{s} that can't be corrected",
    "GPU lost": "no longer answers",
    "CPU quota": "used up its CPU quota{cpu_quota} in {share} of the scheduling periods {when}",
    "near the memory limit": "held{memory_bytes} of{memory_limit_bytes} of memory in {share} {when}",
    "memory limit": "reached its memory limit{limit} {times}",
    "killed for memory": "had {count} process{es} killed by the kernel for memory",
    "CPU pressure": "had tasks that waited for a core in {share} {when}",
    "memory pressure": "had tasks that waited for memory in {share} {when}",
    "I/O pressure": "had tasks that waited for I/O in {share} {when}",
    "host CPU pressure": "had tasks that waited for a core in {share} {when}",
    "host memory pressure": "had tasks that waited for memory in {share} {when}",
    "host I/O pressure": "had tasks that waited for I/O in {share} {when}",
    "swapping": "moved {count} page{s} to swap or back",
    "no core": "was ready to run and had no core in {share} {when}",
    "interface errors": "had {count} packet{s} with errors",
    "interface drops": "dropped {count} packet{s}",
    "interface down": "went up or down {times}",
    "InfiniBand errors": "had {count} error{s}",
    "InfiniBand discards": "discarded {count} packet{s}",
    "InfiniBand retransmits": "sent {count} packet{s} again",
    "InfiniBand down": "went down {times}",
}
_FORMATS: Final = {
    "temperature_c": ", at up to {:.0f} °C,",
    "power_cap_w": " of {:.0f} W",
    "cpu_quota": " of {:g} cores",
}


def _format_values(values: dict[str, float]) -> dict[str, str]:
    """Return the levels as parts of a sentence, each after a space; empty where they are unknown."""
    found = {}
    for name in _LEVELS:
        value = values.get(name)
        if value is None:
            found[name] = ""
        elif name.endswith("_bytes"):
            found[name] = f" {format_bytes(value)}"
        else:
            found[name] = _FORMATS.get(name, " {:g}").format(value)
    return found


_LEVELS: Final = tuple(dict.fromkeys(level for kind in KIND_OF.values() for level in kind.levels))


def _format_clock(values: dict[str, float]) -> str:
    if "sm_clock_mhz" not in values:
        return "had its clock held down"
    of = f" of {values['max_sm_clock_mhz']:,.0f}" if "max_sm_clock_mhz" in values else ""
    return f"ran at {values['sm_clock_mhz']:,.0f} MHz{of}"


def _compare(evidence: MachineEvidence) -> str:
    """Return how it was on other ranks and at other times, as the end of a sentence."""
    condition, others = evidence.condition, evidence.others
    is_share = KIND_OF[condition.kind].is_share
    parts = []
    if others is not None:
        most = format_share(others) if is_share else f"{round(others):,}"
        parts.append("on other ranks none" if round(others, 2) == 0 else f"on other ranks up to {most}")
    elif evidence.shared_with:
        parts.append(f"{rank_list(evidence.shared_with)} {'shares' if len(evidence.shared_with) == 1 else 'share'} it")
    if is_share and condition.elsewhere is not None and evidence.sets_times_apart:
        is_none = round(condition.elsewhere, 2) == 0
        parts.append(f"at other times {'none' if is_none else format_share(condition.elsewhere)}")
    return f" ({', '.join(parts)})" if parts else ""


def unreadable(kind: str, facts: str, why: str, ranks: Sequence[int]) -> str:
    """Say what could not be read."""
    source = _WHOSE.get(kind, kind)
    whose = f"The {source} of {rank_list(ranks)}" if len(ranks) > 1 else f"{capitalize(rank_list(ranks))}'s {source}"
    does = "does not tell anything" if facts == "all" else f"does not tell {facts}"
    return f"{whose} {does}: {why}."


def describe_amount(condition: Condition) -> str:
    """Return how much of a condition there was, for a table."""
    if not KIND_OF[condition.kind].is_share:
        return f"{max(1, round(condition.amount)):,}"
    return f"{format_share(condition.amount)} of the {'periods' if condition.kind == 'CPU quota' else 'time'}"


def describe_levels(condition: Condition) -> str:
    """Return what else is known of a condition, for a table."""
    values = {name: text.removeprefix(" of").strip(" ,") for name, text in _format_values(condition.values).items()}
    if condition.kind in _HELD_DOWN:
        clock = _format_clock(condition.values).removeprefix("ran at ")
        return ", ".join((clock, *filter(None, (values["temperature_c"], values["power_cap_w"]))))
    return " of ".join(values[level] for level in KIND_OF[condition.kind].levels if values[level])


def describe_machine(conditions: Iterable[Condition]) -> str:
    """Return the headline: what is worth knowing of the machine."""
    first = next(iter(conditions), None)
    if first is None:
        return "The machine held nothing back."
    return f"{CONDITION_LABELS[first.kind]}: {describe_amount(first)}."
