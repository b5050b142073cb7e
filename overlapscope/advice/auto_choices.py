"""Sentences on what ``bucket_cap_mb="auto"`` decided while a job was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any


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
            sentences += [f'{prefix}bucket_cap_mb="auto": {said}.' for said in _of_model(model["auto"])]
    return sentences


def _of_model(auto: Mapping[str, Any]) -> Iterator[str]:
    for decision in auto["decisions"]:
        yield f"from step {decision['step']} on, {decision['why']}"
    if auto["state"] == "impossible":
        yield f"nothing was chosen: {auto['why']}"
    elif not auto["decisions"]:
        yield "nothing was chosen yet: that takes about 60 steps, outside join()"
