"""Conversion of dataclasses to JSON and back, for messages between ranks and for files."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, TypeVar

T = TypeVar("T")

_PRIMITIVES: Final = (int, str, float, bool)


def to_json(thing: Any) -> str:
    """Serialize a dataclass to one line."""
    return json.dumps(thing, separators=(",", ":"), default=vars)  # asdict copies everything, at several times the cost


def from_json(cls: type[T], text: str | bytes) -> T:
    """Parse the output of ``to_json``.

    Raises:
        KeyError, TypeError, ValueError: ``text`` is not a valid ``cls``.
    """
    return from_dict(cls, json.loads(text))


def from_dict(cls: type[T], plain: dict[str, Any]) -> T:
    """Rebuild a dataclass from the output of ``dataclasses.asdict`` and JSON. Unknown fields are ignored.

    Raises:
        KeyError, TypeError, ValueError: ``plain`` is not a valid ``cls``: a field is missing, or of another type.
    """
    hints = _hints_of(cls)  # type: ignore[arg-type] # classes are hashable
    return cls(**{name: _value(hints[name], value) for name, value in plain.items() if name in hints})


@cache
def _hints_of(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _value(hint: Any, value: Any) -> Any:
    if hint in _PRIMITIVES:
        return _primitive(hint, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _value(next(one for one in arguments if one is not type(None)), value)
    if origin is tuple:
        if arguments[0] in _PRIMITIVES and arguments[-1] is Ellipsis:
            return tuple(value)
        hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_value(one, item) for one, item in zip(hints, value, strict=True))
    if origin is dict:
        of_key, of_value = arguments
        return {of_key(key): _value(of_value, item) for key, item in value.items()}
    if is_dataclass(hint):
        return from_dict(hint, value)  # type: ignore[arg-type] # is_dataclass is true of instances as well
    return value


def _primitive(hint: Any, value: Any) -> Any:
    if not isinstance(value, (int, float) if hint is float else hint):
        raise TypeError(f"{value!r} is not of type {hint.__name__}")
    return value
