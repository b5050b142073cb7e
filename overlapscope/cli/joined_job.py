"""Several commands of one job that record into one folder, as one on each host does: which job, and who may join it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from overlapscope.cli.recording_folder import has_recording, make_folder
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import find_recorded_ranks
from overlapscope.trace.json_files import dump_json_text, read_json
from overlapscope.trace.schema import ENDED_FILE, JOB_FILE, rank_folder

_OPTIONS: Final = ("rdzv_id", "rdzv_endpoint", "master_addr", "master_port")
"""Options of torchrun that are the same on all hosts of a job; their variables begin with ``PET_``."""
_TORCHRUN: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_BEFORE_SCRIPT: Final = ("-m", "--module", "--no-python", "--no_python")
_DEFAULT_PORT: Final = "29500"
_NO_ID: Final = ("", "none")
"""torchrun's default is the word."""
_WAIT_S: Final = 10.0


def find_job(command: Sequence[str], variables: Mapping[str, str] = os.environ) -> str:
    """Return what names the job that a command is part of, the same on all of its hosts.

    Args:
        command: the command, whose options may say where its processes meet.
        variables: environment of the command.

    Raises:
        OverlapScopeError: nothing names it.
    """
    given = _read_options(command, _OPTIONS)
    known = {name: given.get(name) or variables.get(f"PET_{name.upper()}", "") for name in _OPTIONS}
    if number := variables.get("SLURM_JOB_ID"):
        return f"Slurm job {number}"
    run_id = known["rdzv_id"] or variables.get("TORCHELASTIC_RUN_ID", "")
    meeting = [f"rendezvous {run_id}"] if run_id not in _NO_ID else []
    if known["rdzv_endpoint"]:
        meeting.append(f"rendezvous at {known['rdzv_endpoint']}")
    if meeting:
        return ", ".join(meeting)
    if address := known["master_addr"] or variables.get("MASTER_ADDR", ""):
        return f"master {address}:{known['master_port'] or variables.get('MASTER_PORT', _DEFAULT_PORT)}"
    raise OverlapScopeError(
        "--join: nothing says which job this is; set MASTER_ADDR and MASTER_PORT, or give torchrun --rdzv-endpoint"
    )


def count_awaited_nodes(command: Sequence[str], variables: Mapping[str, str] = os.environ) -> int:
    """Return how many nodes a torchrun waits for before it starts a rank, the least of ``--nnodes``; 1 for others."""
    begin = next((index for index, word in enumerate(command) if Path(word).name in _TORCHRUN), None)
    if begin is None:
        return 1
    own = [*takewhile(lambda word: not word.endswith(".py") and word not in _BEFORE_SCRIPT, command[begin:])]
    given = _read_options(own, ("nnodes",)).get("nnodes") or variables.get("PET_NNODES", "")
    least = given.partition(":")[0]
    return int(least) if least.isdecimal() else 1


def _read_options(command: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the values of some of torchrun's options."""
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        option, is_joined, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and name in names:
            found.setdefault(name, value if is_joined else following)  # later ones may be the script's
    return found


def join_folder(folder: Path, job: str) -> None:
    """Create the folder of a job's recording, or make sure that it is of the same job.

    Raises:
        OverlapScopeError: it holds a recording of another job, or can't be created.
    """
    is_recorded = has_recording(folder)  # asked first: a rank of this job comes after the file
    if not (folder / JOB_FILE).exists():
        if is_recorded:
            raise OverlapScopeError(f"{folder}: already holds a recording, begun without --join; give another folder")
        make_folder(folder)
        _claim(folder, job)
    found = read_json(folder / JOB_FILE, []).get("job")
    if found is None:
        raise OverlapScopeError(f"{folder / JOB_FILE}: does not say which job records here; give another folder")
    if found != job:
        raise OverlapScopeError(f"{folder}: holds a recording of another job ({found}, not {job}); give another folder")


def _claim(folder: Path, job: str) -> None:
    """Write which job records into a folder, unless another command has done so meanwhile."""
    staged = folder / f"{JOB_FILE}.{secrets.token_hex(8)}.part"
    try:
        try:
            staged.write_text(dump_json_text({"job": job}), encoding="utf-8")
            os.link(staged, folder / JOB_FILE)  # unlike a renamed file, it never takes the place of another
        except FileExistsError:
            pass
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise OverlapScopeError(f"{folder}: can't be recorded into ({error.strerror})") from None


def wait_for_other_hosts(attempt: Path) -> None:
    """Wait until the ranks of other hosts have said how they ended, but not for long: they may never say it."""
    _wait_until(lambda: all(map(_has_left, find_recorded_ranks(attempt))))


def wait_for_copies(attempt: Path, ranks: Collection[int]) -> None:
    """Wait until other hosts have added their ranks, which they do in the end, but not for long."""
    _wait_until(lambda: all(rank_folder(attempt, rank).exists() for rank in ranks))


def _wait_until(is_over: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _WAIT_S
    while time.monotonic() < until_s and not is_over():
        time.sleep(0.1)


def _has_left(rank_dir: Path) -> bool:
    from overlapscope.diagnosis.process_state import is_on_this_host, read_liveness
    from overlapscope.trace.process_files import read_process

    if (rank_dir / ENDED_FILE).exists():
        return True
    where = read_process(rank_dir)
    return is_on_this_host(where) and read_liveness(where) == "gone"
