"""Settings of DDP that a training tries in place of its script's own: what ``overlapscope tune`` asks of it.

The environment carries them, so the script stays as it is. None of them changes what a training computes, but for
compression, which rounds the gradients that are sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.json_files import from_json, to_json

TRIAL_VARIABLE: Final = "OVERLAPSCOPE_TRIAL"
"""A ``Trial`` as JSON. Not set: the script's own settings."""

Compression = Literal["", "bf16", "fp16"]

SIZE_ARGUMENTS: Final = ("bucket_cap_mb", "bucket_cap_mb_list")
"""Arguments of DDP that set the sizes of buckets; torch 2.13 has the second."""
VIEWS_ARGUMENT: Final = "gradient_as_bucket_view"


@dataclass(frozen=True, kw_only=True)
class DDPSetting:
    """What is set in place of the script's own arguments; nothing by default."""

    caps_mb: tuple[float, ...] | None = None
    """``bucket_cap_mb``, or ``bucket_cap_mb_list`` if there are several; empty for DDP's default."""
    bucket_views: bool = False
    """True for ``gradient_as_bucket_view=True``."""
    compression: Compression = ""
    """Type that gradients are sent as, by a communication hook."""

    def change(self, arguments: dict[str, Any]) -> None:
        """Replace the arguments that are given to DDP; others are left as they are."""
        if self.caps_mb is not None:
            for name in SIZE_ARGUMENTS:
                arguments.pop(name, None)
            if self.caps_mb:
                name = SIZE_ARGUMENTS[len(self.caps_mb) > 1]
                arguments[name] = list(self.caps_mb) if len(self.caps_mb) > 1 else self.caps_mb[0]
        if self.bucket_views:
            arguments[VIEWS_ARGUMENT] = True


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one training is asked to do otherwise than its script."""

    setting: DDPSetting
    calibrates: bool = False
    """True to time all-reduces of many sizes once, before the first step of a model of torch's own DDP."""

    def to_environment(self) -> dict[str, str]:
        """Return the variable that asks a training for this."""
        return {TRIAL_VARIABLE: to_json(self)}


def read_trial(environment: Mapping[str, str] = os.environ) -> Trial | None:
    """Return what the environment asks for; None if nothing.

    Raises:
        OverlapScopeError: it can't be read.
    """
    text = environment.get(TRIAL_VARIABLE)
    if not text:
        return None
    try:
        return from_json(Trial, text)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise OverlapScopeError(f"{TRIAL_VARIABLE}: can't be read; 'overlapscope tune' sets it") from None
