"""Decorators and a context manager that keep errors of the recording from stopping the training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")


class Guarded(Protocol):
    """An object of the recording that may fail while a model trains."""

    def disable_recording(self, error: Exception) -> None:
        """Report once what is lost from now on, and stop recording."""


T = TypeVar("T", bound=Guarded)


def never_raise(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Decorate a method called from the training so that it never raises; an error is passed to its ``disable_recording``."""

    @functools.wraps(method)
    def guarded(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.disable_recording(error)

    return guarded  # type: ignore[return-value] # it has the name and docstring of the method


def never_raising(callback: Callable[P, None], disable_recording: Callable[[Exception], None]) -> Callable[P, None]:
    """Wrap a function that is passed to torch so that it never raises.

    Args:
        gives_up: called with the error.
    """

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as error:
            disable_recording(error)

    return guarded


@contextmanager
def suppress_recorder_errors(disable_recording: Callable[[Exception], None]) -> Iterator[None]:
    """Suppress errors raised inside.

    Args:
        gives_up: called with the error.
    """
    try:
        yield
    except Exception as error:
        disable_recording(error)
