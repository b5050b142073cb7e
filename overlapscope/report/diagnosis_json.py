"""The JSON of ``overlapscope diagnose``: its keys with their types, and the JSON Schema that is made from these."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Final, Literal, TypedDict, get_args, get_origin

from overlapscope.diagnosis.evidence import (
    CallSite,
    Divergence,
    Entry,
    Failure,
    Liveness,
    RecordingGap,
    UnreadyParameter,
)
from overlapscope.diagnosis.kinds import KINDS, Restart
from overlapscope.diagnosis.verdict import Certainty, FaultKind, Verdict
from overlapscope.errors import Problem
from overlapscope.machine.evidence import MachineState

SCHEMA_VERSION: Final = 1
"""Grows when a key changes its meaning or goes."""


class AttemptJson(TypedDict):
    """An attempt of a restarted job."""

    number: int
    path: str
    kind: FaultKind
    sentence: str


class RankJson(TypedDict):
    """A rank: where it was, and how it ended."""

    rank: int
    host: str
    pid: int
    liveness: Liveness
    step: int | None
    phase: str | None
    bucket: int | None
    call_site: CallSite | None
    failure: Failure | None
    unready: tuple[UnreadyParameter, ...]
    memory_bytes: int | None
    memory_limit_bytes: int | None
    idle_ns: int | None
    machine: MachineState


class GroupJson(TypedDict):
    """A process group: how far its ranks have come."""

    name: str
    description: str
    ranks: tuple[int, ...]
    latest: dict[int, int]
    first_divergence: int | None
    divergence: Divergence | None


class DiagnosisJson(TypedDict):
    """The whole object."""

    schema: int
    path: str
    attempts: list[AttemptJson]
    verdict: dict[str, Any]
    """As ``Verdict.as_dict`` returns it, with what ``_HANDLING`` has."""
    expected_ranks: tuple[int, ...] | None
    ranks: list[RankJson]
    groups: list[GroupJson]
    gaps: tuple[RecordingGap, ...]
    problems: tuple[Problem, ...]


_HANDLING: Final[dict[str, Any]] = {
    "code": Literal[tuple(handling.code for handling in KINDS.values())],
    "certainty": Certainty,
    "restart": Restart,
    "hosts": list[str],
    "may_be_host": bool,
}
"""Keys of a verdict that are not fields of it, with their types."""


def verdict_json(verdict: Verdict, hosts: Mapping[int, str]) -> dict[str, Any]:
    """Return a verdict with what a program decides by.

    Args:
        hosts: host by rank, as far as known.
    """
    code, restart, may_be_host = KINDS[verdict.kind]
    named = {hosts[rank] for rank in verdict.named if hosts.get(rank)}
    return verdict.as_dict() | {
        "code": code,
        "restart": restart,
        "hosts": sorted(named),
        "may_be_host": may_be_host and bool(named),
    }


def build_schema() -> dict[str, Any]:
    """Build the JSON Schema of ``overlapscope diagnose --json``.

    New keys may come at any time, so that objects may have more keys than it names.
    """
    definitions: dict[str, Any] = {}
    top = _object(typing.get_type_hints(DiagnosisJson), definitions)
    top["properties"]["schema"] = {"const": SCHEMA_VERSION}
    entry = _object(typing.get_type_hints(Entry) | {"step": int | None}, definitions)  # -1 becomes null
    definitions["Entry"] = entry
    top["properties"]["verdict"] = _object(typing.get_type_hints(Verdict) | _HANDLING, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "overlapscope diagnose --json",
        **top,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(hints: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    properties = {name: _schema_of(hint, definitions) for name, hint in hints.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


_SIMPLE: Final = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def _schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; that of a class goes into ``definitions``, under its name."""
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema_of(one, definitions) for one in arguments]}
    if origin in (tuple, list):
        return {"type": "array", "items": _schema_of(arguments[0], definitions)}
    if origin is dict:
        if arguments[0] is str:
            return {"type": "object"}
        # Keys of JSON are text: numbers of ranks.
        values = _schema_of(arguments[1], definitions)
        return {"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": values}
    if not (is_dataclass(hint) or typing.is_typeddict(hint)):
        raise TypeError(f"{hint} has no JSON Schema")
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}
        definitions[hint.__name__] = _object(typing.get_type_hints(hint), definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}
