"""Dataclasses from what JSON has kept of them, so that ranks can tell each other what they know."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def from_plain(cls: type[T], plain: dict[str, Any]) -> T:
    """The dataclass that ``dataclasses.asdict`` and JSON have taken apart. What it does not know is left out.

    Raises:
        KeyError, TypeError, ValueError: it is not one.
    """
    hints: dict[str, Any] = _hints_of(cls)  # type: ignore[arg-type] # classes are hashable
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type] # any dataclass
    return cls(**{name: _value(hints[name], value) for name, value in plain.items() if name in known})


@cache
def _hints_of(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if origin in (typing.Union, types.UnionType):
        return _value(next(argument for argument in arguments if argument is not type(None)), value)
    if origin is tuple:
        hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_value(one, item) for one, item in zip(hints, value, strict=True))
    if is_dataclass(hint):
        return from_plain(hint, value)  # type: ignore[arg-type] # is_dataclass is true of instances as well
    return value
