"""Answers of ``overlapscope mcp``: what a command prints with ``--json``, small enough for the context of an agent.

An answer that is too large is shortened, and says so under ``omitted``: first long lists of numbers and names, then
whatever list of objects takes most, at most half of it at a time. Of ranks and steps those stay that matter most.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from overlapscope.errors import OverlapScopeError, make_printable
from overlapscope.report.render_json import to_plain
from overlapscope.text import format_ranks, parse_ranks

MOST_CHARACTERS: Final = 32_000
"""Maximum size of an answer as JSON: some 10,000 tokens, beyond which agents begin to cut answers off themselves."""

_MOST_VALUES: Final = 16
"""Number of numbers or names to which a list of them is shortened."""
_MOST_LETTERS: Final = 500
"""Number of characters to which a text is shortened."""
_MOST_KEYS: Final = 64
"""Maximum number of keys of an object that is documented; one that has more is a map, and shortened like a list."""
_LEAST_COMPARED: Final = 2
"""Number of ranks to which a map by rank is shortened at most, because one alone shows no difference."""
_MOST_DIGITS: Final = 9
"""Number of digits that a rank has at most; a key with more is something else."""
_MOST_ROWS: Final = 256
"""Number of rows of a table of all steps that are looked at."""

Content = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Omission:
    """Values that were left out of an answer."""

    key: str
    """Path of the list or map, such as ``by_rank`` or ``sizes[].buckets``."""
    shown: int
    of: int


def limit_content(
    content: Mapping[str, Any], ranks: str = "", most_characters: int = MOST_CHARACTERS
) -> tuple[Content, list[Omission]]:
    """Return the content of a report as plain values, of some ranks only, small enough for an agent.

    Args:
        content: content of a report.
        ranks: ranks and ranges such as ``0-7, 12``; empty for all.
        most_characters: maximum size as JSON.

    Raises:
        OverlapScopeError: there is no such rank, or the content can't be shortened that much.
    """
    chosen = _parse_known_ranks(ranks, content)
    found: dict[str, Omission] = {}
    selected = {key: _select_rows(key, value, chosen, found) for key, value in content.items()}
    plain: Content = _make_visible(json.loads(json.dumps(to_plain(selected), allow_nan=False)))
    if chosen is not None:
        plain = _keep_ranks(plain, frozenset(chosen))
    _shorten(plain, most_characters, found)
    return plain, list(found.values())


def _make_visible(value: Any) -> Any:
    """Return a plain value without characters that people don't see and a model reads: names may hold any."""
    if isinstance(value, str):
        return make_printable(value, keep="\t\n")
    if isinstance(value, dict):
        return {make_printable(key): _make_visible(item) for key, item in value.items()}
    return [_make_visible(item) for item in value] if isinstance(value, list) else value


def _select_rows(key: str, value: Any, chosen: Sequence[int] | None, found: dict[str, Omission]) -> Any:
    """Return the longest steps of a table of all steps, before they become objects; other values as they are."""
    if not hasattr(value, "to_dict"):
        return value
    rows = value if chosen is None else value[value["rank"].isin(chosen)]
    if len(rows) <= _MOST_ROWS:
        return rows
    _note(found, key, _MOST_ROWS, len(rows))
    return rows.loc[rows["step_time_ns"].nlargest(_MOST_ROWS).index.sort_values()]


def _parse_known_ranks(ranks: str, content: Mapping[str, Any]) -> list[int] | None:
    if not ranks.strip():
        return None
    known = sorted({row["rank"] if isinstance(row, Mapping) else row for row in content["ranks"]})
    chosen, unknown = parse_ranks(ranks, known)
    if unknown or not chosen:
        there_are = f"there are {format_ranks(known)}" if known else "there is none"
        raise OverlapScopeError(f"ranks={ranks!r}: no such rank; {there_are}")
    return chosen


def _keep_ranks(value: Any, chosen: frozenset[int]) -> Any:
    """Return a plain value with the rows of these ranks only, in lists of rows and in maps by rank."""
    if isinstance(value, dict):
        if _is_by_rank(value):
            value = {key: item for key, item in value.items() if int(key) in chosen}
        return {key: _keep_ranks(item, chosen) for key, item in value.items()}
    if isinstance(value, list):
        return [_keep_ranks(item, chosen) for item in value if _rank_of(item) in (chosen | {None})]
    return value


def _shorten(content: Content, most_characters: int, found: dict[str, Omission]) -> None:
    """Shorten plain content in place until it fits, and note what was left out."""
    if _size(content) <= most_characters:
        return
    weigh = _Importance(content)
    _shorten_values(content, "", found)
    while (excess := _size(content) - most_characters) > 0:
        largest = max(_list_collections(content, ""), key=lambda each: _size(each[1]), default=None)
        if largest is None:
            raise OverlapScopeError("its answer is too large and can't be shortened; use the command line with --json")
        path, values = largest
        enough = int(len(values) * (1 - excess / _size(values)))
        kept = min(max(enough, (len(values) + 1) // 2), len(values) - 1)
        _note(found, path, kept, len(values))
        weigh.keep(values, kept)


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _note(found: dict[str, Omission], path: str, shown: int, of: int) -> None:
    known = found.get(path)
    found[path] = Omission(key=path, shown=shown, of=of if known is None else max(known.of, of))


def _shorten_values(value: Any, path: str, found: dict[str, Omission]) -> Any:
    """Shorten long texts, and long lists of numbers and names."""
    if isinstance(value, str):
        return value if len(value) <= _MOST_LETTERS else f"{value[: _MOST_LETTERS - 1]}…"
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _shorten_values(item, _join(path, key, value), found)
    elif isinstance(value, list):
        if len(value) > _MOST_VALUES and not _holds_objects(value):
            _note(found, path, _MOST_VALUES, len(value))
            del value[_MOST_VALUES:]
        value[:] = [_shorten_values(item, f"{path}[]", found) for item in value]
    return value


def _list_collections(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the lists and maps that may be halved, with their paths."""
    if isinstance(value, dict):
        if len(value) > _MOST_KEYS or (_is_by_rank(value) and len(value) > _LEAST_COMPARED):
            yield path, value
        for key, item in value.items():
            yield from _list_collections(item, _join(path, key, value))
    elif isinstance(value, list):
        if len(value) > 1:
            yield path, value
        for item in value:
            yield from _list_collections(item, f"{path}[]")


class _Importance:
    """What matters most in a list or map of an answer.

    Ranks that the answer names come first. Then it is what fixing a rank saves, how long a step is, how near a
    collective is to the one that the verdict names, or else how unlike the others the compute time of a rank is.
    """

    def __init__(self, content: Content) -> None:
        verdict = content.get("verdict")
        groups = [finding.get("ranks") for finding in content.get("findings") or ()]
        self._number = None
        if isinstance(verdict, dict):
            groups += [verdict.get(key) for key in ("blamed", "suspected", "concerned")]
            self._number = verdict.get("number")
        if isinstance(suspect := content.get("suspect"), dict):
            groups.append([suspect.get("rank")])
        self._named = frozenset(rank for group in groups for rank in group or () if isinstance(rank, int))

    def keep(self, values: Any, most: int) -> None:
        """Remove what matters least from a list or map; the order of what stays is kept."""
        if isinstance(values, dict):
            is_by_rank = _is_by_rank(values)
            keys = sorted(values, key=lambda key: not (is_by_rank and int(key) in self._named))
            for key in keys[most:]:
                del values[key]
            return
        compute_ns = [ns for row in values if (ns := _number_in(row, "compute_ns")) is not None]
        usual_ns = median(compute_ns) if compute_ns else 0.0
        ranked = sorted(range(len(values)), key=lambda index: self._weigh(values[index], usual_ns), reverse=True)
        values[:] = [values[index] for index in sorted(ranked[:most])]

    def _weigh(self, row: Any, usual_ns: float) -> tuple[bool, float]:
        step_time_ns, saving_ns = _number_in(row, "step_time_ns"), _number_in(row, "saving_ns")
        number, compute_ns = _number_in(row, "number"), _number_in(row, "compute_ns")
        if step_time_ns is not None and "step" in row:
            return False, step_time_ns
        if number is not None and self._number is not None:
            return False, -abs(number - self._number)
        unlike_ns = 0.0 if compute_ns is None else abs(compute_ns - usual_ns)
        return _rank_of(row) in self._named, unlike_ns if saving_ns is None else saving_ns


def _is_by_rank(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(key.isdecimal() and len(key) <= _MOST_DIGITS for key in value)


def _join(path: str, key: str, parent: Mapping[str, Any]) -> str:
    if _is_by_rank(parent) or len(parent) > _MOST_KEYS:
        return f"{path}[]"
    return f"{path}.{key}" if path else key


def _rank_of(row: Any) -> int | None:
    rank = row.get("rank") if isinstance(row, dict) else None
    return rank if isinstance(rank, int) else None


def _holds_objects(values: Sequence[Any]) -> bool:
    return any(isinstance(value, dict) for value in values)


def _number_in(row: Any, key: str) -> float | None:
    value = row.get(key) if isinstance(row, dict) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
