"""Damage recordings of jobs with a known fault at random, and look who is accused then.

    python -m benchmarks.damage FOLDER [--cases 2000] [--seed 1]

FOLDER gets some forty recordings first, of faults of the laboratory on two to four ranks, with both wrappers; half of
them under torchrun and `overlapscope record`, with a short timeout of the process group. Those that are there already
are kept. Each case copies one of them and damages the copy once to four times: files deleted, cut short, with changed
bytes or lost pages, swapped between ranks or with another job, replaced by a pipe or by brackets 300,000 deep; endings
lost; rank folders emptied, deleted, taken from another job. Every other case is judged as on another machine, where
nobody can look at the processes. Whatever is lost, the verdict may only weaken:

wrong     a rank is blamed or suspected that is not at fault
cleared   "healthy" of a job with a fault
crashed   a traceback, or no answer within seconds

`--case N` repeats case N of a seed, keeps its copy, and prints the diagnosis.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Final
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.cli.main import main as run_command
from overlapscope.errors import OverlapScopeError
from overlapscope.lab import jobs
from overlapscope.lab.catalog import FAULTS, Fault
from overlapscope.lab.truth import find_fault_script
from tests.damage import DAMAGES

RECORDED: Final = (
    "uneven-data",
    "missing-branch",
    "failed-rank",
    "caught-exception",
    "killed-in-backward",
    "hanging-data",
    "extra-collective",
    "different-collectives",
    "missing-member",
    "no-sync-on-one-rank",
    "skipped-batch",
    "other-weights",
    "reordered-parameters",
    "evaluation-with-barrier",
    "out-of-memory",
    "send-without-receive",
    "interleaved-groups",
    "group-on-one-rank",
    "different-find-unused",
    "never-started",
    "uneven-data-joined",
)
WRAPPERS: Final[tuple[jobs.Wrapper, ...]] = ("instrumented", "torch")
TIMEOUT_S: Final = 6.0
LIMIT_S: Final = 60.0
ANSWER_S: Final = 20
SUMMARY_EVERY: Final = 10


@dataclass(frozen=True)
class Recording:
    """One recording in the folder, and which ranks may be named."""

    path: Path
    guilty: tuple[int, ...]
    is_faulty: bool


def record(folder: Path, fault: Fault, wrapper: jobs.Wrapper, world_size: int, *, is_launched: bool) -> None:
    """Record a job with this fault, started by the laboratory or by torchrun."""
    script = find_fault_script(fault)
    if not is_launched:
        with jobs.run_fault_job(script, world_size, wrapper=wrapper, trace=folder, timeout_s=TIMEOUT_S) as job:
            job.wait(TIMEOUT_S + 2)
        return
    own = {"OVERLAPSCOPE_LAB_DDP": wrapper, "OVERLAPSCOPE_LAB_TIMEOUT_S": str(TIMEOUT_S), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command = [sys.executable, "-c", "from overlapscope.cli.main import entry_point; entry_point()", "record", "-o"]
    process = subprocess.Popen(
        [*command, str(folder), "--", *launch, str(script)],
        env=os.environ | own,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait()


def make_recordings(folder: Path, names: Sequence[str] = RECORDED) -> list[Recording]:
    """Record what is not there yet, and judge all recordings as they are."""
    by_name = {fault.name: fault for fault in FAULTS}
    found = []
    for turn, name in enumerate(names):
        for wrapper in WRAPPERS:
            fault = by_name[name]
            if fault.needs_instrumented_ddp and wrapper == "torch":
                continue
            sizes = fault.world_sizes
            world_size = sizes[(turn + (wrapper == "torch")) % len(sizes)]
            path = folder / f"{name}_{wrapper}_{world_size}"
            if not path.exists():
                record(path, fault, wrapper, world_size, is_launched=turn % 2 == 0)
            verdict, _ = jobs.diagnose(path)
            at_fault = () if fault.is_healthy else tuple(rank for rank in fault.ranks if rank < world_size)
            guilty = tuple(sorted({*verdict.named, *at_fault}))
            print(f"{path.name}: {verdict.kind} {verdict.named}, at fault {at_fault}", flush=True)
            found.append(Recording(path, guilty, verdict.is_fault))
    return found


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer within {ANSWER_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(ANSWER_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    case: int
    name: str
    damage: str
    result: str
    """ok, wrong, cleared or crashed."""
    said: str
    kind: str = ""


def damage_copy(recordings: list[Recording], seed: int, case: int, copy: Path) -> tuple[Recording, str]:
    """Copy a recording and damage the copy; return the original, and what was done."""
    random_ = random.Random(f"{seed} {case}")
    chosen, foreign = random_.sample(recordings, 2)
    shutil.copytree(chosen.path, copy, symlinks=True)
    count = random_.choice((1, 1, 1, 2, 2, 3, 4))
    return chosen, "; ".join(random_.choice(DAMAGES)(random_, copy, foreign.path) for _ in range(count))


def try_case(recordings: list[Recording], seed: int, case: int) -> Outcome:
    """Judge a damaged copy."""
    with tempfile.TemporaryDirectory(prefix="overlapscope-damage-") as temporary:
        copy = Path(temporary, "t")
        chosen, damage = damage_copy(recordings, seed, case, copy)
        result, said, kind = judge_copy(
            chosen, copy, with_summary=case % SUMMARY_EVERY == 0, is_elsewhere=bool(case % 2)
        )
    return Outcome(case, chosen.path.name, damage, result, said, kind)


def _as_on(boot_id: str | None) -> AbstractContextManager[object]:
    """Pretend to be on another host, unless None is given."""
    return nullcontext() if boot_id is None else patch("overlapscope.trace.clocks.get_boot_id", lambda: boot_id)


def judge_copy(
    chosen: Recording, copy: Path, *, with_summary: bool, is_elsewhere: bool = False
) -> tuple[str, str, str]:
    """Return what came of it, what was said, and the kind of the verdict."""
    output = StringIO()
    host = _as_on("another host" if is_elsewhere else None)
    try:
        with host, _time_limit(), redirect_stdout(output), redirect_stderr(StringIO()):
            if with_summary:
                run_command(["summary", str(copy)])
            output.seek(0)
            output.truncate()
            run_command(["diagnose", "--json", str(copy)])
    except OverlapScopeError as error:
        return "ok", str(error), "refused"
    except BaseException:
        return "crashed", traceback.format_exc(limit=-6), ""
    if not output.getvalue():
        return "ok", "refused", "refused"
    verdict = json.loads(output.getvalue())["verdict"]
    named = {*verdict["blamed"], *verdict["suspected"]}
    said = f"{verdict['kind']} ({verdict['certainty']}) {sorted(named)}: {verdict['sentence']}"
    if not named <= {*chosen.guilty}:
        return "wrong", said, verdict["kind"]
    if verdict["kind"] == "healthy" and chosen.is_faulty:
        return "cleared", said, verdict["kind"]
    return "ok", said, verdict["kind"]


def main() -> None:
    """Record, damage, judge, and print each case that was not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where recordings go, or are")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--faults", nargs="+", default=RECORDED, help="faults to record (default: all)")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    recordings = make_recordings(args.folder, args.faults)
    if args.case is not None:
        copy = Path(tempfile.mkdtemp(prefix="overlapscope-damage-"), "t")
        chosen, damage = damage_copy(recordings, args.seed, args.case, copy)
        print(f"{copy}: {chosen.path.name}, {damage}")
        is_elsewhere = bool(args.case % 2)
        with _as_on("another host" if is_elsewhere else None):
            print(jobs.diagnose(copy)[1])
        print(judge_copy(chosen, copy, with_summary=True, is_elsewhere=is_elsewhere))
        return
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    with ProcessPoolExecutor(args.workers) as pool:
        for one in pool.map(partial(try_case, recordings, args.seed), range(args.cases), chunksize=8):
            counts[one.result] += 1
            kinds[one.kind] += 1
            if one.result != "ok":
                print(f"\ncase {one.case}, {one.name}, {one.result}: {one.damage}\n  {one.said}", flush=True)
    print(f"\n{args.cases} cases of {len(recordings)} recordings: {dict(counts)}\nverdicts: {dict(kinds)}")


if __name__ == "__main__":
    main()
