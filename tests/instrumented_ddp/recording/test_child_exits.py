"""A launcher writes down how the processes end that it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from instrumented_ddp.recording import child_exits
from overlapscope.trace.process_files import ProcessExit, read_exits

LAUNCHER = """
import multiprocessing, os, runpy, signal, subprocess, sys, time
from pathlib import Path

def end(how):
    os._exit(5) if how == "status" else os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    runpy.run_path(sys.argv[2])["watch_children"](Path(sys.argv[1]))  # without its package, as in a launcher
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    pids = {}
    failing = subprocess.Popen([sys.executable, "-c", "raise SystemExit(4)"])
    pids["failing"] = failing.pid
    while failing.poll() is None:
        time.sleep(0.01)
    terminated, killed = subprocess.Popen(waits), subprocess.Popen(waits, start_new_session=True)
    pids |= {"terminated": terminated.pid, "killed": killed.pid}
    terminated.terminate()
    terminated.wait()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    context = multiprocessing.get_context("spawn")
    for how in ("status", "signal"):
        process = context.Process(target=end, args=(how,))
        process.start()
        pids[how] = process.pid
        process.join()
    print(*(f"{name}={pid}" for name, pid in pids.items()))
"""


def test_status_and_signal_are_written_down_and_whether_the_launcher_sent_it(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path), child_exits.__file__],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pids = {name: int(pid) for name, pid in (pair.split("=") for pair in ran.stdout.split())}
    exits: dict[int, ProcessExit] = {each.pid: each for each in read_exits(tmp_path, [])}
    found = {name: (exits[pid].status, exits[pid].signal_received) for name, pid in pids.items()}
    assert found == {
        "failing": (4, None),
        "terminated": (-signal.SIGTERM, signal.SIGTERM),
        "killed": (-signal.SIGKILL, signal.SIGKILL),
        "status": (5, None),
        "signal": (-signal.SIGKILL, None),
    }
    assert len(exits) == len(pids)
    assert all((each.signaled_at_ns is None) == (each.signal_received is None) for each in exits.values())
