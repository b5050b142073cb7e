"""Replicas of a rank as it recorded them, and the comparison of the replicas of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.rank_models import read_buckets
from overlapscope.diagnosis.replicas import ComparedReplicas, Replica, compare_model_replicas
from overlapscope.trace.folders import read_json, read_lines
from overlapscope.trace.format import REPLICAS_FILE, RUN_FILE
from overlapscope.trace.log import Problem
from overlapscope.trace.sweep_file import FingerprintPasses


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
                left_out=tuple((str(name), str(why)) for name, why in line["left_out"]),
                processor=str(line["processor"]),
                comm_hook=None if hook is None else str(hook),
                init_sync=bool(of_run.get("ddp_arguments", {}).get("init_sync", True)),
                buckets={name: bucket for (of, name), bucket in buckets.items() if of == model},
            )
        ]

    return tuple(read_lines(folder / REPLICAS_FILE, problems, replica_of))


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
