"""Readers of untrusted pickles and JSON: the result is plain values or a one-sentence error, whatever the file holds.

A pickle is a program, and Python's own unpickler runs it: it calls what the file names, and allocates what the file
requests. The reader here knows only the instructions that build dictionaries, lists, tuples, strings, bytes, numbers,
booleans and None, so there is nothing to call. Lengths are compared with the remaining size of the file before anything
is allocated. PyTorch's writer (``torch/csrc/jit/serialization/pickler.cpp``) uses some of these instructions; the
others are what Python's own ``pickle.dump`` writes for such values, with protocol 2 and later.

Limits keep a malicious file from costing much memory or time. They are far above what a Flight Recorder writes: 2,000
entries by default, at most a few megabytes per rank.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.regular_file import open_regular_file

MAX_BYTES: Final = 64 * 1024**2
"""Size above which a file is rejected: it could hold 60 times the entries that a Flight Recorder keeps by default."""
MAX_VALUES: Final = 10_000_000
"""Number of values, stored in a file or expanded from it, above which the file is rejected."""
MAX_NESTING: Final = 32
"""Maximum depth of nested containers; a dump has five levels."""
_CONTAINERS: Final = (dict, list, tuple)


def read_bytes(path: Path) -> bytes:
    """Read the content of a file.

    Raises:
        OverlapScopeError: the file is not a regular file, empty, too large, or can't be read.
    """
    try:
        with open_regular_file(path) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise OverlapScopeError(
            f"{path}: larger than {MAX_BYTES // 1024**2} MB, unlike any Flight Recorder dump; dump "
            f"again with a smaller TORCH_FR_BUFFER_SIZE"
        )
    if not content:
        raise OverlapScopeError(f"{path}: empty; its process was probably killed before it could write the dump")
    return content


def check_size_and_depth(value: Any, path: Path) -> None:
    """Reject a value that is nested too deeply, contains itself, or is small only because its parts are shared.

    Twenty nested lists of ten references each take little memory, but 10^20 steps to traverse.

    Raises:
        OverlapScopeError: the value is one of these.
    """
    extents: dict[int, tuple[int, int]] = {}  # by id: number of values inside, and depth

    def extent(container: Any, depth: int) -> tuple[int, int]:
        if depth > MAX_NESTING:
            raise OverlapScopeError(f"{path}: refused; nested more than {MAX_NESTING} deep, unlike any real dump")
        known = extents.get(id(container))
        if known is None:
            values, height = len(container), 1
            for part in container.values() if isinstance(container, dict) else container:
                if isinstance(part, _CONTAINERS):
                    inner_values, inner_height = extent(part, depth + 1)
                    values += inner_values
                    height = max(height, inner_height + 1)
            known = extents[id(container)] = values, height
        elif depth + known[1] - 1 > MAX_NESTING:
            raise OverlapScopeError(f"{path}: refused; nested more than {MAX_NESTING} deep, unlike any real dump")
        return known

    if isinstance(value, _CONTAINERS) and extent(value, 1)[0] > MAX_VALUES:
        raise OverlapScopeError(f"{path}: refused; it expands to more than {MAX_VALUES:,} values")


_PROTOCOLS: Final = range(2, 6)
_LARGEST_INTEGER_BYTES: Final = 8
_STOP: Final = ord(".")


class _Refused(Exception):  # noqa: N818, internal
    """Error in a pickle; ``load_pickle`` adds the offset and the file."""


_MARK: Final = object()
"""Mark on the stack where a list, tuple or dictionary begins."""


def load_pickle(data: bytes, path: Path) -> Any:
    """Read the value that ``data`` holds, without executing anything.

    Args:
        data: content of the file.
        path: path of the file, for messages.

    Raises:
        OverlapScopeError: the data is not a pickle, holds anything but plain values, is truncated or damaged, continues
            after its end, or needs more memory than a file of its length may.
    """
    machine = _Machine(data)
    try:
        value = machine.run()
    except _Refused as refusal:
        raise OverlapScopeError(f"{path}: refused at offset {machine.last}: {refusal}") from None
    check_size_and_depth(value, path)
    return value


class _Machine:
    """Stack machine for pickle programs, with only the instructions that build plain values."""

    def __init__(self, data: bytes) -> None:
        self.last = 0
        """Offset of the current instruction."""
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}  # a dictionary, because an index may be any number

    def run(self) -> Any:
        data = self._data
        if data[:1] != b"\x80":
            raise _Refused("not a pickle of protocol 2 or newer, as a Flight Recorder dump is unless it is JSON")
        if len(data) > 1 and data[1] not in _PROTOCOLS:
            raise _Refused(f"pickle protocol {data[1]}; only {_PROTOCOLS[0]} to {_PROTOCOLS[-1]} are known")
        instructions = _INSTRUCTIONS
        for _ in range(MAX_VALUES):
            self.last = self._at
            if self.last >= len(data):
                raise _Refused("cut short; copy or dump it again")
            code = data[self.last]
            self._at += 1
            if code == _STOP:
                return self._end()
            instruction = instructions.get(code)
            if instruction is None:
                raise _Refused(_forbidden(code))
            instruction(self)
        raise _Refused(f"more than {MAX_VALUES:,} instructions")

    def _end(self) -> Any:
        if self._at != len(self._data):
            raise _Refused(f"{len(self._data) - self._at} bytes follow the end of the pickle; copy or dump it again")
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise _Refused("damaged: it does not end with one value; copy or dump it again")
        return self._stack[0]

    # Readers of instruction operands.

    def _take(self, length: int) -> bytes:
        begin, end = self._at, self._at + length
        if end > len(self._data):
            left = len(self._data) - begin
            raise _Refused(f"{length:,} bytes should follow, {left:,} do; copy or dump it again")
        self._at = end
        return self._data[begin:end]

    def _byte(self) -> int:
        begin = self._at
        if begin >= len(self._data):
            raise _Refused("cut short; copy or dump it again")
        self._at = begin + 1
        return self._data[begin]

    def _number(self, length: int) -> int:
        return int.from_bytes(self._take(length), "little")

    def _text(self, length: int) -> str:
        return self._take(length).decode("utf-8", errors="replace")

    # Operations on the stack.

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise _Refused("damaged: a value is missing; copy or dump it again")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        stack = self._stack
        for index_on_stack in range(len(stack) - 1, -1, -1):
            if stack[index_on_stack] is _MARK:
                values = stack[index_on_stack + 1 :]
                del stack[index_on_stack:]
                return values
        raise _Refused("damaged: a container has no start; copy or dump it again")

    def _tuple(self, length: int) -> None:
        values = [self._pop() for _ in range(length)]
        self._stack.append(tuple(reversed(values)))

    def _append(self, values: list[Any]) -> None:
        if not self._stack or type(self._stack[-1]) is not list:
            raise _Refused("damaged: values without a list; copy or dump it again")
        self._stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        if not self._stack or type(self._stack[-1]) is not dict or len(values) % 2:
            raise _Refused("damaged: values without a dictionary; copy or dump it again")
        for key in values[::2]:
            # Hashing a tuple of tuples can take forever, and a dictionary can't be hashed.
            if type(key) is not str and type(key) is not int:
                raise _Refused(f"a {type(key).__name__} as the key of a dictionary; keys are strings and integers")
        self._stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def _put(self, index: int) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            raise _Refused("damaged: nothing to remember; copy or dump it again")
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise _Refused(f"damaged: value {index} was never stored; copy or dump it again")
        self._stack.append(self._memo[index])

    # Instructions that combine these.

    def _protocol(self) -> None:
        if self.last != 0:
            raise _Refused("damaged: a second start; copy or dump it again")
        self._take(1)

    def _frame(self) -> None:
        length = self._number(8)
        if length > len(self._data) - self._at:
            raise _Refused(f"{length:,} bytes should follow, {len(self._data) - self._at:,} do; copy or dump it again")

    def _long(self) -> None:
        length = self._byte()
        if length > _LARGEST_INTEGER_BYTES:
            raise _Refused(f"an integer of {length} bytes; a Flight Recorder writes at most {_LARGEST_INTEGER_BYTES}")
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))


def _forbidden(code: int) -> str:
    # Slow to import, and needed only here.
    from pickletools import opcodes

    name = next((known.name for known in opcodes if known.code == chr(code)), None)
    if name is None:
        return f"not a pickle (byte 0x{code:02x}); copy or dump it again"
    return f"{name} is not plain data and may run code; don't load this file with pickle.load either"


def _new(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        machine._stack.append(make())

    return instruction


def _read(value_of: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def instruction(machine: _Machine) -> None:
        machine._stack.append(value_of(machine))

    return instruction


_INSTRUCTIONS: Final[dict[int, Callable[[_Machine], None]]] = {
    ord(code): instruction
    for code, instruction in {
        "\x80": _Machine._protocol,
        "\x95": _Machine._frame,
        "(": _new(lambda: _MARK),
        "N": _new(lambda: None),
        "\x88": _new(lambda: True),
        "\x89": _new(lambda: False),
        "K": _read(lambda m: m._byte()),
        "M": _read(lambda m: m._number(2)),
        "J": _read(lambda m: struct.unpack("<i", m._take(4))[0]),
        "\x8a": _Machine._long,
        "G": _read(lambda m: struct.unpack(">d", m._take(8))[0]),
        "X": _read(lambda m: m._text(m._number(4))),
        "\x8c": _read(lambda m: m._text(m._byte())),
        "\x8d": _read(lambda m: m._text(m._number(8))),
        "C": _read(lambda m: m._take(m._byte())),
        "B": _read(lambda m: m._take(m._number(4))),
        "\x8e": _read(lambda m: m._take(m._number(8))),
        "]": _new(list),
        "}": _new(dict),
        ")": _new(tuple),
        "\x85": lambda m: m._tuple(1),
        "\x86": lambda m: m._tuple(2),
        "\x87": lambda m: m._tuple(3),
        "t": lambda m: m._stack.append(tuple(m._pop_to_mark())),
        "a": lambda m: m._append([m._pop()]),
        "e": lambda m: m._append(m._pop_to_mark()),
        "s": lambda m: m._set([m._pop(), m._pop()][::-1]),
        "u": lambda m: m._set(m._pop_to_mark()),
        "q": lambda m: m._put(m._byte()),
        "r": lambda m: m._put(m._number(4)),
        "\x94": lambda m: m._put(len(m._memo)),
        "h": lambda m: m._get(m._byte()),
        "j": lambda m: m._get(m._number(4)),
    }.items()
}
"""Implementation of each allowed opcode of a pickle."""


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
