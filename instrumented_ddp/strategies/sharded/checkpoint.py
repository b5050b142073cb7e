"""Checkpoints of a sharded training: each rank writes its shards, and any number of ranks can resume from them.

A checkpoint is a folder ``step_00000012`` with a file per rank and, written last, ``complete.json``, without which it
is invalid: a training that is killed while it writes leaves the previous checkpoint as the latest. Shards are stored
by parameter name and element range, so neither the buckets nor the number of ranks matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp.bucket_plan import dtype_name
from instrumented_ddp.reduction.bucket import strides_of
from instrumented_ddp.strategies.sharded.optimizer import ShardedOptimizer
from instrumented_ddp.strategies.sharded.shards import ParameterShards
from overlapscope.errors import OverlapScopeError

COMPLETE_FILE: Final = "complete.json"
_FORMAT: Final = "sharded checkpoint 1"
_PATTERN: Final = "step_*"


def save(folder: str | Path, optimizer: ShardedOptimizer, step: int, extra: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint. Called on all ranks, which see the same folder.

    Args:
        folder: folder of all checkpoints; created if missing.
        step: number of the checkpoint; an incomplete one of the same number is overwritten.
        extra: whatever else is needed to resume, such as a scheduler's state; rank 0's is stored. It must be readable
            by ``torch.load`` with ``weights_only=True``.

    Returns:
        The folder of this checkpoint.

    Raises:
        OverlapScopeError: on all ranks, if one of them couldn't write, or the checkpoint exists already.
    """
    shards, group = optimizer.shards, optimizer.group
    path = Path(folder) / f"step_{step:08d}"
    is_complete = (path / COMPLETE_FILE).exists()

    def write_own() -> None:
        if is_complete:
            raise OverlapScopeError(f"{path}: there already; move it away, or save under another step")
        path.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {"fragments": _fragments_of(optimizer)}
        if group.rank() == 0:
            content |= {"whole": _copy_unsharded(shards), "extra": dict(extra or {})}
        _write(_file(path, group.rank()), lambda file: torch.save(content, file))

    def write_complete() -> None:
        if group.rank() == 0:
            sizes = [_file(path, rank).stat().st_size for rank in range(group.size())]
            description = json.dumps(_description(optimizer) | {"bytes": sizes}).encode()
            _write(path / COMPLETE_FILE, lambda file: file.write(description))

    _on_all_ranks(write_own, path, optimizer)
    _on_all_ranks(write_complete, path, optimizer)
    return path


def latest(folder: str | Path) -> Path | None:
    """Return the complete checkpoint with the highest step; None if there is none."""
    complete = [path for path in Path(folder).glob(_PATTERN) if (path / COMPLETE_FILE).exists()]
    return max(complete, default=None, key=lambda path: int(path.name.partition("_")[2]))


def load(path: str | Path, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Resume from a checkpoint, with any number of ranks. Called on all of them.

    Args:
        path: folder of the checkpoint, as returned by ``save`` and ``latest``.
        optimizer: created like the one that was saved; it gets its state and settings, and its model the weights.

    Returns:
        ``extra``, as it was saved.

    Raises:
        OverlapScopeError: the checkpoint is incomplete, damaged, or of another model or optimizer. Nothing was changed.
    """
    path = Path(path)
    described = _read_description(path)
    _check_is_of(path, described, _description(optimizer))
    contents = [_read(path, rank, size) for rank, size in enumerate(described["bytes"])]
    shards = optimizer.shards
    shards.finish()
    fragments: dict[str, list[dict[str, Any]]] = {}
    for content in contents:
        for fragment in content["fragments"]:
            fragments.setdefault(fragment["name"], []).append(fragment)
    with torch.no_grad():
        for name, tensor in _unsharded(shards).items():
            tensor.copy_(contents[0]["whole"][name])
        for parameter, spec in zip(shards.parameters, shards.layout.parameters, strict=True):
            _flat(parameter).copy_(_cut_range(fragments.get(spec.name, []), "main", 0, spec.elements))
        optimizer.inner.state.clear()
        for one in shards.owned:
            begin, end = one.fragment.begin, one.fragment.end
            pieces = fragments[one.name]
            one.main.copy_(_cut_range(pieces, "main", begin, end))
            if state := _state_of(pieces, begin, end, one.main.device):
                optimizer.inner.state[one.main] = state
    for group, saved in zip(optimizer.param_groups, described["groups"], strict=True):
        group.update(_convert_settings(saved["settings"], group))
    optimizer.zero_grad()
    extra: dict[str, Any] = contents[0]["extra"]
    return extra


# -- content of a checkpoint ---------------------------------------------------------------------------------------


def _description(optimizer: ShardedOptimizer) -> dict[str, Any]:
    shards = optimizer.shards
    names = {parameter: spec.name for parameter, spec in zip(shards.parameters, shards.layout.parameters, strict=True)}
    return {
        "format": _FORMAT,
        "optimizer": type(optimizer.inner).__name__,
        "parameters": [
            [spec.name, list(spec.shape), dtype_name(spec.dtype), list(strides_of(parameter))]
            for parameter, spec in zip(shards.parameters, shards.layout.parameters, strict=True)
        ],
        "whole": [[name, list(tensor.shape)] for name, tensor in _unsharded(shards).items()],
        "groups": [
            {
                "parameters": [names[parameter] for parameter in group["params"]],
                "settings": {name: _plain(value) for name, value in group.items() if name != "params"},
            }
            for group in optimizer.param_groups
        ],
    }


def _fragments_of(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "begin": one.fragment.begin,
            "end": one.fragment.end,
            "main": one.main.detach().clone(),  # else torch.save writes the whole buffer of which it is a view
            "state": dict(optimizer.inner.state.get(one.main, {})),
        }
        for one in optimizer.shards.owned
    ]


def _unsharded(shards: ParameterShards) -> dict[str, torch.Tensor]:
    """Return buffers and frozen parameters: equal on all ranks, or rank 0's counts, as in DDP."""
    trained = set(shards.parameters)
    frozen = {name: one.detach() for name, one in shards.module.named_parameters() if one not in trained}
    return frozen | dict(shards.module.named_buffers())


def _copy_unsharded(shards: ParameterShards) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in _unsharded(shards).items()}


def _cut_range(pieces: list[dict[str, Any]], key: str, begin: int, end: int) -> torch.Tensor:
    """Return the elements from ``begin`` to ``end`` of the fragments' tensors, or of their optimizer state.

    From fragments [0, 4) and [4, 10), the range [2, 6) takes elements 2 and 3 of the first and 0 and 1 of the second.
    """
    parts = [
        (piece[key] if key in piece else piece["state"][key])[max(begin - piece["begin"], 0) : end - piece["begin"]]
        for piece in sorted(pieces, key=lambda piece: int(piece["begin"]))
        if piece["begin"] < end and piece["end"] > begin
    ]
    return torch.cat(parts) if parts else torch.empty(0)


def _state_of(pieces: list[dict[str, Any]], begin: int, end: int, device: torch.device) -> dict[str, Any]:
    """Return the optimizer state of a range: per-element state is cut like the parameter; the rest is copied."""
    first = next(piece for piece in pieces if piece["begin"] <= begin < piece["end"])
    return {
        name: _cut_range(pieces, name, begin, end).to(device) if _is_of_elements(value) else _copy(value)
        for name, value in first["state"].items()
    }


def _is_of_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _flat(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach().as_strided((parameter.numel(),), (1,))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _convert_settings(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings from JSON to the types that the group has."""

    def like(value: Any, now: Any) -> Any:
        if isinstance(now, torch.Tensor):
            return torch.full_like(now, value)
        return tuple(value) if isinstance(now, tuple) else value

    return {name: like(value, group.get(name)) for name, value in saved.items()}


# -- files ---------------------------------------------------------------------------------------------------------


def _file(path: Path, rank: int) -> Path:
    return path / f"rank_{rank}.pt"


def _write(path: Path, write: Callable[[Any], object]) -> None:
    """Write a file atomically: it exists completely or not at all."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _on_all_ranks(act: Callable[[], None], path: Path, optimizer: ShardedOptimizer) -> None:
    """Run an action, and return when all ranks have done it.

    Raises:
        OverlapScopeError: on all ranks, if one couldn't.
    """
    why_not = ""
    try:
        act()
    except OverlapScopeError as error:
        why_not = str(error)
    except OSError as error:
        why_not = f"{path}: can't be written ({error.strerror})"
    failed = torch.tensor([bool(why_not)], dtype=torch.int32, device=optimizer.shards.parameters[0].device)
    dist.all_reduce(failed, group=optimizer.group)
    if failed.item():
        raise OverlapScopeError(why_not or f"{path}: incomplete, as another rank couldn't write its part")


def _read_description(path: Path) -> dict[str, Any]:
    try:
        described = json.loads((path / COMPLETE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OverlapScopeError(f"{path}: not a complete checkpoint, as it has no {COMPLETE_FILE}") from None
    except (OSError, ValueError) as error:
        raise OverlapScopeError(f"{path / COMPLETE_FILE}: can't be read ({error})") from None
    if not isinstance(described, dict) or described.get("format") != _FORMAT:
        raise OverlapScopeError(f"{path / COMPLETE_FILE}: not of a checkpoint that this version has written")
    return described


def _read(path: Path, rank: int, size: int) -> dict[str, Any]:
    file = _file(path, rank)
    with suppress(Exception):  # whatever torch.load raises for a damaged file
        if file.stat().st_size == size:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
            return content
    raise OverlapScopeError(f"{file}: missing or damaged; load an older checkpoint")


def _check_is_of(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if saved["optimizer"] != own["optimizer"]:
        raise OverlapScopeError(f"{path}: of the optimizer {saved['optimizer']}, and this is {own['optimizer']}")
    for what in ("parameters", "whole"):
        for theirs, ours in zip(saved[what], own[what], strict=False):
            if theirs != ours:
                raise OverlapScopeError(f"{path}: of another model: {_text(theirs)} where this has {_text(ours)}")
        if len(saved[what]) != len(own[what]):
            counts = f"{len(saved[what])} tensors where this has {len(own[what])}"
            raise OverlapScopeError(f"{path}: of another model: {counts}")
    if [group["parameters"] for group in saved["groups"]] != [group["parameters"] for group in own["groups"]]:
        raise OverlapScopeError(f"{path}: its optimizer has other groups of parameters")


def _text(described: list[Any]) -> str:
    return " ".join(map(str, described))
