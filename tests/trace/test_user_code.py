"""Which files are the user's."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import instrumented_ddp
from overlapscope.trace.user_code import is_user_file


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
        "/opt/venv/lib/python3.11/site-packages/mylib/comm.py",
        "<ipython-input-3-0123456789ab>",
    ],
)
def test_what_is_not_known_is_the_users(file: str) -> None:
    assert is_user_file(file)
