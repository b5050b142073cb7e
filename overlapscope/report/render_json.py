"""Render a report as JSON, for programs: unknown values are null; ``docs/json.md`` documents the keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from overlapscope.report.report import Report


def render_json(report: Report) -> str:
    """Render everything that the report knows as one JSON object.

    NaN and infinite floats become null, a dataclass an object with its fields, a DataFrame a list of objects.
    """
    return json.dumps(to_plain(report.content), indent=1, allow_nan=False)


def to_plain(value: Any) -> Any:
    """Return a value as dictionaries, lists, text, numbers and None, as ``render_json`` does."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if hasattr(value, "to_dict"):  # a DataFrame; 'diagnose' needs no pandas
        return to_plain(value.to_dict("records"))
    return None if isinstance(value, float) and not math.isfinite(value) else value
