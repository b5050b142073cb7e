"""Ways to damage a recording, as disks, copies and people do."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

DEPTH: Final = 300_000
ENDINGS: Final = ("ended.json", "manifest.json", "reports.jsonl", "incident_*.log", "stall.json")

Damage = Callable[[random.Random, Path, Path], str]
"""Damages a copy of a recording, given another recording too, and returns what it has done."""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _any_file(random_: random.Random, folder: Path) -> Path:
    return random_.choice(_files(folder) or [folder])


def _is_writable(path: Path) -> bool:
    """Return whether a file is there, or nothing: no pipe, folder or link, which an earlier damage may have left."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


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
        for path in [found for pattern in ENDINGS for found in rank.glob(pattern) if found.is_file()]:
            path.unlink()
    return f"lost the endings of {[rank.name for rank in chosen]}"


def fill_disk(random_: random.Random, folder: Path, _: Path) -> str:
    """Write nothing any more from some moment on, of one rank: texts end there, logs hold zeros."""
    rank = _any_rank(random_, folder)
    share, lost = random_.random(), [path for pattern in ENDINGS for path in rank.glob(pattern) if path.is_file()]
    for path in lost:
        path.unlink()
    for path in (path for path in _files(rank) if rank != folder and path.suffix in (".jsonl", ".log", ".bin")):
        data = path.read_bytes()
        used = int(len(data.rstrip(b"\0")) * share)
        path.write_bytes(data[:used] + (b"" if path.suffix == ".jsonl" else bytes(len(data) - used)))
    return f"wrote only {share:.2f} of {rank.name}"


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
    if not _is_writable(other):
        return "nothing"
    data = one.read_bytes()
    if other.is_file() and random_.random() < 0.7:
        one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    return f"swapped {one.relative_to(folder)} and {other.relative_to(folder)}"


def take_file(random_: random.Random, folder: Path, foreign: Path) -> str:
    """Take a file from another job."""
    other = _any_file(random_, foreign)
    target = folder / other.relative_to(foreign)
    if not target.parent.is_dir() or not _is_writable(target) or not other.is_file():
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
    fill_disk,
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
