"""Repair of recorded model descriptions that contradict the buckets reduced: older files have no checksums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from overlapscope.diagnosis.evidence import Parameters, RankEvidence
from overlapscope.diagnosis.recorded_order import RecordedOrder
from overlapscope.trace.format import PARAMETERS_FILE
from overlapscope.trace.log import Problem
from overlapscope.trace.signature import NO_BUCKET


def repair_models(
    ranks: Mapping[int, RankEvidence], folders: Mapping[int, Path], source: RecordedOrder, problems: list[Problem]
) -> dict[int, RankEvidence]:
    """Replace a rank's parameters by the majority's where they differ although both reduced the same buckets.

    The hash of a bucket plan covers names, shapes, dtypes and order of all trained parameters, but neither frozen
    parameters nor the class. A line with a checksum is always believed.

    Args:
        folders: folder of each rank.
        source: the collectives that ranks launched.
        problems: receives the contradictions found.
    """
    majority: dict[int, Parameters] = {}
    for number in sorted({model.model for one in ranks.values() for model in one.models}):
        counts = Counter(model.parameters for one in ranks.values() for model in one.models if model.model == number)
        majority[number], most = counts.most_common(1)[0]
        if most == counts.total():
            del majority[number]  # identical on all ranks
    found = dict(ranks)
    for rank, one in ranks.items():
        for index, model in enumerate(one.models):
            same = majority.get(model.model, model.parameters)
            if same == model.parameters or model.has_checksum:
                continue
            plans = _plan_hashes(source, rank, model.model)
            if any(
                _has_parameters(other, model.model, same) and plans & _plan_hashes(source, r, model.model)
                for r, other in ranks.items()
            ):
                models = found[rank].models
                corrected = (*models[:index], replace(model, parameters=same), *models[index + 1 :])
                found[rank] = replace(found[rank], models=corrected)
                path = folders[rank] / PARAMETERS_FILE
                text = f"{path}: model {model.model} differs from other ranks', but they reduced the same buckets"
                problems.append(Problem("error", f"{text}; this file or theirs is damaged"))
    return found


def _has_parameters(one: RankEvidence, model: int, parameters: Parameters) -> bool:
    return any(other.model == model and other.parameters == parameters for other in one.models)


def _plan_hashes(source: RecordedOrder, rank: int, model: int) -> set[str]:
    """Return the hashes of the bucket plans with which a rank reduced a model."""
    signatures = source.signatures(rank).values()
    return {one.plan_hash for one in signatures if one.bucket != NO_BUCKET and one.model == model and one.plan_hash}
