"""Final messages of ``record`` about bucket plans: whether others were probed, if not why, and which was chosen."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from overlapscope.analysis.choices import describe_auto_choices
from overlapscope.trace.checksum import parse_json_text
from overlapscope.trace.format import RUN_FILE

_CALIBRATE_HINT: Final = "measure with 'overlapscope calibrate'"


def describe_probing(folder: Path) -> list[str]:
    """Describe in one sentence per model of the lowest rank whether plans were probed, or why there is no model."""
    models = _models(folder)
    if not models:
        return [f"no bucket plans were probed: the training has no DistributedDataParallel; {_CALIBRATE_HINT} instead"]
    sentences = dict.fromkeys(_sentence(model.get("probing")) for model in models)
    if len(sentences) == 1:
        return list(sentences)
    return [f"model {model['model']} ({model['class']}): {_sentence(model.get('probing'))}" for model in models]


def describe_choices(folder: Path) -> list[str]:
    """Describe what ``bucket_cap_mb="auto"`` chose, according to the lowest rank."""
    return describe_auto_choices({"models": _models(folder)})


def _models(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"rank_*/{RUN_FILE}"), key=lambda file: (len(file.parent.name), file.parent.name))
    for file in files:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return list(parse_json_text(file.read_bytes())["models"])
    return []


def _sentence(probing: dict[str, Any] | None) -> str:
    if probing is None:
        return (
            "no bucket plans were probed: the plan of torch's own DistributedDataParallel can't be changed; use "
            f"instrumented_ddp.DistributedDataParallel, or {_CALIBRATE_HINT}"
        )
    if probing["state"] == "impossible":
        return f"no bucket plans were probed: {probing['why']}; {_CALIBRATE_HINT} instead"
    if "steps" not in probing:
        return "no bucket plans were probed: the training has fewer than 2 steps"
    begins, ends = probing["first_step"], probing["first_step"] + probing["steps"]
    if probing["state"] == "done":
        return f"probed {probing['plans']} bucket plans in steps {begins} to {ends - 1}"
    too_few = f"{probing['plans']} plans take {ends + 1} steps, outside join(); train for longer"
    if probing["state"] == "begun":
        return f"probed bucket plans for only part of their steps: {too_few}"
    return f"no bucket plans were probed: too few steps; {too_few}"
