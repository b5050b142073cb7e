"""The line at which a process stood, from stacks that faulthandler has really written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from overlapscope.diagnosis.process_state import find_callbacks, find_user_line, find_wait_reason

SCRIPT = """
import faulthandler, sys, threading, time
def waits():
    threading.Event().wait()
threading.Thread(target=waits, daemon=True).start()
def load():
    list(map(lambda _: faulthandler.dump_traceback(sys.stdout), [0]))
load()
"""


def test_the_innermost_line_of_the_users_in_the_main_thread_is_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    site = find_user_line(ran.stdout)
    assert site is not None
    assert (Path(site.file).name, site.line) == ("train.py", 7)


def test_lines_of_libraries_are_passed_over() -> None:
    text = (
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
        '  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 700 in __next__\n'
        '  File "/home/me/train.py", line 12 in main\n'
    )
    assert str(find_user_line(text)) == "/home/me/train.py:12 (main)"
    assert find_wait_reason(text) == "data loader"
    assert find_wait_reason(text.replace("in __next__", "in __del__")) is None, "its destructor waits for no data"
    assert find_wait_reason(text.replace("torch/utils/data", "mine")) == "thread"
    assert find_wait_reason("") is None


def test_a_thread_that_python_did_not_start_is_in_a_callback() -> None:
    thread, frame = "Thread 0x00007f (most recent call first):\n", '  File "{}", line {} in {}\n'
    callback = frame.format("/home/me/hook.py", 7, "reduce_again") + frame.format("/home/me/hook.py", 3, "then")
    waiting = frame.format("/home/me/work.py", 9, "run") + frame.format("/usr/lib/python3.11/threading.py", 1002, "_b")
    main = frame.format("/home/me/train.py", 12, "main")
    assert [*map(str, find_callbacks("\n".join(thread + each for each in (callback, "", waiting, main))))] == [
        "/home/me/hook.py:7 (reduce_again)"
    ]
    assert find_callbacks("") == find_callbacks(thread + main) == []


def test_without_stacks_there_is_no_line() -> None:
    assert find_user_line("") is None
    assert find_user_line("Fatal Python error: Aborted\n") is None
