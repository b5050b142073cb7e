"""Wrapping of methods of torch's classes, so that code that has already imported the classes is observed as well."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol


def call_after_import(name: str, act: Callable[[], None]) -> None:
    """Call ``act`` once a module is imported, now or later, without importing it: torch's FSDP takes half a second."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(importlib.abc.Loader):
    """Loader that delegates to another loader, and then calls a function."""

    def __init__(self, loader: importlib.abc.Loader, act: Callable[[], None]) -> None:
        self._loader, self._act = loader, act

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._act()


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
