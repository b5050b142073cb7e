"""Who is accused in real recordings of healthy trainings, idle or with other processes on the same cores.

Recordings that are already there are judged again. The scheduler decides which rank runs on which core, so a rank that
is named again and again is not named for its core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.analysis import Analysis
from overlapscope.stragglers.text import describe, name_culprit
from overlapscope.trace.recording import read_trace

TRAINING = Path(__file__).parents[1] / "examples" / "train_gpt.py"
LIMIT_S = 600


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Run so many processes that do nothing but compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def record(folder: Path, ranks: int, steps: int) -> None:
    """Record a training of which nothing is wrong."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-c", "from overlapscope.cli.main import entry_point; entry_point()", "record", "-o"]
    command += [str(folder), "--", *launch, str(TRAINING), "--steps", str(steps), "--bucket-cap-mb", "1"]
    subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=LIMIT_S,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    """Record, judge, and print who is named how often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where recordings go, or are")
    parser.add_argument("--recordings", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--busy", type=int, default=0, help="loops that run beside the training")
    args = parser.parse_args()
    named: Counter[str] = Counter()
    for number in range(args.recordings):
        folder = args.folder / f"{args.ranks}_ranks_{args.busy}_busy_{number}"
        if not folder.exists():
            with busy(args.busy):
                record(folder, args.ranks, args.steps)
        stragglers = Analysis(read_trace(folder)).stragglers
        findings = stragglers.findings if stragglers is not None else ()
        named.update({name_culprit(finding) for finding in findings})
        print(f"{folder.name}: {' '.join(map(describe, findings)) or 'nobody'}", flush=True)
    print(f"\n{args.recordings} recordings; named: {dict(named) or 'nobody'}")


if __name__ == "__main__":
    main()
