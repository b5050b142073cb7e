"""What was trained, in a few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

USUAL_STRATEGY: Final = "overlapped"
FULLY_SHARD: Final = "fully_shard"
"""What models that torch's FSDP2 shards are recorded with."""


def describe_models(run: Mapping[str, Any]) -> str:
    """The classes of the wrapped modules, each once: ``Generator, Discriminator`` or ``Sequential ×13``.

    Args:
        run: the content of ``run.json``.

    Returns:
        Empty if none is known.
    """
    classes = Counter(str(model.get("class", "?")) for model in run.get("models") or ())
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in classes.items())


def describe_strategies(run: Mapping[str, Any]) -> str:
    """How gradients are reduced, if not as stock's DDP does it: ``ring``, ``decoupled with deferred updates``.

    Args:
        run: the content of ``run.json``.
    """
    given = [
        str((model.get("ddp_arguments") or {}).get("strategy", USUAL_STRATEGY))
        + (" with deferred updates" if model.get("updates") == "deferred" else "")
        for model in run.get("models") or ()
    ]
    return ", ".join(dict.fromkeys(strategy for strategy in given if strategy != USUAL_STRATEGY))
