"""Wrapping of methods of torch's classes, so that code that has already imported the classes is observed as well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Method = Callable[..., Any]


class InstanceObserver(Protocol):
    """Observer of the instances of a process."""

    def observes(self, instance: object) -> bool:
        """Return whether an instance is observed at this time."""


def wrap_methods(methods: Mapping[type, Mapping[str, Method]], observer: Callable[[], InstanceObserver | None]) -> None:
    """Wrap methods so that calls go to their wrappers with the observer, the original method and its arguments.

    Args:
        methods: wrappers by class and method name.
        observer: returns the observer at the time of a call.

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
