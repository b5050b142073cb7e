"""Whatever a file holds: plain values or one sentence; nothing is executed, and nothing large is allocated."""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.untrusted import MAX_BYTES, MAX_NESTING, MAX_VALUES, load_pickle, read_bytes

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder"
REAL = (DUMPS / "op_mismatch_gloo" / "pickle" / "trace_0").read_bytes()
SMALL = (DUMPS / "healthy_3" / "trace_0").read_bytes()
FILE = Path("trace_0")

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**63 - 1), inner, max_size=4)
    ),
    max_leaves=20,
)


def refusal(data: bytes) -> str:
    with pytest.raises(OverlapScopeError) as refused:
        load_pickle(data, FILE)
    message = str(refused.value)
    assert message.startswith("trace_0: ")
    assert "\n" not in message
    return message


def most_memory_bytes(data: bytes) -> int:
    tracemalloc.start()
    try:
        refusal(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class WritesAFile:
    """Executes a shell command when it is unpickled by Python's own unpickler."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("folder", sorted(path.name for path in DUMPS.iterdir()))
def test_reads_real_dumps_as_pickle_does(folder: str) -> None:
    files = [path for path in (DUMPS / folder).rglob("trace_*") if path.suffix != ".json"]
    assert files
    for file in files:
        assert load_pickle(file.read_bytes(), file) == pickle.loads(file.read_bytes())


@given(plain, st.integers(2, 5))
def test_reads_plain_values_of_all_protocols_as_pickle_does(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if any(opcode.name == "GLOBAL" for opcode, _, _ in pickletools.genops(data)):  # bytes, before protocol 3
        refusal(data)
    else:
        assert load_pickle(data, FILE) == value


class TestExecution:
    @pytest.mark.parametrize("protocol", range(6))
    def test_runs_no_code(self, tmp_path: Path, protocol: int) -> None:
        marker = tmp_path / "executed"
        data = pickle.dumps({"version": "2.10", "entries": [WritesAFile(marker)]}, protocol)
        refusal(data)
        assert not marker.exists()
        pickle.loads(data)
        assert marker.exists(), "this pickle was not dangerous, so nothing was shown"

    def test_says_which_instruction_and_where(self) -> None:
        data = pickle.dumps(WritesAFile(Path("never")), 4)
        message = refusal(data)
        offset = next(at for opcode, _, at in pickletools.genops(data) if opcode.name == "STACK_GLOBAL")
        assert f"offset {offset}: STACK_GLOBAL" in message
        assert "may run code" in message

    @pytest.mark.parametrize(
        "name",
        [
            "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4",
            "PERSID", "BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER", "BYTEARRAY8", "LONG4", "DUP", "POP", "POP_MARK",
            "EMPTY_SET", "FROZENSET", "ADDITEMS", "INT", "LONG", "FLOAT", "STRING", "UNICODE", "PUT", "GET", "DICT",
            "LIST", "BINSTRING", "SHORT_BINSTRING",
        ],
    )  # fmt: skip
    def test_knows_no_other_instruction(self, name: str) -> None:
        code = next(opcode.code for opcode in pickletools.opcodes if opcode.name == name).encode("latin-1")
        body = b"\x80\x04(]q\x00h\x00" + code + b"cos\nsystem\n\x00\x00\x00\x00\x00\x00\x00\x00."
        assert name in refusal(body)

    @pytest.mark.parametrize(
        "value", [{1, 2}, frozenset([1]), 2**64, 1j, collections.OrderedDict(a=1), bytearray(b"a")]
    )
    def test_refuses_other_types(self, value: Any) -> None:
        refusal(pickle.dumps(value, 4))


class TestMemory:
    @pytest.mark.parametrize(
        "instruction",
        [
            b"\x8e" + struct.pack("<Q", 2 * 1024**3),  # BINBYTES8: Python's own unpickler allocates this
            b"\x8e" + struct.pack("<Q", 2**64 - 1),
            b"\x8d" + struct.pack("<Q", 2 * 1024**3),  # BINUNICODE8
            b"X" + struct.pack("<I", 2 * 1024**3),  # BINUNICODE
            b"B" + struct.pack("<I", 2**32 - 1),  # BINBYTES
            b"\x95" + struct.pack("<Q", 2 * 1024**3),  # FRAME
            b"\x8c\xff",  # SHORT_BINUNICODE
            b"\x8a\xff",  # LONG1
            b"\x8b" + struct.pack("<i", 2**31 - 1),  # LONG4
            b"\x96" + struct.pack("<Q", 2 * 1024**3),  # BYTEARRAY8
        ],
    )
    def test_allocates_nothing_for_a_length_that_the_file_does_not_have(self, instruction: bytes) -> None:
        assert most_memory_bytes(b"\x80\x04" + instruction + b"abc.") < 1_000_000

    def test_keeps_a_memo_of_any_index_small(self) -> None:
        tracemalloc.start()
        assert load_pickle(b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".", FILE) is None
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()

    def test_refuses_what_is_small_only_because_it_is_shared(self) -> None:
        """The billion laughs: each list holds the one before it ten times."""
        laughs = b"]q\x00" + b"".join(b"](" + (b"h" + bytes([n])) * 10 + b"eq" + bytes([n + 1]) for n in range(25))
        message = refusal(b"\x80\x02(" + laughs + b"t.")
        assert f"{MAX_VALUES:,} values" in message

    @pytest.mark.parametrize("depth", [MAX_NESTING + 1, 1000, 100_000])
    def test_refuses_what_is_nested_too_deeply(self, depth: int) -> None:
        assert "deep" in refusal(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
        assert "deep" in refusal(b"\x80\x02N" + b"\x85" * depth + b".")

    def test_refuses_depth_that_is_reached_by_sharing(self) -> None:
        inner: Any = []
        for _ in range(MAX_NESTING - 2):
            inner = [inner]
        refusal(pickle.dumps([inner, [[[inner]]]], 4))
        assert load_pickle(pickle.dumps([inner], 4), FILE) == [inner]

    def test_refuses_a_list_that_holds_itself(self) -> None:
        endless: list[Any] = []
        endless.append(endless)
        refusal(pickle.dumps(endless, 4))
        refusal(pickle.dumps({"entries": [endless] * 5}, 4))

    def test_refuses_more_instructions_than_a_dump_has(self) -> None:
        assert "instructions" in refusal(b"\x80\x02" + b"N" * MAX_VALUES + b".")

    def test_hashes_only_strings_and_integers(self) -> None:
        """A tuple of tuples of the same tuple takes 2^n steps to hash."""
        bomb = b"N" + b"q\x00h\x00\x86" * 60
        assert "key" in refusal(b"\x80\x02}" + bomb + b"Ns.")
        assert "key" in refusal(b"\x80\x02}]Ns.")

    def test_reads_no_file_larger_than_a_dump(self, tmp_path: Path) -> None:
        large = tmp_path / "trace_0"
        with large.open("wb") as file:
            file.truncate(MAX_BYTES + 1)
        with pytest.raises(OverlapScopeError, match="larger than 64 MB"):
            read_bytes(large)

    def test_waits_for_no_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "trace_0")
        with pytest.raises(OverlapScopeError, match="not a file"):
            read_bytes(tmp_path / "trace_0")


class TestDamage:
    def test_refuses_a_real_dump_that_is_cut_anywhere(self) -> None:
        for length in range(len(SMALL)):
            refusal(SMALL[:length])

    def test_refuses_what_follows_the_end(self) -> None:
        assert "follow" in refusal(SMALL + b"\x00")
        assert "follow" in refusal(SMALL + SMALL)

    @pytest.mark.parametrize("protocol", [0, 1])
    def test_refuses_the_protocols_before_two(self, protocol: int) -> None:
        assert "protocol" in refusal(pickle.dumps({"version": "2.10"}, protocol))

    @pytest.mark.parametrize("version", [0, 1, 6, 255])
    def test_refuses_unknown_protocols(self, version: int) -> None:
        assert f"protocol {version}" in refusal(b"\x80" + bytes([version]) + b"N.")

    @pytest.mark.parametrize(
        "data",
        [b"", b"\x80", b"\x80\x02", b".", b"hello", b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"\x00" * 100, b"\xff" * 9],
    )
    def test_refuses_what_is_no_pickle(self, data: bytes) -> None:
        refusal(data)

    @pytest.mark.parametrize(
        "body",
        [b".", b"(.", b"NN.", b"a.", b"]a.", b"Na.", b"e.", b"(e.", b"](N", b"N(u.", b"}(Nu.", b"}Ns.", b"NNs.", b"t.",
         b"\x85.", b"N\x86.", b"(\x85.", b"q\x00.", b"(q\x00.", b"h\x05.", b"N\x80\x02.", b"j\xff\xff\xff\xff."],
    )  # fmt: skip
    def test_refuses_programs_that_make_no_value(self, body: bytes) -> None:
        refusal(b"\x80\x02" + body)

    @given(st.binary(max_size=300))
    def test_answers_random_bytes_with_a_value_or_a_sentence(self, data: bytes) -> None:
        for bytes_ in (data, b"\x80\x02" + data):
            value_or_refusal(bytes_)

    @given(st.data())
    def test_answers_damaged_dumps_with_a_value_or_a_sentence(self, data: st.DataObject) -> None:
        damaged = bytearray(REAL)
        for _ in range(data.draw(st.integers(1, 5))):
            at = data.draw(st.integers(0, len(damaged) - 1))
            kind = data.draw(st.sampled_from(["change", "remove", "insert"]))
            new = data.draw(st.binary(min_size=1, max_size=9))
            damaged[at : at + (0 if kind == "insert" else len(new))] = b"" if kind == "remove" else new
        value_or_refusal(bytes(damaged))


def value_or_refusal(data: bytes) -> None:
    """Plain values or one sentence: no other exception."""
    try:
        values = [load_pickle(data, FILE)]
    except OverlapScopeError:
        refusal(data)
        return
    while values:
        value = values.pop()
        assert type(value) in (dict, list, tuple, str, bytes, int, float, bool, type(None))
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
