"""Wraps methods of torch's classes, so that code that has imported these already is observed as well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Method = Callable[..., Any]


class Observer(Protocol):
    """Sees the instances of a process."""

    def observes(self, instance: object) -> bool:
        """Whether this one, and still."""


def wrap_methods(methods: Mapping[type, Mapping[str, Method]], observer: Callable[[], Observer | None]) -> None:
    """Have each method called by what observes it, which is given the observer, the method and its arguments.

    Args:
        methods: by class and name, what observes it.
        observer: who does at the time of a call.

    Raises:
        AttributeError: a class has no such method; nothing was wrapped.
    """

    def observed(original: Method, observation: Method) -> Method:
        @functools.wraps(original)
        def method(instance: object, *args: Any, **kwargs: Any) -> Any:
            current = observer()
            if current is None or not current.observes(instance):
                return original(instance, *args, **kwargs)
            return observation(current, original, instance, *args, **kwargs)

        return method

    wrapped = [
        (owner, name, observed(getattr(owner, name), observation))
        for owner, observations in methods.items()
        for name, observation in observations.items()
    ]
    for owner, name, method in wrapped:
        setattr(owner, name, method)
