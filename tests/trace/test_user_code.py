"""Which files are the user's."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import instrumented_ddp
from overlapscope.trace.user_code import find_user_file, is_user_file


@pytest.mark.parametrize(
    "file",
    [
        threading.__file__,
        json.__file__,
        torch.nn.__file__,
        instrumented_ddp.__file__,
        "/venv/lib/python3.11/site-packages/numpy/_core/numeric.py",
        "/usr/lib/python3/dist-packages/torch/_tensor.py",
        "/venv/lib/python3.11/site-packages/lightning/pytorch/trainer/trainer.py",
        "/venv/lib/python3.11/site-packages/torchmetrics/metric.py",
        "/usr/lib/python3/dist-packages/yaml.py",
        "/venv/bin/torchrun",
        "<frozen importlib._bootstrap>",
        "<attrs generated init train.Config>",
        "<string>",
        "",
    ],
)
def test_libraries_are_passed_over(file: str) -> None:
    assert not is_user_file(file)


@pytest.mark.parametrize(
    "file",
    [
        __file__,
        "train.py",
        "/home/me/torch/train.py",
        "/home/me/src/mylib/comm.py",
        "<ipython-input-3-0123456789ab>",
    ],
)
def test_what_is_installed_nowhere_is_the_users(file: str) -> None:
    assert is_user_file(file)


PACKAGES = "/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([f"{PACKAGES}/torchmetrics/metric.py", "/home/me/model.py", "/home/me/train.py"], "/home/me/model.py"),
        (  # the laboratory's scripts, where OverlapScope was installed from a wheel
            [f"{PACKAGES}/instrumented_ddp/ddp.py", f"{PACKAGES}/instrumented_ddp/examples/faults/missing_branch.py"],
            f"{PACKAGES}/instrumented_ddp/examples/faults/missing_branch.py",
        ),
        (
            [f"{PACKAGES}/torchmetrics/metric.py", f"{PACKAGES}/mine/net.py", f"{PACKAGES}/mine/train.py"],
            "/mine/net.py",
        ),
        ([f"{PACKAGES}/lightning/fit.py", f"{PACKAGES}/mine/cli.py", "/venv/bin/mine"], "/mine/cli.py"),
        ([f"{PACKAGES}/torch/_tensor.py", f"{PACKAGES}/job.py", "<frozen runpy>"], "/job.py"),
        ([f"{PACKAGES}/torchmetrics/metric.py", "<string>"], "<string>"),
        (["<string>", "/home/me/config.py"], "/home/me/config.py"),
        ([f"{PACKAGES}/torch/spawn.py", "/usr/lib/python3.11/multiprocessing/spawn.py", "<string>"], None),
        (["/usr/lib/python3.11/queue.py", "/home/me/bin/train"], "/home/me/bin/train"),
        ([f"{PACKAGES}/torch/_tensor.py", "/usr/lib/python3.11/threading.py"], None),
        ([], None),
    ],
)
def test_the_innermost_file_of_the_program_is_found(files: list[str], expected: str | None) -> None:
    found = find_user_file(files)
    assert found is None if expected is None else found is not None and files[found].endswith(expected)
