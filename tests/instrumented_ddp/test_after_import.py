"""Something is called once a module is there, and never imports it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from instrumented_ddp.stock.wrapping import call_after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that nobody has imported yet."""
    (tmp_path / "imported_later.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    return "imported_later"


def test_it_is_called_after_the_first_import_with_all_of_the_module_there(module: str) -> None:
    finders, seen = list(sys.meta_path), []
    call_after_import(module, lambda: seen.append(sys.modules[module].VALUE))
    assert module not in sys.modules
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [3]
    assert sys.meta_path == finders
    importlib.reload(imported)
    assert seen == [3]


def test_it_is_called_at_once_if_the_module_is_there(module: str) -> None:
    importlib.import_module(module)
    seen: list[str] = []
    call_after_import(module, lambda: seen.append(module))
    assert seen == [module]


def test_a_module_that_is_not_there_is_missing_as_ever() -> None:
    call_after_import("no_such_module_of_ours", lambda: pytest.fail("it can't be there"))
    assert importlib.util.find_spec("no_such_module_of_ours") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_of_ours")
