"""Run the tests of the code in C where a wrong access to memory, or undefined behavior, ends the process.

    .venv/bin/python .ci/sanitize.py [arguments of pytest]

AddressSanitizer and UndefinedBehaviorSanitizer, of gcc. The extension is compiled as pyproject.toml says, but into
build/sanitized, and imported from there by this process alone. Python itself never frees what lives as long as it does,
so leaks are not looked for here; `tests/instrumented_ddp/native/test_memory.py` does.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "build" / "sanitized"
TESTS: Final = ("tests/instrumented_ddp/native", "tests/instrumented_ddp/recording/test_timing.py")
COMPILER: Final = os.environ.get("CC", "gcc")
SANITIZERS: Final = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]
RUNTIMES: Final = ("libasan.so", "libubsan.so")
INSIDE: Final = "OVERLAPSCOPE_SANITIZED"
"""Environment variable of the process that runs the tests: the extension's file."""


def find_runtimes() -> list[Path]:
    """Return the libraries of the sanitizers; none if the compiler has not all of them."""
    try:
        asked = [[COMPILER, f"-print-file-name={name}"] for name in RUNTIMES]
        found = [Path(subprocess.run(each, capture_output=True, text=True).stdout.strip()) for each in asked]
    except FileNotFoundError:
        return []
    return found if all(path.is_absolute() and path.exists() for path in found) else []


def compile_extension() -> tuple[str, Path]:
    """Compile the extension with sanitizers; its name and its file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    options: dict[str, Any] = dict(extension)
    name, sources = options.pop("name"), options.pop("sources")
    arguments = [*options.pop("extra-compile-args", ()), *SANITIZERS, f"-I{sysconfig.get_path('include')}"]
    links = [f"-l{library}" for library in options.pop("libraries", ())] + options.pop("extra-link-args", [])
    options.pop("depends", None)
    if unknown := options.keys() - {"py-limited-api", "optional"}:
        sys.exit(f".ci/sanitize.py does not know what to do with {', '.join(unknown)} of the extension")
    FOLDER.mkdir(parents=True, exist_ok=True)
    built = FOLDER / f"{name.rpartition('.')[2]}.abi3.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", *arguments, *sources, "-o", built, *links], cwd=ROOT, check=True)
    return name, built


def run_tests(name: str, built: Path) -> int:
    """Import the extension from its file, then run the tests in this process."""
    del os.environ["LD_PRELOAD"]  # for what the tests start
    spec = importlib.util.spec_from_file_location(name, built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    import pytest

    from instrumented_ddp import native

    assert native.RecordStore is module.RecordStore, "something else would be tested"
    # What the sanitizers write before they end the process is not for pytest to keep.
    return pytest.main(["-q", "--capture=sys", "-p", "no:cacheprovider", *(sys.argv[1:] or TESTS)])


def main() -> None:
    """Compile, and start again as a process that the sanitizers watch."""
    os.chdir(ROOT)
    if INSIDE in os.environ:
        name, built = os.environ.pop(INSIDE).split("=")
        sys.exit(run_tests(name, Path(built)))
    runtimes = find_runtimes()
    if not runtimes:
        print(f"sanitizers: skipped, as {COMPILER} has no {' and '.join(RUNTIMES)}")
        return
    name, built = compile_extension()
    watched = os.environ | {
        INSIDE: f"{name}={built}",
        "LD_PRELOAD": " ".join(map(str, runtimes)),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], watched)


if __name__ == "__main__":
    main()
