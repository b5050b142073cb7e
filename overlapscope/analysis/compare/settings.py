"""Settings and environment that differ between two recordings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from overlapscope.trace.reader import Trace

NOT_SET: Final = "not set"
_MAX_SHOWN: Final = 160


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A setting that differs."""

    name: str
    base: str
    new: str


def compare_settings(base: Trace, new: Trace) -> tuple[SettingChange, ...]:
    """Return the settings that differ: of the job, of its DDP instances, versions and environment variables."""
    before, after = dict(_settings(base)), dict(_settings(new))
    return tuple(
        SettingChange(name=name, base=before.get(name, NOT_SET), new=after.get(name, NOT_SET))
        for name in dict.fromkeys([*before, *after])
        if before.get(name, NOT_SET) != after.get(name, NOT_SET)
    )


def explain_different_jobs(base: Trace, new: Trace) -> tuple[str, ...]:
    """Return why the two are not the same job, in sentences without a full stop; empty if they may be."""
    found = []
    sizes = [trace.run.get("world_size") for trace in (base, new)]
    if None not in sizes and sizes[0] != sizes[1]:
        found.append(f"{sizes[0]} ranks in the base, {sizes[1]} in the new one")
    models = [_parameters(trace) for trace in (base, new)]
    if all(models) and models[0] != models[1]:
        own, other = len(models[0] - models[1]), len(models[1] - models[0])
        found.append(f"models differ in parameters or their shapes ({own:,} in the base, {other:,} in the new one)")
    return tuple(found)


def _settings(trace: Trace) -> Iterator[tuple[str, str]]:
    run = trace.run
    for name in ("world_size", "backend", "timeout_s", "detail"):
        if run.get(name) is not None:
            yield name, str(run[name])
    yield "command line", _shorten(" ".join(map(str, run.get("argv") or ())))
    yield "hosts", ", ".join(sorted(set(trace.ranks["host"].astype(str))))
    yield "devices", ", ".join(sorted(set(trace.ranks["device"].astype(str))))
    for name in ("versions", "environment"):
        yield from ((str(key), str(value)) for key, value in _as_dict(run.get(name)).items())
    for model in run.get("models") or ():
        prefix = f"model {model.get('model')}: "
        yield f"{prefix}class", str(model.get("class"))
        if "comm_hook" in model:
            yield f"{prefix}comm_hook", str(model["comm_hook"])
        yield from ((prefix + str(key), str(value)) for key, value in _as_dict(model.get("ddp_arguments")).items())
    for number, of_model in trace.plans.groupby("model"):
        latest = of_model[of_model["plan_epoch"] == of_model["plan_epoch"].max()]
        sizes = latest.groupby("bucket")["bytes"].sum().tolist()
        listed = ", ".join(f"{size:,}" for size in sizes)
        yield f"model {number}: bucket plan", _shorten(f"bytes of {len(sizes)} buckets: {listed}")


def _parameters(trace: Trace) -> set[tuple[Any, ...]]:
    return set(trace.plans[["model", "name", "shape"]].itertuples(index=False, name=None))


def _as_dict(value: object) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 4]} ..."
