"""Confidential recordings: names stay on this host, in a folder for its user alone; others get a copy with pseudonyms.

The original is removed once there is a copy. It stays if none could be written, or if ranks still record into it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Final

from overlapscope.cli import joined_job, recording_folder
from overlapscope.cli.pseudonym_files import make_key, read_key, refuse_unfit_files, write_names
from overlapscope.errors import OverlapScopeError
from overlapscope.text import rank_list
from overlapscope.trace.folders import (
    attempt_number,
    find_attempts,
    find_latest_attempt,
    find_recorded_ranks,
    parse_expected_ranks,
    remove_if_empty,
    restart_folder,
    try_lock,
)
from overlapscope.trace.json_files import read_json
from overlapscope.trace.schema import JOB_FILE, RUN_FILE

_PRIVATE_PREFIX: Final = "overlapscope-confidential-"
_STAGED_PREFIX: Final = ".copy-"
_HOW_TO_MAKE_KEY: Final = "make it once, '(umask 077; openssl rand -hex 32 > FILE)', for all hosts of the job"


class ConfidentialJob:
    """A job whose recording is a copy, with pseudonyms, of one that only its owner can read while the job runs.

    Args:
        output: folder for the copy.
        names: file to be written with the name behind each pseudonym; None for none.
        key: file with the key of the pseudonyms; None for a key that nobody keeps.
        is_joined: commands on other hosts write into that folder too.

    Raises:
        OverlapScopeError: a file is missing, exists, or would be given away.
    """

    def __init__(self, output: Path, names: Path | None, key: Path | None, *, is_joined: bool) -> None:
        from overlapscope.trace.confidential.pseudonyms import Pseudonyms

        refuse_unfit_files(output, names, key)
        if is_joined and key is None:
            raise OverlapScopeError(f"--join: hosts need the same pseudonyms; give --key FILE: {_HOW_TO_MAKE_KEY}")
        if key is not None and not key.exists():
            raise OverlapScopeError(f"{key}: no such key; {_HOW_TO_MAKE_KEY}")
        self.is_joined = is_joined
        self.is_published = False
        """True once there is a copy."""
        self._output = output
        self._names = names
        self._has_shared_key = key is not None
        self._pseudonyms = Pseudonyms(make_key() if key is None else read_key(key))

    def hide_name(self, job: str) -> str:
        """Return what the recording has in place of the name of the job, which may name a host."""
        from overlapscope.trace.confidential.policy import hide_content

        return str(hide_content(self._pseudonyms, JOB_FILE, {"job": job})["job"])

    def reveal(self, text: str) -> str:
        """Return a text about the copy with names, as far as they are known on this host."""
        return self._pseudonyms.reveal(text)

    @contextmanager
    def private_folder(self, print_status: Callable[[str], None]) -> Iterator[Path]:
        """Make the folder to record into, and remove it in the end unless names would be lost.

        It has the name of the other folder: by it the ranks of several hosts find each other.

        Raises:
            OverlapScopeError: it can't be made.
        """
        for path in _find_abandoned():
            print_status(f"{path}: still holds names of an earlier job; copy it with 'redact' if needed, and remove it")
        try:
            private = Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX))
            folder = private / self._output.resolve().name
            folder.mkdir()
        except OSError as error:
            raise OverlapScopeError(f"{tempfile.gettempdir()}: can't be recorded into ({error.strerror})") from None
        lock = try_lock(private)  # so that it is not taken for abandoned, also by systemd-tmpfiles
        print_status(f"only you can look at it until the job ends: overlapscope serve {quote(str(folder))}")
        try:
            yield folder
        finally:
            if why := self._find_reason_to_keep(folder):
                print_status(f"{folder}: still holds names, as {why}; copy it with 'redact' if needed, and remove it")
            else:
                shutil.rmtree(private, ignore_errors=True)
            if lock is not None:
                os.close(lock)
            if not self.is_joined:
                remove_if_empty(self._output)

    def _find_reason_to_keep(self, folder: Path) -> str:
        from overlapscope.diagnosis.rank_state import is_running
        from overlapscope.trace.early_ends import has_early_ends

        if is_running(find_latest_attempt(folder)):
            return "ranks are still running"
        is_recorded = recording_folder.has_recording(folder) or has_early_ends(folder)
        return "there is no copy" if is_recorded and not self.is_published else ""

    def publish(self, folder: Path, print_status: Callable[[str], None]) -> Path:
        """Write the copy, and wait a little for those of the job's other hosts.

        Args:
            folder: the folder that was recorded into.

        Returns:
            The folder of the copy's latest attempt; that of the original if it can't be copied.
        """
        latest = find_latest_attempt(folder)
        try:
            copy = self._write_copy(folder)
        except OverlapScopeError as error:
            print_status(str(error))
            return latest
        self.is_published = True
        elsewhere = _find_ranks_elsewhere(latest)
        if self.is_joined:
            joined_job.wait_for_copies(copy, elsewhere)
        elif elsewhere and not self._has_shared_key:
            print_status(
                f"{rank_list(elsewhere)} recorded elsewhere, under other pseudonyms: give all hosts the same --key "
                "FILE, to put their copies together"
            )
        return copy

    def _write_copy(self, folder: Path) -> Path:
        from overlapscope.redact.copy import redact_recording

        try:
            with tempfile.TemporaryDirectory(prefix=_STAGED_PREFIX, dir=self._output) as staged:
                copy = Path(staged, folder.name)
                redact_recording(folder, copy, self._pseudonyms)
                if self._names is not None:
                    write_names(self._names, self._pseudonyms)
                return _move_attempts(copy, self._output)
        except OSError as error:
            raise OverlapScopeError(f"{self._output}: can't be written ({error.strerror})") from None


def _find_abandoned() -> Iterator[Path]:
    """Yield private folders of this user that no command uses any more: it was killed, or has left it."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PRIVATE_PREFIX}*")):
        with suppress(FileNotFoundError):  # another command has just removed it
            if path.lstat().st_uid == os.getuid() and (lock := try_lock(path)) is not None:
                os.close(lock)
                yield path


def _find_ranks_elsewhere(attempt: Path) -> list[int]:
    """Return the ranks that train together with those of an attempt and have not recorded into its folder."""
    recorded = find_recorded_ranks(attempt)
    runs = [read_json(path / RUN_FILE, []) for path in recorded if (path / RUN_FILE).exists()]
    here = {int(path.name.removeprefix("rank_")) for path in recorded}
    return sorted({rank for run in runs for rank in parse_expected_ranks(run)} - here)


def _move_attempts(copy: Path, output: Path) -> Path:
    """Move the attempts of a copy into the folder of the run, and return that of the last one.

    Nothing is replaced: if ranks of an earlier attempt of the job are in it, these are of later ones.
    """
    from overlapscope.trace.early_ends import EARLY_END_PATTERN

    attempts = {attempt_number(attempt): attempt for attempt in (copy, *find_attempts(copy))}
    ranks = [(number, rank.name) for number, attempt in attempts.items() for rank in attempt.glob("rank_*")]
    shift = next(
        shift
        for shift in count()
        if not any((_attempt_folder(output, number + shift) / name).exists() for number, name in ranks)
    )
    for number, attempt in attempts.items():
        folder = _attempt_folder(output, number + shift)
        folder.mkdir(exist_ok=True)
        for path in sorted(attempt.iterdir()):
            if path not in attempts.values():
                path.replace((output if fnmatchcase(path.name, EARLY_END_PATTERN) else folder) / path.name)
    return _attempt_folder(output, max(attempts) + shift)


def _attempt_folder(run: Path, number: int) -> Path:
    return restart_folder(run, number) if number else run
