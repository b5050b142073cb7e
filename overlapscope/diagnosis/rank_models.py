"""The models of a rank, and which gradients have not come in its newest backward, as the reducer writes them down."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from overlapscope.diagnosis.evidence import ModelParameters, UnreadyParameter
from overlapscope.trace.folders import read_lines
from overlapscope.trace.format import PARAMETERS_FILE, PLANS_FILE, ready_file
from overlapscope.trace.log import Problem


def models_of(folder: Path, problems: list[Problem]) -> tuple[ModelParameters, ...]:
    """What a rank has given to DistributedDataParallel."""
    return tuple(read_lines(folder / PARAMETERS_FILE, problems, lambda line: [_model(json.dumps(line))]))


def unready_parameters(folder: Path, problems: list[Problem]) -> tuple[UnreadyParameter, ...]:
    """Those without a gradient where others of the same model have one.

    A backward that has not begun, or has come to its end, has none.
    """
    boards = {
        model: board for model in _models_with_board(folder) if 0 in (board := _board(folder, model)) and 1 in board
    }
    if not boards:
        return ()
    buckets: dict[tuple[int, str], int] = {}
    read_lines(folder / PLANS_FILE, problems, _noting_buckets(buckets))

    def unready_of(line: Any) -> list[UnreadyParameter]:
        model = int(line["model"])
        return [
            UnreadyParameter(
                model=model,
                name=name,
                module=_module_of(name, line.get("modules", {})),
                bucket=buckets.get((model, name), -1),
            )
            for (name, *_), is_ready in zip(line["parameters"], boards.get(model, b""), strict=False)
            if not is_ready
        ]

    return tuple(read_lines(folder / PARAMETERS_FILE, problems, unready_of))


def _noting_buckets(buckets: dict[tuple[int, str], int]) -> Callable[[Any], list[None]]:
    """Notes the bucket of each parameter; a later plan is what counts."""

    def note(plan: Any) -> list[None]:
        for number, bucket in enumerate(plan["buckets"]):
            for parameter in bucket["parameters"]:
                buckets[int(plan["model"]), str(parameter["name"])] = number
        return []

    return note


@lru_cache(maxsize=64)
def _model(line: str) -> ModelParameters:
    """Of one line; the ranks of a job have the same ones."""
    content = json.loads(line)
    return ModelParameters(
        model=int(content["model"]),
        class_name=str(content["class"]),
        parameters=tuple((str(name), tuple(map(int, shape)), str(kind)) for name, shape, kind in content["parameters"]),
        frozen=tuple(map(str, content.get("frozen", ()))),
    )


def _module_of(name: str, modules: dict[str, str]) -> str:
    """Where it is in the module tree, with the class."""
    path = name.rpartition(".")[0]
    kind = modules.get(path)
    return path if kind is None else f"{path} ({kind})".strip()


def _models_with_board(folder: Path) -> list[int]:
    numbers = (path.stem.removeprefix("ready_") for path in folder.glob("ready_*.board"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def _board(folder: Path, model: int) -> bytes:
    try:
        return (folder / ready_file(model)).read_bytes()
    except OSError:
        return b""
