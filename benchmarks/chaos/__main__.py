"""Random trainings with random faults, as strangers write them: is what is said of them the truth?

    python -m benchmarks.chaos --seconds 3600 [--ours | --stock] [--only KIND...] [--without KIND...]
    python -m benchmarks.chaos --seed 12345

Each program is written from a seed (model, loop, options, ranks, and a fault at a random step and rank, or none), run
as a user would (`overlapscope record -- torchrun ...`), ended if it hangs, and diagnosed before and after that. Kind,
ranks, step and line are compared with the truth, and the worst of all that was said counts:

right   the kind, the ranks unless nothing proves which, and step and line where they are said
partly  nothing of it is false, but it says less than could be known
missed  nothing is said of a fault
wrong   any false sentence: another kind, an innocent rank, 'healthy' of a faulty job, a fault of a healthy one

A healthy program is accused if a watchdog names a fault while it runs, also if that is withdrawn, unless it says that
it is only likely. Folders of programs that are not scored right stay; --seed runs one again, and its folder stays.
The exit code is 1 if anything is wrong, or a healthy program was accused or ended.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import SystemRandom

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.chaos.program import EVENTS, Program, compose
from benchmarks.chaos.running import run
from benchmarks.chaos.scoring import GRADES, Judgment, judge_run


def judged(program: Program, folder: Path, *, keeps: bool) -> Judgment:
    """Run a program; its folder stays if anything about it is not right."""
    judgment = judge_run(program, run(program, folder))
    if not keeps and is_all_right(judgment):
        shutil.rmtree(folder, ignore_errors=True)
    return judgment


def is_all_right(judgment: Judgment) -> bool:
    has_harm = judgment.accused or judgment.suspected or judgment.was_ended or judgment.final_knows_less
    return judgment.score.grade == "right" and not has_harm


def fresh_seeds(seconds: float, only: Sequence[str], without: Sequence[str]) -> Iterator[int]:
    """Yield seeds of programs in which one of these happens, and none of those, until the time is over."""
    until_s = time.monotonic() + seconds
    fresh = SystemRandom()
    while time.monotonic() < until_s:
        seed = fresh.randrange(10**8)
        name = compose(seed).event.name
        if name.startswith(tuple(only)) and not name.startswith(tuple(without)):
            yield seed


def say(judgment: Judgment, folder: Path, seconds: float) -> None:
    """Print what was true, and what was said."""
    program, score = judgment.program, judgment.score
    whose = "ours" if program.setting.is_ours else "stock"
    lines = [f"{score.grade:<7}{program.event.name}, {whose}, seed {program.seed}, {seconds:.0f} s"]
    where = f"rank {' '.join(map(str, program.blamed))}, step {program.steps}, line {program.lines[:1]}"
    lines.append(f"truth: {where if program.blamed else 'healthy'}; {program.setting.ranks} ranks; {folder}")
    lines.append(f"{judgment.said}: {judgment.verdict.sentence}")
    if score.why:
        lines.append(f"not right: {score.why}")
    for title, sentences in (("accused", judgment.accused), ("suspected", judgment.suspected)):
        lines += [f"{title}: {sentence}" for sentence in sentences[:1]]
    if judgment.was_ended:
        lines.append("a healthy job did not end well")
    if judgment.final_knows_less:
        lines.append("the diagnosis afterwards knows less")
    print("\n       ".join(lines), flush=True)


def print_table(judgments: Sequence[Judgment]) -> None:
    """Print grades by event, for ours and stock."""
    print(f"\n| event | {' | '.join(f'{whose}: {grade}' for whose in ('ours', 'stock') for grade in GRADES)} |")
    print(f"|{' --- |' * (1 + 2 * len(GRADES))}")
    counts = Counter((one.program.event.name, one.program.setting.is_ours, one.score.grade) for one in judgments)
    for name in [event.name for event in EVENTS if any(name == event.name for name, *_ in counts)]:
        cells = [str(counts[name, is_ours, grade] or "") for is_ours in (True, False) for grade in GRADES]
        print(f"| {name} | {' | '.join(cells)} |")
    for is_ours in (True, False):
        own = [one for one in judgments if one.program.setting.is_ours == is_ours]
        if not own:
            continue
        grades = Counter(one.score.grade for one in own)
        healthy = [one for one in own if one.program.event.is_harmless]
        raised = [one for one in healthy if one.program.setting.on_incident == "raise"]
        print(
            f"\n{'ours' if is_ours else 'stock'}: {len(own)} programs, "
            + ", ".join(f"{grades[grade]} {grade} ({grades[grade] / len(own):.0%})" for grade in GRADES)
            + f"; {len(healthy)} healthy: {sum(bool(one.accused) for one in healthy)} accused, "
            f"{sum(bool(one.suspected) for one in healthy)} suspected, {sum(one.was_ended for one in healthy)} ended "
            f"badly; {len(raised)} of them with --on-incident raise: {sum(one.was_ended for one in raised)} ended; "
            f"{sum(one.final_knows_less for one in own)} known less afterwards"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="no program is begun after that (%(default)s)")
    parser.add_argument("--seed", type=int, help="run this program once, and keep its folder")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time (%(default)s)")
    parser.add_argument("--ours", action="store_true", help="only with instrumented_ddp.DistributedDataParallel")
    parser.add_argument("--stock", action="store_true", help="only with torch's own")
    parser.add_argument("--only", nargs="*", default=[""], metavar="KIND", help="only what begins so, as 'unreduced'")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="KIND", help="leave out what begins so, as 'silent'"
    )
    parser.add_argument("--folder", type=Path, help="where programs go (a new temporary folder)")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="overlapscope-chaos-"))

    def one(seed: int) -> Judgment:
        program = compose(seed, is_ours=args.ours if args.ours or args.stock else None)
        started_s = time.monotonic()
        own = folder / str(seed)
        judgment = judged(program, own, keeps=args.seed is not None)
        say(judgment, own, time.monotonic() - started_s)
        return judgment

    def one_after_another(_job: int) -> list[Judgment]:
        return [one(seed) for seed in fresh_seeds(args.seconds, args.only, args.without)]

    with ThreadPoolExecutor(args.jobs) as pool:
        judgments = (
            [one(args.seed)]
            if args.seed is not None
            else [judgment for own in pool.map(one_after_another, range(args.jobs)) for judgment in own]
        )
    print_table(judgments)
    bad = [one for one in judgments if one.score.grade == "wrong" or one.accused or one.was_ended]
    print(f"\nnot right, or of a healthy program accused or ended: {len(bad)}; kept in {folder}" if bad else "")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
