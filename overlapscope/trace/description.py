"""Short descriptions of a recording: its models, how their gradients are reduced, its steps, and its clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from overlapscope.text import format_ns

if TYPE_CHECKING:
    from overlapscope.trace.recording import Trace

CONFIDENTIAL: Final = "confidential"
"""Key of ``run.json`` that says that the names in a recording are pseudonyms."""
DEFAULT_STRATEGY: Final = "overlapped"
"""Strategy of stock DDP."""
FULLY_SHARD: Final = "fully_shard"
"""Strategy that models sharded by torch's FSDP2 are recorded with."""
BY_HAND: Final = "by hand"
"""Strategy of models whose gradients are reduced by the training loop's own collectives."""


def describe_models(run: Mapping[str, Any]) -> str:
    """Name the classes of the wrapped modules, each once: ``Generator, Discriminator`` or ``Sequential ×13``.

    Args:
        run: Content of ``run.json``.

    Returns:
        Empty if none is known.
    """
    classes = Counter(str(model.get("class", "?")) for model in run.get("models") or ())
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in classes.items())


def describe_strategies(run: Mapping[str, Any]) -> str:
    """Say how gradients are reduced, if not as in stock DDP: ``ring``, ``decoupled with deferred updates``.

    Args:
        run: Content of ``run.json``.
    """
    given = [
        str((model.get("ddp_arguments") or {}).get("strategy", DEFAULT_STRATEGY))
        + (" with deferred updates" if model.get("updates") == "deferred" else "")
        for model in run.get("models") or ()
    ]
    return ", ".join(dict.fromkeys(strategy for strategy in given if strategy != DEFAULT_STRATEGY))


def describe_backend(run: Mapping[str, Any]) -> str:
    """Name the backend, and say why the ends of its collectives are only bounds if they are; empty if not known.

    Args:
        run: Content of ``run.json``.
    """
    backend = str(run.get("backend") or "")
    why = run.get("ends_are_bounds")
    return f"{backend} (ends of collectives are upper bounds: {why})" if backend and why else backend


def describe_auto_choices(run: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each decision, or on why there is none.

    Args:
        run: Content of ``run.json`` of the lowest rank; other ranks don't know the reasons.
    """
    models = [model for model in run.get("models", []) if isinstance(model.get("auto"), dict)]
    sentences = []
    for model in models:
        prefix = f"model {model.get('model')} ({model.get('class')}): " if len(models) > 1 else ""
        with suppress(KeyError, TypeError):  # written by another version
            sentences += [f'{prefix}bucket_cap_mb="auto": {said}.' for said in _describe_auto(model["auto"])]
    return sentences


def _describe_auto(auto: Mapping[str, Any]) -> Iterator[str]:
    for decision in auto["decisions"]:
        yield f"from step {decision['step']} on, {decision['why']}"
    if auto["state"] == "impossible":
        yield f"nothing was chosen: {auto['why']}"
    elif not auto["decisions"]:
        yield "nothing was chosen yet: that takes about 60 steps, outside join()"


def describe_chosen_steps(trace: Trace) -> str:
    """Return a note on the range of steps, to follow their number; empty if all steps were read."""
    if trace.extent == "all":
        return ""
    return f" (only {trace.steps['step'].min()} to {trace.steps['step'].max()} were read)"


def describe_clocks(trace: Trace) -> str:
    """Say whether the ranks are on one clock, and with what error."""
    unaligned = len(trace.ranks) - len(trace.aligned_ranks)
    if unaligned:
        return f"{unaligned} of {len(trace.ranks)} ranks not aligned"
    if trace.clock_error_ns:
        return f"aligned to ±{format_ns(trace.clock_error_ns)}"
    return "one shared clock"
