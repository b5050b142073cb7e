"""Parser of untrusted JSON: whatever the text is, the result is a dictionary or a one-sentence error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.untrusted_file import MAX_NESTING, MAX_VALUES, check_size_and_depth

_RETRY_HINT = "copy or dump it again"


def load_json(text: bytes, path: Path) -> dict[str, Any]:
    """Parse the object that ``text`` holds.

    Args:
        text: content of the file.
        path: path of the file, for messages.

    Raises:
        OverlapScopeError: the text is not one JSON object, truncated, too large, nested too deeply, or has a duplicate
            key or a number that is not JSON.
    """
    # Each of these may become an object of 60 bytes or more.
    if sum(text.count(mark) for mark in b",[{") > MAX_VALUES:
        raise OverlapScopeError(f"{path}: refused; it holds more than {MAX_VALUES:,} values")

    def refuse_number(number: str) -> NoReturn:
        raise OverlapScopeError(f"{path}: damaged; {number} is not JSON; {_RETRY_HINT}")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            raise OverlapScopeError(f"{path}: damaged; an object has a duplicate key; {_RETRY_HINT}")
        return content

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=refuse_number)
    except RecursionError:
        raise OverlapScopeError(
            f"{path}: refused; nested more than {MAX_NESTING} deep, unlike any Flight Recorder dump"
        ) from None
    except UnicodeDecodeError as error:
        raise OverlapScopeError(f"{path}: not JSON (offset {error.start}: not UTF-8); {_RETRY_HINT}") from None
    except json.JSONDecodeError as error:
        raise OverlapScopeError(
            f"{path}: damaged or cut short at offset {error.pos} ({error.msg}); {_RETRY_HINT}"
        ) from None
    except ValueError:  # Python refuses numbers of more than 4,300 digits
        raise OverlapScopeError(f"{path}: refused; a number has thousands of digits; {_RETRY_HINT}") from None
    if not isinstance(content, dict):
        raise OverlapScopeError(f"{path}: not a Flight Recorder dump; it holds no JSON object")
    check_size_and_depth(content, path)
    return content
