"""What can be seen of a training, kept for comparison: tensors to the bit, errors, warnings, anything that compares."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class SeenTensor:
    """A tensor as it was: its values and all that tells where and how they lay."""

    kind: tuple[object, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SeenTensor:
        kind = (tuple(tensor.shape), tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_inference())
        if tensor.is_sparse:
            return cls((*kind, tensor.is_coalesced()), (tensor._indices().clone(), tensor._values().detach().clone()))
        placed = (tensor.stride(), tensor.storage_offset(), tensor._is_view())
        return cls((*kind, *placed), (tensor.detach().clone(),))

    def difference(self, ours: SeenTensor) -> str | None:
        if self.kind != ours.kind:
            return f"stock {self.kind}, ours {ours.kind}"
        for stock_values, our_values in zip(self.values, ours.values, strict=True):
            if stock_values.shape != our_values.shape or not _same_bits(stock_values, our_values):
                return f"stock {stock_values}, ours {our_values}"
        return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous(), other.contiguous()
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


@dataclass(frozen=True)
class SeenError:
    """An error: ours is of stock's type and has its text, or at least the sentence and the names asked for."""

    types: tuple[str, ...]
    """Its class and the bases of that."""
    text: str
    sentence: str | None
    names: tuple[str, ...]

    def difference(self, ours: SeenError) -> str | None:
        if self.types[0] not in ours.types:
            return f"stock {self.types[0]}: {self.text}\nours {ours.types[0]}: {ours.text}"
        if self.sentence is None:
            return None if self.text == ours.text else f"stock: {self.text}\nours: {ours.text}"
        missing = [part for part in (self.sentence, *self.names) if part not in ours.text]
        if self.sentence not in self.text:
            missing.append("stock itself does not say so")
        return f"missing {missing}\nstock: {self.text}\nours: {ours.text}" if missing else None


class Seen:
    """The notes of one run of a scenario, in order."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, Any]] = []

    def note(self, what: str, value: object) -> None:
        """Keep a value as it is now; tensors may be anywhere inside."""
        self.notes.append((what, _frozen(value)))

    def gradients(self, when: str, module: nn.Module) -> None:
        """Keep every parameter's gradient, or that it has none."""
        for name, parameter in module.named_parameters():
            self.note(f"{when}: gradient of {name}", parameter.grad)

    def state(self, when: str, module: nn.Module) -> None:
        """Keep parameters and buffers."""
        for name, parameter in module.named_parameters():
            self.note(f"{when}: parameter {name}", parameter)
        for name, buffer in module.named_buffers():
            self.note(f"{when}: buffer {name}", buffer)

    def error(
        self, what: str, call: Callable[[], object], *, sentence: str | None = None, names: Sequence[str] = ()
    ) -> None:
        """Call and keep the error.

        Args:
            what: which call this is.
            call: what is expected to raise.
            sentence: what both texts must have; None: the texts must be equal.
            names: what our text must have besides.
        """
        try:
            call()
        except Exception as error:
            types = tuple(base.__name__ for base in type(error).__mro__)
            self.notes.append((what, SeenError(types, str(error), sentence, tuple(names))))
        else:
            self.notes.append((what, "no error"))

    @contextmanager
    def warnings(self, what: str, *, with_file: bool = True) -> Iterator[None]:
        """Keep the warnings inside: categories, texts and, if wanted, the file that each is about."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        files = [Path(warning.filename).name if with_file else None for warning in caught]
        self.note(what, [(w.category.__name__, str(w.message), file) for w, file in zip(caught, files, strict=True)])

    @contextmanager
    def said(self, what: str, sentence: str) -> Iterator[None]:
        """Keep whether the sentence is printed to stderr inside, by whatever language and way."""
        with tempfile.TemporaryFile() as printed, warnings.catch_warnings():
            warnings.simplefilter("always")
            stderr = os.dup(2)
            os.dup2(printed.fileno(), 2)
            torch.set_warn_always(True)  # also what stock has said once in this process
            try:
                yield
            finally:
                torch.set_warn_always(False)
                os.dup2(stderr, 2)
                os.close(stderr)
            printed.seek(0)
            text = printed.read().decode()
        self.note(what, sentence in text)

    def differences(self, ours: Seen) -> list[str]:
        """Where another run's notes part from these."""
        found = []
        for stock_note, our_note in zip_longest(self.notes, ours.notes, fillvalue=("nothing", None)):
            (what, stock_value), (our_what, our_value) = stock_note, our_note
            if what != our_what:
                found.append(f"stock goes on to {what!r}, ours to {our_what!r}")
                break
            difference = _difference(stock_value, our_value)
            if difference:
                found.append(f"{what}: {difference}")
        return found


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return SeenTensor.of(value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    return value


def _difference(stock: Any, ours: Any) -> str | None:
    if isinstance(stock, SeenTensor | SeenError) and type(stock) is type(ours):
        return stock.difference(ours)
    if isinstance(stock, dict) and isinstance(ours, dict):
        if stock.keys() != ours.keys():
            return (
                f"only stock has {sorted(stock.keys() - ours.keys())}, only ours {sorted(ours.keys() - stock.keys())}"
            )
        return _joined(f"[{key!r}] {found}" for key in stock if (found := _difference(stock[key], ours[key])))
    if isinstance(stock, list) and isinstance(ours, list) and len(stock) == len(ours):
        pairs = enumerate(zip(stock, ours, strict=True))
        return _joined(f"[{index}] {found}" for index, pair in pairs if (found := _difference(*pair)))
    return None if type(stock) is type(ours) and stock == ours else f"stock {stock!r}, ours {ours!r}"


def _joined(found: Iterator[str]) -> str | None:
    return "; ".join(found) or None
