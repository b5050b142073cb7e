"""Run a training, recorded, and start it again only while that may help.

    python supervise.py -o traces/ --starts 3 -- torchrun --nproc-per-node 8 train.py

Each start is a recording of its own, start_0, start_1 ... in the folder. After one that failed, its verdict decides:
if the same program would do the same again, or has failed twice at the same place, there is no other start.

Exit codes, for Kubernetes and others:
  0   the training succeeded, and nothing certain is wrong with it
  42  a restart can't help: the sentence says what to mend
  43  all starts are used up, and the hosts named are a possible cause
  else, the code of the last start
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

RESTART_CANNOT_HELP = 42
HOST_SUSPECTED = 43


def read_verdict(recording):
    """Read the verdict on a recording; None if there is none."""
    ran = subprocess.run(["overlapscope", "diagnose", "--json", recording], stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout)["verdict"] if ran.stdout else None


def place_of(verdict):
    """Say where it went wrong: two starts that fail there fail for the same reason."""
    lines = sorted({f"{site['file']}:{site['line']}" for site in verdict["call_sites"].values()})
    return verdict["code"], verdict["step"], lines


def is_hopeless(verdict, earlier):
    """Tell whether the next start would end as this one did."""
    if verdict["restart"] == "cannot-help":
        return verdict["certainty"] == "certain"
    return verdict["restart"] == "may-help" and verdict["code"] != "interrupted" and place_of(verdict) in earlier


def run(command):
    """Run a command, hand SIGTERM on to it, and return its exit code, and whether it was told to end."""
    signals = []
    with subprocess.Popen(command) as child:
        signal.signal(signal.SIGTERM, lambda number, _: (signals.append(number), child.send_signal(number)))
        return child.wait(), bool(signals)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("traces"), help="folder of the recordings")
    parser.add_argument("--starts", type=int, default=3, help="how often it is started at most (%(default)s)")
    parser.add_argument("training", nargs="+", metavar="-- COMMAND", help="command to run")
    args = parser.parse_args()

    code, verdict, earlier = 1, None, []
    for start in range(args.starts):
        recording = args.output / f"start_{start}"
        code, was_told = run(
            ["overlapscope", "record", "--on-incident", "raise", "-o", recording, "--", *args.training]
        )
        if was_told:
            return code
        verdict = read_verdict(recording)
        if verdict is None:  # nothing was recorded: the command failed before any rank began
            continue
        print(f"start {start}: {verdict['code']} ({verdict['certainty']}): {verdict['sentence']}", flush=True)
        if is_hopeless(verdict, earlier):
            return RESTART_CANNOT_HELP
        if code == 0:
            return 0
        earlier.append(place_of(verdict))
    return HOST_SUSPECTED if verdict and verdict["may_be_host"] else code


if __name__ == "__main__":
    sys.exit(main())
