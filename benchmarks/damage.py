"""Damage recordings of jobs with a known fault at random, and look who is accused then.

    python -m benchmarks.damage FOLDER [--cases 2000] [--seed 1]

FOLDER gets some forty recordings first, of faults of the laboratory on two to four ranks, with both wrappers; half of
them under torchrun and `overlapscope record`, with a short timeout of the process group. Those that are there already
are kept. Each case copies one of them and damages the copy once to four times: files deleted, cut short, with changed
bytes or lost pages, swapped between ranks or with another job, replaced by a pipe or by brackets 300,000 deep; endings
lost; rank folders emptied, deleted, taken from another job. Whatever is lost, the verdict may only weaken:

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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from overlapscope.cli.main import main as run_command
from overlapscope.errors import OverlapScopeError
from overlapscope.lab import jobs
from overlapscope.lab.catalog import FAULTS, Fault
from overlapscope.lab.truth import find_fault_script

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
DEPTH: Final = 300_000
ENDINGS: Final = ("ended.json", "manifest.json", "reports.jsonl", "incident_*.log", "stall.json")


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


def make_recordings(folder: Path) -> list[Recording]:
    """Record what is not there yet, and judge all recordings as they are."""
    by_name = {fault.name: fault for fault in FAULTS}
    found = []
    for turn, name in enumerate(RECORDED):
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


Damage = Callable[[random.Random, Path, Path], str]
"""Damages a copy of a recording, given another recording too, and returns what it has done."""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _any_file(random_: random.Random, folder: Path) -> Path:
    return random_.choice(_files(folder) or [folder])


def _ranks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank_*") if path.is_dir())


def _any_rank(random_: random.Random, folder: Path) -> Path:
    return random_.choice(_ranks(folder) or [folder])


def delete(random_: random.Random, folder: Path, _: Path) -> str:
    """Delete one to six files."""
    files = _files(folder)
    chosen = random_.sample(files, min(len(files), random_.randint(1, 6)))
    for path in chosen:
        path.unlink()
    return f"deleted {[str(path.relative_to(folder)) for path in chosen]}"


def delete_kind(random_: random.Random, folder: Path, _: Path) -> str:
    """Delete a file of one name of some ranks."""
    name = _any_file(random_, folder).name
    chosen = [path for path in folder.glob(f"rank_*/{name}") if random_.random() < 0.7 and path.is_file()]
    for path in chosen:
        path.unlink()
    return f"deleted {[str(path.relative_to(folder)) for path in chosen]}"


def lose_endings(random_: random.Random, folder: Path, _: Path) -> str:
    """Delete what was written last, of some ranks, as if a disk had been full."""
    ranks = _ranks(folder)
    chosen = random_.sample(ranks, random_.randint(1, max(1, len(ranks)))) if ranks else []
    for rank in chosen:
        for path in [found for pattern in ENDINGS for found in rank.glob(pattern)]:
            path.unlink()
    return f"lost the endings of {[rank.name for rank in chosen]}"


def cut(random_: random.Random, folder: Path, _: Path) -> str:
    """Cut a file short."""
    path = _any_file(random_, folder)
    if not path.is_file():
        return "nothing"
    size = random_.randrange(path.stat().st_size + 1)
    os.truncate(path, size)
    return f"cut {path.relative_to(folder)} at {size}"


def change_bytes(random_: random.Random, folder: Path, _: Path) -> str:
    """Change one byte or a few in the part of a file that is used."""
    path = _any_file(random_, folder)
    data = bytearray(path.read_bytes() if path.is_file() else b"")
    used = len(bytes(data).rstrip(b"\0"))
    if not used:
        return "nothing"
    places = [random_.randrange(used) for _ in range(random_.choice((1, 1, 1, 4)))]
    for place in places:
        data[place] ^= 1 << random_.randrange(8)
    path.write_bytes(data)
    return f"changed {path.relative_to(folder)} at {places}"


def lose_page(random_: random.Random, folder: Path, _: Path) -> str:
    """Fill a page of a file with zeros."""
    path = _any_file(random_, folder)
    data = bytearray(path.read_bytes() if path.is_file() else b"")
    begin = random_.randrange(0, len(bytes(data).rstrip(b"\0")) + 1, 4096)
    data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
    if path.is_file():
        path.write_bytes(data)
    return f"lost page at {begin} of {path.relative_to(folder)}"


def swap(random_: random.Random, folder: Path, _: Path) -> str:
    """Swap files of one name between two ranks, or copy one over the other."""
    ranks = _ranks(folder)
    one = _any_file(random_, folder)
    if len(ranks) < 2 or one.parent not in ranks:
        return "nothing"
    other = random_.choice([rank for rank in ranks if rank != one.parent]) / one.name
    data = one.read_bytes()
    if other.is_file() and random_.random() < 0.7:
        one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    return f"swapped {one.relative_to(folder)} and {other.relative_to(folder)}"


def take_file(random_: random.Random, folder: Path, foreign: Path) -> str:
    """Take a file from another job."""
    other = _any_file(random_, foreign)
    target = folder / other.relative_to(foreign)
    if not target.parent.is_dir() or target.is_dir() or not other.is_file():
        return "nothing"
    target.write_bytes(other.read_bytes())
    return f"took {target.relative_to(folder)} from {foreign.name}"


def take_rank(random_: random.Random, folder: Path, foreign: Path) -> str:
    """Take the whole folder of a rank from another job."""
    other = _any_rank(random_, foreign)
    target = folder / other.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(other, target)
    return f"took {other.name} from {foreign.name}"


def swap_ranks(random_: random.Random, folder: Path, _: Path) -> str:
    """Swap the folders of two ranks."""
    if len(ranks := _ranks(folder)) < 2:
        return "nothing"
    one, other = random_.sample(ranks, 2)
    aside = folder / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    return f"swapped {one.name} and {other.name}"


def empty_rank(random_: random.Random, folder: Path, _: Path) -> str:
    """Delete all files of a rank, or its folder, or add empty ones."""
    rank = _any_rank(random_, folder)
    how = random_.choice(("emptied", "deleted", "added 500 empty folders beside"))
    if how.startswith("added"):
        for number in range(4, 504):
            (folder / f"rank_{number}").mkdir(exist_ok=True)
    elif rank != folder:
        shutil.rmtree(rank)
        if how == "emptied":
            rank.mkdir()
    return f"{how} {rank.name}"


def replace_by_pipe(random_: random.Random, folder: Path, _: Path) -> str:
    """Put a pipe, a link to a device, or a folder in the place of a file."""
    path = _any_file(random_, folder)
    if not path.is_file():
        return "nothing"
    path.unlink()
    how = random_.choice(("a pipe", "a device", "a folder", "a link to itself"))
    if how == "a pipe":
        os.mkfifo(path)
    elif how == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if how == "a device" else path.name)
    return f"{path.relative_to(folder)} is {how}"


def nest(random_: random.Random, folder: Path, _: Path) -> str:
    """Replace a JSON file by brackets."""
    files = [path for path in _files(folder) if path.suffix in (".json", ".jsonl")]
    if not files:
        return "nothing"
    path = random_.choice(files)
    path.write_text(random_.choice(("[" * DEPTH, '{"a":' * DEPTH, '{"models": ' + "[" * 900 + "]" * 900 + "}")))
    return f"{path.relative_to(folder)} is deep"


DAMAGES: Final[tuple[Damage, ...]] = (
    delete,
    delete,
    delete_kind,
    delete_kind,
    lose_endings,
    lose_endings,
    cut,
    cut,
    change_bytes,
    change_bytes,
    change_bytes,
    lose_page,
    swap,
    swap,
    take_file,
    take_rank,
    swap_ranks,
    empty_rank,
    replace_by_pipe,
    nest,
)


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
        result, said, kind = judge_copy(chosen, copy, with_summary=case % SUMMARY_EVERY == 0)
    return Outcome(case, chosen.path.name, damage, result, said, kind)


def judge_copy(chosen: Recording, copy: Path, *, with_summary: bool) -> tuple[str, str, str]:
    """Return what came of it, what was said, and the kind of the verdict."""
    output = StringIO()
    try:
        with _time_limit(), redirect_stdout(output), redirect_stderr(StringIO()):
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
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    recordings = make_recordings(args.folder)
    if args.case is not None:
        copy = Path(tempfile.mkdtemp(prefix="overlapscope-damage-"), "t")
        chosen, damage = damage_copy(recordings, args.seed, args.case, copy)
        print(f"{copy}: {chosen.path.name}, {damage}")
        print(jobs.diagnose(copy)[1])
        print(judge_copy(chosen, copy, with_summary=True))
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
