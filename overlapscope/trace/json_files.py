"""JSON files of a recording: written with checksums, read with problems, converted to dataclasses and back.

A text has its checksum as its last key, ``"crc32": "1a2b3c4d"``: the CRC-32 of the text without the line end, with
zeros in place of the eight digits. A text without a checksum, such as one written by hand, is taken as it is.
"""

from __future__ import annotations

import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar
from zlib import crc32

from overlapscope.errors import Problem
from overlapscope.trace.regular_file import parse_once, read_regular_file

T = TypeVar("T")
Row = TypeVar("Row")

MANIFEST_NAME: Final = "manifest.json"
CHECKSUM_KEY: Final = "crc32"
_MAX_NESTING: Final = 64
"""Depth above which a text is damage: ours have five levels."""
_NO_DIGITS: Final = b"00000000"
_CHECKSUM: Final = re.compile(rb'"crc32": ?"(.{8})"\s*\}\s*\Z', re.DOTALL)


def dump_json_line(content: Mapping[str, Any]) -> str:
    """Serialize a line of a ``.jsonl`` file, with its checksum and line end."""
    text = json.dumps(_without_checksum(content), separators=(",", ":"))
    return _with_checksum(text[:-1] + f',"{CHECKSUM_KEY}":"00000000"}}') + "\n"


def dump_json_text(content: Mapping[str, Any]) -> str:
    """Serialize a JSON file that people read too: indented and sorted by key, with its checksum."""
    text = json.dumps(_without_checksum(content), indent=1, sort_keys=True)
    return _with_checksum(text.removesuffix("\n}") + f',\n "{CHECKSUM_KEY}": "00000000"\n}}') + "\n"


def parse_json_text(data: bytes) -> Any:
    """Parse a JSON text with or without a checksum, and drop the checksum.

    Raises:
        ValueError: the text is not JSON, or its checksum is wrong.
    """
    content = _load(data)
    found = _CHECKSUM.search(data)
    if found is not None:
        begin, end = found.span(1)
        if found[1] != b"%08x" % crc32(data[:begin] + _NO_DIGITS + data[end:].rstrip(b"\n")):
            raise ValueError("its checksum is wrong")
    return _without_checksum(content) if isinstance(content, dict) else content


def _load(data: bytes) -> Any:
    """Parse a JSON text, unless it is nested so deeply that whoever walks through it would fail."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if data.count(b"[") + data.count(b"{") > _MAX_NESTING and _is_too_deep(content):
        raise ValueError("nested too deeply")
    return _replace_half_characters(content) if rb"\ud" in data or rb"\uD" in data else content


def _replace_half_characters(content: Any) -> Any:
    """Return a content without halves of characters, which only an escape can bring and no other text can hold."""
    if isinstance(content, str):
        return content.encode(errors="replace").decode()
    if isinstance(content, dict):
        return {_replace_half_characters(key): _replace_half_characters(one) for key, one in content.items()}
    return [_replace_half_characters(one) for one in content] if isinstance(content, list) else content


def _is_too_deep(content: Any) -> bool:
    level = [content]
    for _ in range(_MAX_NESTING):
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return False
    return True


def _without_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != CHECKSUM_KEY}


def _with_checksum(text: str) -> str:
    """Replace the zeros at the end of a text by its checksum."""
    data = text.encode()
    begin = data.rindex(_NO_DIGITS)
    return text[:begin] + f"{crc32(data):08x}" + text[begin + len(_NO_DIGITS) :]


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically: a reader sees the old one or the new one, never half of it."""
    staged = path.with_name(f"{path.name}.part")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small JSON file atomically."""
    replace_text(path, dump_json_text(content))


def read_json(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Read the JSON object in a small file; return an empty one and add a problem if it can't be read."""
    content, problem = parse_once("JSON", path, partial(_read_object, path))
    if problem is not None:
        problems.append(problem)
    return dict(content)


def _read_object(path: Path) -> tuple[dict[str, Any], Problem | None]:
    try:
        data = read_regular_file(path)
        content = parse_once("JSON text", path, partial(parse_json_text, data))
    except (OSError, ValueError) as error:
        return {}, _unreadable(path, error)
    if not isinstance(content, dict):
        return {}, Problem("error", f"{path}: damaged; it does not hold a JSON object")
    return ({}, _replaced(path)) if _is_replaced(path, data) else (content, None)


def _is_replaced(path: Path, data: bytes) -> bool:
    """Return whether another file has taken the place of the one that its rank wrote, according to its manifest.

    Such as that of another rank or job: intact, so that its own checksums are right, and of no rank here.
    """
    folder, name = os.path.split(path)  # of every small file: strings are quicker
    manifest = os.path.join(folder, MANIFEST_NAME)
    listed = parse_once("listed files", manifest, partial(_read_listed, manifest)).get(name)
    if not isinstance(listed, dict):
        return False
    size, checksum = listed.get("bytes"), listed.get("crc32_of_bytes")
    return isinstance(size, int) and isinstance(checksum, int) and crc32(data[: max(0, size)]) != checksum


def _read_listed(manifest: str) -> dict[str, Any]:
    try:
        found = os.stat(manifest)
    except OSError:
        return {}
    return _listed_in(manifest, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _listed_in(manifest: str, _mtime_ns: int, _size: int) -> dict[str, Any]:
    try:
        files = parse_once("JSON text", manifest, lambda: parse_json_text(read_regular_file(Path(manifest))))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return files if isinstance(files, dict) else {}


def _replaced(path: Path) -> Problem:
    return Problem("error", f"{path}: not the file that this rank wrote, according to {MANIFEST_NAME}; it is left out")


def _unreadable(path: Path, error: OSError | ValueError) -> Problem:
    reason = error.strerror if isinstance(error, OSError) else error
    return Problem("error", f"{path}: can't be read ({reason})")


def read_lines(
    path: Path,
    problems: list[Problem],
    rows_of: Callable[[Any], Iterable[Row]],
    choose: Callable[[list[bytes]], list[int]] | None = None,
    known: dict[bytes, list[Row]] | None = None,
) -> list[Row]:
    """Read the rows of a JSON Lines file, skipping damaged lines; a truncated last line is skipped silently.

    Args:
        rows_of: returns the rows of one line's content.
        choose: returns the indices of the lines to read, of a file that may be long; by default all are read.
        known: rows of intact files by their content, to which this file's are added.
    """
    try:
        data = read_regular_file(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(_unreadable(path, error))
        return []
    found = len(problems)
    if known is None:
        rows = _parse_lines(path, data, problems, rows_of, choose)
    elif (rows_before := known.get(data)) is not None:
        rows = rows_before
    else:
        rows = _parse_lines(path, data, problems, rows_of, choose)
        if len(problems) == found:
            known[data] = rows
    if len(problems) == found and _is_replaced(path, data):
        problems.append(_replaced(path))
        return []
    return rows


def _parse_lines(
    path: Path,
    data: bytes,
    problems: list[Problem],
    rows_of: Callable[[Any], Iterable[Row]],
    choose: Callable[[list[bytes]], list[int]] | None,
) -> list[Row]:
    rows: list[Row] = []
    lines = data.split(b"\n")
    for index in range(len(lines)) if choose is None else choose(lines):
        number, line = index + 1, lines[index]
        try:
            rows += rows_of(parse_json_text(line)) if line else ()
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            if number < len(lines):  # after the last line end there is nothing
                problems.append(Problem("error", f"{path}: line {number} is damaged and skipped"))
    return rows


_PRIMITIVES: Final = (int, str, float, bool)


def to_json(thing: Any) -> str:
    """Serialize a dataclass to one line."""
    return json.dumps(thing, separators=(",", ":"), default=vars)  # asdict copies everything, at several times the cost


def from_json(cls: type[T], text: str | bytes) -> T:
    """Parse the output of ``to_json``.

    Raises:
        KeyError, TypeError, ValueError: ``text`` is not a valid ``cls``.
    """
    return from_dict(cls, _load(text.encode() if isinstance(text, str) else text))


def from_dict(cls: type[T], plain: dict[str, Any]) -> T:
    """Rebuild a dataclass from the output of ``dataclasses.asdict`` and JSON. Unknown fields are ignored.

    Raises:
        KeyError, TypeError, ValueError: ``plain`` is not a valid ``cls``: a field is missing, or of another type.
    """
    hints = _hints_of(cls)  # type: ignore[arg-type] # classes are hashable
    return cls(**{name: _value(hints[name], value) for name, value in plain.items() if name in hints})


def read_dataclass(cls: type[T], path: Path, problems: list[Problem]) -> T | None:
    """Read a small JSON file that holds a dataclass; None if it is missing or damaged."""
    content = read_json(path, problems) if path.exists() else {}
    if not content:
        return None
    try:
        return from_dict(cls, content)
    except (KeyError, TypeError, ValueError):
        problems.append(Problem("error", f"{path}: damaged; what it holds is unknown"))
        return None


def read_dataclasses(cls: type[T], path: Path, problems: list[Problem]) -> tuple[T, ...]:
    """Read a JSON Lines file that holds a dataclass per line; none if it is missing."""
    return tuple(read_lines(path, problems, lambda line: [from_dict(cls, line)]))


@cache
def _hints_of(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _value(hint: Any, value: Any) -> Any:
    if hint in _PRIMITIVES:
        return _primitive(hint, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _value(next(one for one in arguments if one is not type(None)), value)
    if origin is typing.Literal:  # one that this version does not know is no damage
        return _primitive(type(arguments[0]), value)
    if origin is tuple:
        if arguments[0] in _PRIMITIVES and arguments[-1] is Ellipsis:
            return tuple(value)
        hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_value(one, item) for one, item in zip(hints, value, strict=True))
    if origin is dict:
        of_key, of_value = arguments
        return {of_key(key): _value(of_value, item) for key, item in value.items()}
    if is_dataclass(hint):
        return from_dict(hint, value)  # type: ignore[arg-type] # is_dataclass is true of instances as well
    return value


def _primitive(hint: Any, value: Any) -> Any:
    if not isinstance(value, (int, float) if hint is float else hint):
        raise TypeError(f"{value!r} is not of type {hint.__name__}")
    return value
