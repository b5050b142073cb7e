"""Models of a rank from its files: parameters, gradients missing in its latest backward, and replicas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from overlapscope.diagnosis.evidence import ModelParameters, RankEvidence, UnreadyParameter
from overlapscope.diagnosis.replica_drift import (
    ComparedReplicas,
    Replica,
    compare_model_replicas,
    replica_for_snapshot,
)
from overlapscope.errors import Problem
from overlapscope.trace.json_files import read_json, read_lines
from overlapscope.trace.live_files import (
    FingerprintPasses,
    find_models_with_ready_file,
    read_fingerprint_passes,
    read_is_ready,
)
from overlapscope.trace.manifest import Manifest
from overlapscope.trace.schema import (
    FROZEN_FILE,
    PARAMETERS_FILE,
    PLANS_FILE,
    REPLICAS_FILE,
    RUN_FILE,
    gradient_ready_file,
)


def read_models(folder: Path, problems: list[Problem]) -> tuple[ModelParameters, ...]:
    """Read the models that a rank passed to DistributedDataParallel, without those that its own plans contradict."""
    models = read_lines(folder / PARAMETERS_FILE, problems, lambda line: [_model(json.dumps(line))])
    planned: dict[int, set[str]] = {}
    for model, name in read_buckets(folder, []) if models else ():
        planned.setdefault(model, set()).add(name)
    own = tuple(one for one in models if planned.get(one.model, _trained(one)) == _trained(one))
    if len(own) < len(models):
        text = f"{folder / PARAMETERS_FILE}: it does not list the parameters in {PLANS_FILE}; it is left out"
        problems.append(Problem("error", text))
    return own


def _trained(model: ModelParameters) -> set[str]:
    return {name for name, _, _ in model.parameters} - {*model.frozen}


def read_unready_parameters(folder: Path, seal: Manifest, problems: list[Problem]) -> tuple[UnreadyParameter, ...]:
    """Read the parameters without a gradient where others of the same model have one.

    There are none if the backward has not begun or is complete.

    Args:
        seal: checksums of the rank's files: a gradient-ready file that does not match is ignored.
    """
    boards = {
        model: has_come
        for model in find_models_with_ready_file(folder)
        if not seal.is_damaged(gradient_ready_file(model))
        and len(set(has_come := read_is_ready(folder, model, problems))) == 2  # some, but not all
    }
    if not boards:
        return ()
    buckets = read_buckets(folder, problems)

    frozen_in, frozen = _frozen(folder, problems)

    def unready_of(line: Any) -> list[UnreadyParameter]:
        model = int(line["model"])
        return [
            UnreadyParameter(
                model=model,
                name=name,
                module=_module_of(name, line.get("modules", {})),
                bucket=buckets.get((model, name), -1),
                frozen_in=frozen_in if name in frozen.get(str(model), ()) else None,
            )
            for (name, *_), has_come in zip(line["parameters"], boards.get(model, ()), strict=False)
            if not has_come
        ]

    return tuple(read_lines(folder / PARAMETERS_FILE, problems, unready_of))


def read_buckets(folder: Path, problems: list[Problem]) -> dict[tuple[int, str], int]:
    """Return the bucket of each parameter in the latest plan, by model and name."""
    buckets: dict[tuple[int, str], int] = {}
    read_lines(folder / PLANS_FILE, problems, _bucket_collector(buckets))
    return buckets


def _frozen(folder: Path, problems: list[Problem]) -> tuple[int | None, dict[str, list[str]]]:
    """Return the step in which parameters were found frozen after they were passed to DDP, and which, by model."""
    path = folder / FROZEN_FILE
    content = read_json(path, problems) if path.exists() else {}
    step, models = content.get("step"), content.get("models")
    return (step, models) if isinstance(step, int) and isinstance(models, dict) else (None, {})


def _bucket_collector(buckets: dict[tuple[int, str], int]) -> Callable[[Any], list[None]]:
    """Return a line parser that stores the bucket of each parameter; a later plan replaces an earlier one."""

    def note(plan: Any) -> list[None]:
        for number, bucket in enumerate(plan["buckets"]):
            for parameter in bucket["parameters"]:
                buckets[int(plan["model"]), str(parameter["name"])] = number
        return []

    return note


@lru_cache(maxsize=64)
def _model(line: str) -> ModelParameters:
    """Parse the model in one line of the file; cached because the ranks of a job have the same lines."""
    content = json.loads(line)
    return ModelParameters(
        model=int(content["model"]),
        class_name=str(content["class"]),
        parameters=tuple((str(name), tuple(map(int, shape)), str(kind)) for name, shape, kind in content["parameters"]),
        frozen=tuple(map(str, content.get("frozen", ()))),
    )


def _module_of(name: str, modules: dict[str, str]) -> str:
    """Return a parameter's location in the module tree, with the class."""
    path = name.rpartition(".")[0]
    kind = modules.get(path)
    return path if kind is None else f"{path} ({kind})".strip()


def read_replicas(folder: Path, problems: list[Problem]) -> tuple[Replica, ...]:
    """Read the models of a rank of which fingerprints were taken, without the fingerprints."""
    if not (folder / REPLICAS_FILE).exists():
        return ()
    run = read_json(folder / RUN_FILE, [])
    described = {one.get("model"): one for one in run.get("models", ()) if isinstance(one, dict)}
    buckets = read_buckets(folder, [])

    def replica_of(line: Any) -> list[Replica]:
        model = int(line["model"])
        of_run = described.get(model, {})
        hook = of_run.get("comm_hook")
        return [
            Replica(
                model=model,
                key=str(line["key"]),
                class_name=str(line["class"]),
                ranks=tuple(map(int, line["ranks"])),
                tensors=tuple((str(name), str(kind)) for name, kind in line["tensors"]),
                numbers=tuple(map(int, line["numbers"])),
                left_out=tuple((str(name), str(why)) for name, why in line["left_out"]),
                processor=str(line["processor"]),
                comm_hook=None if hook is None else str(hook),
                init_sync=bool(of_run.get("ddp_arguments", {}).get("init_sync", True)),
                buckets={name: bucket for (of, name), bucket in buckets.items() if of == model},
            )
        ]

    return tuple(read_lines(folder / REPLICAS_FILE, problems, replica_of))


def read_replicas_for_snapshot(folder: Path) -> tuple[Replica, ...]:
    """Read the models of a rank with as many fingerprints as a snapshot holds."""
    return tuple(
        replica_for_snapshot(one, read_fingerprint_passes(folder, one.model, len(one.tensors)))
        for one in read_replicas(folder, [])
    )


def compare_replicas(
    ranks: Mapping[int, RankEvidence],
    table_of: Callable[[int, Replica], FingerprintPasses],
    last_of: Callable[[int, Replica], FingerprintPasses] | None = None,
) -> tuple[ComparedReplicas, ...]:
    """Compare the replicas of all models.

    Args:
        ranks: evidence about each rank.
        table_of: reads the fingerprint passes of a rank for a model; called as often as they are needed.
        last_of: reads the pass at its end, one or none; None while ranks run.
    """
    by_key: dict[str, dict[int, Replica]] = {}
    for rank, one in sorted(ranks.items()):
        for replica in one.replicas:
            if rank in replica.ranks:
                by_key.setdefault(replica.key, {})[rank] = replica

    def compared(replicas: Mapping[int, Replica]) -> ComparedReplicas | None:
        return compare_model_replicas(
            replicas,
            lambda rank: table_of(rank, replicas[rank]),
            None if last_of is None else lambda rank: last_of(rank, replicas[rank]),
        )

    found = [compared(replicas) for replicas in by_key.values()]
    return tuple(one for one in found if one is not None)
