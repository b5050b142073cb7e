"""Copies a recording such that names in it are pseudonyms; what no rule of the allow list knows is left out.

What is missing or damaged in the original is so in the copy, and the verdict is the same.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.redact import logs
from overlapscope.trace.collective_log import Signature
from overlapscope.trace.confidential.code import hide_stacks
from overlapscope.trace.confidential.policy import RULES, hide_content
from overlapscope.trace.confidential.pseudonyms import Pseudonyms
from overlapscope.trace.early_ends import EARLY_END_PATTERN, find_run_folder
from overlapscope.trace.folders import attempt_number, find_attempts, is_rank_folder_name, restart_folder
from overlapscope.trace.json_files import (
    dump_json_line,
    dump_json_text,
    from_dict,
    parse_json_text,
    read_lines,
    write_json,
)
from overlapscope.trace.live_files import fingerprints_file
from overlapscope.trace.manifest import Manifest, write_manifest
from overlapscope.trace.process_files import EXITS_PATTERN
from overlapscope.trace.regular_file import match_files, read_regular_file
from overlapscope.trace.schema import (
    FINGERPRINTS_PATTERN,
    GRADIENT_READY_PATTERN,
    LIVENESS_FILE,
    MANIFEST_FILE,
    RANK_FILES,
    REPLICAS_FILE,
    SIGNATURES_FILE,
    STACKS_PATTERN,
    STAGED_PATTERN,
    TABLES_FOLDER,
    FileKind,
)

_DAMAGED_LINE: Final = "?"
_NAMED_BY_PROCESS: Final = re.compile(r"(exits(?=.*\.jsonl$)|early_end(?=.*\.json$))_(.*)_(\d+)\.jsonl?")


@dataclass(frozen=True, kw_only=True)
class CopiedRecording:
    """What was copied."""

    ranks: int
    """Number of folders of ranks, of all attempts."""
    left_out: tuple[str, ...]
    """Files and folders that are not copied, and fields that are not in the allow list, each once."""


def redact_recording(source: Path, target: Path, pseudonyms: Pseudonyms) -> CopiedRecording:
    """Copy a recording with all its attempts.

    Args:
        source: folder of the run, or of one attempt.
        target: folder to create.
        pseudonyms: receives the names that were replaced.

    Raises:
        OverlapScopeError: a file can't be read, or the copy not be written; nothing is left of it then.
    """
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise OverlapScopeError(f"{target}: can't be created ({error.strerror})") from None
    try:
        attempts = [source] if attempt_number(source) else [source, *find_attempts(source)]
        ranks, files = 0, set[str]()
        for attempt in dict.fromkeys(attempts):
            folder = target if attempt == source else restart_folder(target, attempt_number(attempt))
            folder.mkdir(exist_ok=True)
            ranks += _copy_attempt(attempt, folder, pseudonyms, files)
        if attempt_number(source):  # beside the folders of all attempts
            files |= {path.name for path in match_files(find_run_folder(source), EARLY_END_PATTERN)}
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise OverlapScopeError(f"{error.filename or source}: can't be copied ({error.strerror})") from None
        raise
    return CopiedRecording(ranks=ranks, left_out=tuple(sorted(files | pseudonyms.unknown)))


def _copy_attempt(source: Path, target: Path, pseudonyms: Pseudonyms, left_out: set[str]) -> int:
    ranks = 0
    for path in sorted(source.iterdir()):
        if is_rank_folder_name(path.name) and path.is_dir():
            (target / path.name).mkdir()
            _copy_rank(path, target / path.name, pseudonyms, left_out)
            ranks += 1
        elif (found := _name_in_copy(path.name, pseudonyms)) is not None and path.is_file():
            _copy_text(path, target / found[1], found[0], pseudonyms)
        elif path.name != TABLES_FOLDER and not attempt_number(path):
            left_out.add(path.name)
    return ranks


def _name_in_copy(name: str, pseudonyms: Pseudonyms) -> tuple[str, str] | None:
    """Return the rule of a file beside the folders of ranks, and its name in the copy; None if it is none of ours."""
    if found := _NAMED_BY_PROCESS.fullmatch(name):
        what, host, pid = found.groups()
        pattern = EXITS_PATTERN if what == "exits" else EARLY_END_PATTERN
        return pattern, pattern.replace("*", f"{pseudonyms.hide('host', host)}_{pid}")
    return (name, name) if name in RULES and not any(kind.name == name for kind in RANK_FILES) else None


def _copy_rank(source: Path, target: Path, pseudonyms: Pseudonyms, left_out: set[str]) -> None:
    found = {path: kind for path in sorted(source.iterdir()) if (kind := _find_kind(path.name)) and path.is_file()}
    left_out |= {path.name for path in source.iterdir() if path not in found and not _is_draft(path.name)}
    is_text = {path: kind.name in RULES for path, kind in found.items()}
    for path in [path for path in found if is_text[path]]:
        _copy_text(path, target / path.name, found[path].name, pseudonyms)
    signatures = dict(read_lines(target / SIGNATURES_FILE, [], _parse_signature))
    tensors = dict(read_lines(source / REPLICAS_FILE, [], lambda line: [(int(line["model"]), len(line["tensors"]))]))
    for path in [path for path in found if not is_text[path]]:
        _copy_binary(path, target / path.name, found[path], pseudonyms, signatures, tensors)
    if (source / MANIFEST_FILE).exists():
        _copy_manifest(source, target)


def _is_draft(name: str) -> bool:
    """Return True for what was about to replace a file when its process was killed."""
    return fnmatchcase(name, STAGED_PATTERN) and _find_kind(Path(name).stem) is not None


def _find_kind(name: str) -> FileKind | None:
    return next((kind for kind in RANK_FILES if re.fullmatch(re.escape(kind.name).replace(r"\*", r"\d+"), name)), None)


def _parse_signature(line: Any) -> list[tuple[int, Signature]]:
    return [(int(line["signature"]), from_dict(Signature, line))]


def _copy_binary(
    source: Path,
    target: Path,
    kind: FileKind,
    pseudonyms: Pseudonyms,
    signatures: dict[int, Signature],
    tensors: dict[int, int],
) -> None:
    number = int(digits) if (digits := source.stem.rpartition("_")[2]).isdecimal() else 0
    if kind.name == STACKS_PATTERN:
        text = read_regular_file(source).decode(errors="replace")
        target.write_text(hide_stacks(pseudonyms, text), encoding="utf-8")
    elif kind.name == FINGERPRINTS_PATTERN:
        if number in tensors and source.name == fingerprints_file(number):
            logs.copy_fingerprints(source, target, pseudonyms, tensors[number])
    elif kind.name == GRADIENT_READY_PATTERN:
        logs.copy_ready_gradients(source, target, number)
    elif kind.name == LIVENESS_FILE:
        logs.copy_liveness(source, target)
    elif kind.is_log and fnmatchcase(source.name, "[gp]*"):
        logs.copy_collective_log(source, target, pseudonyms, signatures)
    elif kind.is_log:
        logs.copy_event_log(source, target, pseudonyms)


def _copy_text(source: Path, target: Path, kind: str, pseudonyms: Pseudonyms) -> None:
    """Copy a JSON file or a file of JSON lines; what can't be parsed can't be in the copy either."""
    data = read_regular_file(source)
    if not kind.endswith(".jsonl"):
        content = _parse(data)
        text = logs.DAMAGED.decode() if content is None else dump_json_text(hide_content(pseudonyms, kind, content))
    else:
        text = "".join(_copy_lines(data, kind, pseudonyms))
    target.write_text(text, encoding="utf-8")


def _copy_lines(data: bytes, kind: str, pseudonyms: Pseudonyms) -> Iterator[str]:
    *lines, _ = data.split(b"\n")  # after the last line end there is nothing, or a line that was being written
    for line in lines:
        content = _parse(line)
        if content is None:
            yield f"{_DAMAGED_LINE if line else ''}\n"
        else:
            yield dump_json_line(hide_content(pseudonyms, kind, content))


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        content = parse_json_text(data)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _copy_manifest(source: Path, target: Path) -> None:
    """Write a manifest of the copy in which files are damaged that are so in the original."""
    problems: list[Problem] = []
    before = Manifest(source, problems)
    write_manifest(target)
    written = _parse((target / MANIFEST_FILE).read_bytes()) or {}
    files: dict[str, dict[str, int]] = {}
    for name, mark in before.files.items():
        if _find_kind(name) is None:
            continue
        now = written.get("files", {}).get(name)
        if not before.is_damaged(name):
            files |= {name: now} if now is not None else {}
        elif now is None or "crc32_of_bytes" not in now:
            size = mark.get("bytes") if isinstance(mark, dict) else None
            files[name] = {"bytes": size if isinstance(size, int) else 0}
        else:
            files[name] = {"bytes": now["bytes"], "crc32_of_bytes": now["crc32_of_bytes"] ^ 1}
    if problems:
        (target / MANIFEST_FILE).write_bytes(logs.DAMAGED)
    else:
        write_json(target / MANIFEST_FILE, {"files": files})
