"""JSON for programs: unknown values are null."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(content: Any) -> str:
    """JSON in which NaN and infinite floats are null."""
    return json.dumps(_without_nan(content), indent=1, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
