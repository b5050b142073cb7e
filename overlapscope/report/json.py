"""JSON serialization of reports: unknown values are null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def json_text(content: Any) -> str:
    """Serialize to JSON: NaN and infinite floats become null, a dataclass an object with its fields."""
    return json.dumps(_plain(content), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
