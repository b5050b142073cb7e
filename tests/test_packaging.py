"""What is installed is what is in the repository."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = ("overlapscope", "instrumented_ddp", "dashboards")


def files_of(package: str) -> list[Path]:
    return [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_every_folder_with_modules_is_a_listed_package():
    folders = {path.parent.relative_to(ROOT) for package in PACKAGES for path in files_of(package)}
    listed = {package for package in SETUPTOOLS["packages"] if not package.startswith("instrumented_ddp.examples")}
    assert {".".join(folder.parts) for folder in folders} == listed


def test_every_file_that_is_no_module_is_package_data():
    for package in PACKAGES:
        for path in files_of(package):
            if path.suffix not in (".py", ".so"):  # setuptools adds what it compiles
                patterns = SETUPTOOLS["package-data"][".".join(path.parent.relative_to(ROOT).parts)]
                assert any(path.match(pattern) for pattern in patterns), f"{path.name} would be left out"
