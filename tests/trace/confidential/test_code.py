"""Paths, stacks, tracebacks and messages: nothing of the job is left, and they are understood as before."""

from __future__ import annotations

import string
import traceback

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from overlapscope.diagnosis.evidence import CallSite, Failure
from overlapscope.diagnosis.failures import is_consequence, is_disagreement, is_memory_failure, is_timeout
from overlapscope.diagnosis.process_state import find_user_line, find_wait_reason, was_aborted_by_native_thread
from overlapscope.trace.confidential.code import (
    hide_error_type,
    hide_file,
    hide_function,
    hide_message,
    hide_name,
    hide_stacks,
)
from overlapscope.trace.confidential.pseudonyms import Pseudonyms
from overlapscope.trace.confidential.public_words import PARTS_OF_PATHS
from overlapscope.trace.user_code import find_user_file, is_library_file, is_user_file

SECRET = st.text(string.ascii_lowercase, min_size=5, max_size=8).map(lambda text: f"zq{text}")
PART = st.sampled_from([*sorted(PARTS_OF_PATHS), "python3.11", "_dynamo", "home"]) | SECRET
LAST = st.sampled_from(["train.py", "loop.c", "lib.so.2", "torchrun", "subprocess.py", "_part.py", "run.sh"]) | SECRET
PATH = st.tuples(st.sampled_from(["/", ""]), st.lists(PART, max_size=5), LAST)
FILE = st.sampled_from(["<string>", "<stdin>", "<frozen runpy>", "<ipython-input-3-zqsecret>", "??", ""]) | PATH.map(
    lambda path: path[0] + "/".join([*path[1], path[2]])
)


@given(st.lists(FILE, max_size=5))
@example(["/dist-packages/zqalone", "/PIL/dist-packages/zqalone"])
def test_a_file_is_whose_it_was(files: list[str]) -> None:
    pseudonyms = Pseudonyms(b"key")
    hidden = [hide_file(pseudonyms, file) for file in files]
    assert not any("zq" in file for file in hidden)
    assert [is_library_file(file) for file in hidden] == [is_library_file(file) for file in files]
    assert [is_user_file(file) for file in hidden] == [is_user_file(file) for file in files]
    assert find_user_file(hidden) == find_user_file(files)


@given(SECRET, st.lists(SECRET, max_size=3))
def test_a_path_is_one_pseudonym_if_nothing_in_it_is_public(name: str, folders: list[str]) -> None:
    hidden = hide_file(Pseudonyms(b"key"), "/".join(["", *folders, f"{name}.py"]))
    assert hidden.startswith("file_")
    assert hidden.endswith(".py")
    assert "/" not in hidden


def test_a_module_holds_what_it_held() -> None:
    pseudonyms = Pseudonyms(b"key")
    module, parameter = (hide_name(pseudonyms, name) for name in ("zqtower.3.zqgate", "zqtower.3.zqgate.weight"))
    assert parameter == f"{module}.weight"
    assert module.split(".")[1] == "3"
    assert hide_function(pseudonyms, "Zqt.zqrun.<locals>.main").endswith(".<locals>.main")


MESSAGES = (
    "",
    "zqsecret was not found",
    "CUDA out of memory. Tried to allocate 2 GiB for zqsecret",
    "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4711",
    "Timed out waiting 1800000ms for recv operation\nof zqsecret",
    "DDP expects same model across all ranks, but Rank 1 has zqsecret",
    "NCCL communicator was aborted on rank 0: zqsecret",
    "zqsecret: broken pipe",
)
TYPES = ("RuntimeError", "torch.OutOfMemoryError", "DistBackendError", "TimeoutError", "ZqError", "KeyboardInterrupt")
LIBRARIES = "/opt/lib/python3.11"
SITES = ("/home/zq/train.py", f"{LIBRARIES}/site-packages/torch/distributed/c10d.py", f"{LIBRARIES}/ssl.py")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("message", MESSAGES)
def test_a_failure_is_classified_as_before(kind: str, message: str) -> None:
    pseudonyms = Pseudonyms(b"key")
    for file in SITES:
        for source in ("raise ZqError(zqsecret)", "zqsecret.wait()"):
            last = f"{kind}: {message}" if message else kind
            own = f'  File "{file}", line 7, in zqrun\n    {source}\n    ^^^^^^\n'
            text = f"Traceback (most recent call last):\n{own}{last}\n"
            both = f"{text}\nDuring handling of the above exception, another exception occurred:\n\n"
            both += f"Traceback (most recent call last):\n{own}ValueError: zqsecret\n"
            for failure in (
                Failure(type=kind, message=message, traceback=text),
                Failure(type="ValueError", message="zqsecret", traceback=both),
            ):
                hidden = Failure(
                    type=hide_error_type(pseudonyms, failure.type),
                    message=hide_message(pseudonyms, failure.message),
                    traceback=hide_stacks(pseudonyms, failure.traceback),
                )
                assert "zq" not in f"{hidden}".lower()
                for rule in (is_consequence, is_timeout, is_memory_failure, is_disagreement):
                    assert rule(hidden) == rule(failure), (rule, hidden, failure)


def test_a_real_traceback_keeps_its_lines_and_their_numbers() -> None:
    zqsecret = {"zqkey": 1}
    try:
        zqsecret["zqother"]
    except KeyError as error:
        text = traceback.format_exc()
        line = error.__traceback__.tb_lineno if error.__traceback__ else 0
    hidden = hide_stacks(Pseudonyms(b"key"), text)
    assert "zq" not in hidden
    assert f", line {line}, in function_" in hidden
    assert hidden.splitlines()[-1].startswith("KeyError: message_")


def test_stacks_show_the_same_line_and_the_same_wait() -> None:
    text = (
        "Fatal Python error: Aborted\n\n"
        "Thread 0x00007f1 [zqthread] (most recent call first):\n"
        '  File "/home/zq/side.py", line 3 in zqside\n\n'
        "Thread 0x00007f2 (most recent call first):\n"
        '  File "/opt/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1133 in _zqget\n'
        '  File "/home/zq/train.py", line 42 in zqmain\n'
        '  File "/home/zq/train.py", line 50 in <module>\n'
        "Extension modules: zqfast, numpy (total: 2)\n"
    )
    pseudonyms = Pseudonyms(b"key")
    hidden = hide_stacks(pseudonyms, text)
    assert "zq" not in hidden
    site = find_user_line(text)
    assert site is not None
    assert find_user_line(hidden) == CallSite(
        file=hide_file(pseudonyms, site.file), line=42, function=hide_function(pseudonyms, site.function)
    )
    assert find_wait_reason(hidden) == find_wait_reason(text) == "data loader"
    assert was_aborted_by_native_thread(hidden) == was_aborted_by_native_thread(text)
