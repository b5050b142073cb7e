"""Turn the recording of a running job off and on, or record less, without a restart.

    overlapscope control traces/ --off
    overlapscope control traces/ --on
    overlapscope control traces/ --sample 10
    overlapscope control traces/ --status

All ranks switch at the same step, a second or so ahead, which is printed. While recording is off, ranks still count
their steps, and their collectives are logged for the watchdog, which stays on as it was.

With --sample N one step in N is recorded in full. The others are light: their phases, and when buckets were ready,
launched and over, but not the copies into buckets and back. --detail parameters also records when each gradient is
ready, in full steps.

Ranks see only what is on their own disk. If hosts share none, run the command on each of them, and name a step that is
far enough ahead with --from-step: without it each host switches at a step of its own.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from overlapscope.cli.arguments import parse_folder, parse_positive_int
from overlapscope.errors import OverlapScopeError
from overlapscope.text import format_ranks
from overlapscope.trace.environment import DEFAULT_EVERY, DETAILS, Detail
from overlapscope.trace.schema import CONTROL_FILE, EVENTS_FILE, GROUP_PATTERN, POINT_TO_POINT_PATTERN, RUN_FILE

if TYPE_CHECKING:
    from overlapscope.trace.recording_modes import BegunMode, RecordingMode

_OBSERVED_S: Final = 0.5
"""Time over which the speed of the training is measured."""
_AHEAD_S: Final = 1.0
"""Time until ranks switch: they look every 0.2 s."""
_AHEAD_ON_SHARED_DISK_S: Final = 60.0
"""The same if ranks run on several hosts, to which a network's file system may show a new file this late."""
_AHEAD_STEPS: Final = 3
"""Number of steps added to that: the one in progress, one that may have begun meanwhile, and the one of the look."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("recording", type=parse_folder, help="folder that a running job records into")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--off", action="store_true", help="record no steps")
    what.add_argument("--on", action="store_true", help="record every step in full")
    what.add_argument(
        "--sample", type=parse_positive_int, metavar="N", help="record one step in N in full, the others lightly"
    )
    what.add_argument("--status", action="store_true", help="print what each rank records now, and since which step")
    parser.add_argument(
        "--detail",
        choices=DETAILS,
        help="level of detail of full steps; 'parameters' also records when each gradient is ready",
    )
    parser.add_argument(
        "--from-step", type=parse_positive_int, metavar="N", help="step to switch at (default: about a second ahead)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from overlapscope.trace.recording_modes import OFF, RecordingMode, read_control, write_control

    is_change = bool(args.off or args.on or args.sample or args.detail)
    if args.status == is_change or (args.status and args.from_step):
        raise OverlapScopeError("give one of --off, --on and --sample N, or --detail; or --status alone")
    job = _find_job(args.recording)
    asked = read_control(job.attempt / CONTROL_FILE)
    begun = {rank: _read_latest_mode(folder) for rank, folder in job.running.items()}
    if args.status:
        print("\n".join(_describe(job, begun, asked)))
        return 0
    before = asked[-1] if asked else begun[min(begun)]
    every = OFF if args.off else DEFAULT_EVERY if args.on else args.sample
    mode = RecordingMode(
        from_step=_choose_step(job, args.from_step),
        every=before.every if every is None else every,
        detail=args.detail or before.detail,
    )
    write_control(job.attempt, asked, mode)
    print(f"from step {mode.from_step}: {_format_mode(mode.every, mode.detail)}")
    return 0


@dataclass(frozen=True, kw_only=True)
class _RunningJob:
    """A job that is being recorded."""

    attempt: Path
    running: dict[int, Path]
    """Folders of the ranks that record steps and have not ended, as far as can be seen from here."""
    over: tuple[int, ...]
    """Ranks that have ended."""
    is_on_this_host: bool
    """False if some of its ranks run on other hosts."""


def _find_job(path: Path) -> _RunningJob:
    from overlapscope.diagnosis.evidence import LIVE_STATES
    from overlapscope.diagnosis.rank_state import read_process_state
    from overlapscope.trace.folders import find_latest_attempt, find_rank_folders

    attempt = find_latest_attempt(path)
    folders = find_rank_folders(attempt)
    states = {rank: read_process_state(folder) for rank, folder in folders.items()}
    alive = [rank for rank, state in states.items() if state in (*LIVE_STATES, "unknown")]
    if not alive:
        raise OverlapScopeError(f"{attempt}: its processes have ended; what they record can't be changed any more")
    running = {rank: folders[rank] for rank in alive if (folders[rank] / EVENTS_FILE).exists()}
    if not running:
        raise OverlapScopeError(
            f"{attempt}: no rank records steps, as none has a DistributedDataParallel or fully_shard model (yet); "
            "collectives are always logged, for the watchdog"
        )
    return _RunningJob(
        attempt=attempt,
        running=running,
        over=tuple(rank for rank in folders if rank not in alive),
        is_on_this_host=all(states[rank] != "unknown" for rank in running),
    )


def _choose_step(job: _RunningJob, wanted: int | None) -> int:
    """Return the step at which ranks switch, which all of them reach only after they have seen the request.

    Raises:
        OverlapScopeError: a rank has begun the wanted step, or is about to.
    """
    begin = _find_latest_step(job)
    if wanted is not None:
        if wanted <= begin + 1:
            raise OverlapScopeError(f"--from-step {wanted}: ranks have got to step {begin}; give a later one")
        return wanted
    time.sleep(_OBSERVED_S)
    end = _find_latest_step(job)
    ahead_s = _AHEAD_S if job.is_on_this_host else _AHEAD_ON_SHARED_DISK_S
    return end + _AHEAD_STEPS + math.ceil((end - begin) / _OBSERVED_S * ahead_s)


def _find_latest_step(job: _RunningJob) -> int:
    """Return the latest step that any rank has begun, according to its logs."""
    return max(max(_iter_steps(folder), default=0) for folder in job.running.values())


def _iter_steps(folder: Path) -> Iterator[int]:
    from overlapscope.trace.collective_log_reader import CollectiveLogFile
    from overlapscope.trace.event_log import read_latest_step

    if (step := read_latest_step(folder / EVENTS_FILE)) is not None:
        yield step
    for path in (*folder.glob(GROUP_PATTERN), *folder.glob(POINT_TO_POINT_PATTERN)):
        with suppress(OverlapScopeError):
            log = CollectiveLogFile(path)
            yield from log.read(log.latest, log.latest)["step"].tolist()


def _read_latest_mode(folder: Path) -> BegunMode:
    """Return the mode that a rank is in; of one that has noted none, the initial one."""
    from overlapscope.trace.json_files import read_json
    from overlapscope.trace.recording_modes import BegunMode, read_begun_modes

    if noted := read_begun_modes(folder, []):
        return noted[-1]
    detail: Detail = "parameters" if read_json(folder / RUN_FILE, []).get("detail") == "parameters" else "buckets"
    return BegunMode(step=0, agreed_step=0, every=DEFAULT_EVERY, detail=detail, time_ns=0)


def _describe(job: _RunningJob, begun: dict[int, BegunMode], asked: list[RecordingMode]) -> Iterator[str]:
    """Yield a line per group of ranks that record the same, then what they were asked for and have not begun."""
    by_mode: dict[tuple[int, int, int, str], list[int]] = {}
    for rank, mode in begun.items():
        by_mode.setdefault((mode.step, mode.agreed_step, mode.every, mode.detail), []).append(rank)
    for (step, agreed_step, every, detail), ranks in by_mode.items():
        late = f" (late: asked for from step {agreed_step})" if agreed_step != step else ""
        yield f"{_format_who(ranks)}: {_format_mode(every, detail)}, since step {step}{late}"
    if job.over:
        yield f"{_format_who(job.over)}: ended"
    latest_step = max(mode.agreed_step for mode in begun.values())
    for coming in asked:
        if coming.from_step > latest_step:
            yield f"from step {coming.from_step}: {_format_mode(coming.every, coming.detail)}"


def _format_who(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _format_mode(every: int, detail: str) -> str:
    if not every:
        return "off"
    gradients = ", with the times of gradients" if detail == "parameters" else ""
    return ("on" if every == 1 else f"on, one step in {every} in full") + gradients
