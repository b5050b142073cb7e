"""A recording that fails never stops a training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")


class Guarded(Protocol):
    """Something that may fail while a model trains."""

    def gives_up(self, error: Exception) -> None:
        """Say once what is lost from here on, and do nothing any more."""


T = TypeVar("T", bound=Guarded)


def survived(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Make a method that the training calls one that never raises: an error of ours ends what it belongs to."""

    @functools.wraps(method)
    def guarded(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.gives_up(error)

    return guarded  # type: ignore[return-value] # it has the name and docstring of the method


def surviving(callback: Callable[P, None], gives_up: Callable[[Exception], None]) -> Callable[P, None]:
    """The same for a function that is handed to torch.

    Args:
        gives_up: called with what was raised.
    """

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as error:
            gives_up(error)

    return guarded


@contextmanager
def training_goes_on(gives_up: Callable[[Exception], None]) -> Iterator[None]:
    """The same for what is inside.

    Args:
        gives_up: called with what was raised.
    """
    try:
        yield
    except Exception as error:
        gives_up(error)
