"""docs/trace-format.md, read as a program would be: another reader written from it must not go wrong."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pandas as pd
import pytest

from overlapscope.trace.collective_log import ENTRY_DTYPE, CollectiveLogHeader
from overlapscope.trace.event_log import RECORD_DTYPE
from overlapscope.trace.live_files import fingerprint_pass_dtype
from overlapscope.trace.machine_facts import iter_facts
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.schema import HEADER_BYTES, OPS, RANK_FILES, RECORD_BYTES, FileKind, Kind, LogHeader, Phase
from tests.synthetic import write_recording
from tests.trace.test_clock_alignment import on_another_host, write_pings

PAGE = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()

TYPES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "i64": "<i8"}


def rows(*headings: str) -> list[list[str]]:
    """The rows of the table with these headings."""
    _, _, rest = PAGE.partition(f"| {' | '.join(headings)} |\n")
    assert rest, f"no table {headings}"
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_record_is_laid_out_as_documented() -> None:
    documented = {
        name.strip("`"): (int(offset), np.dtype(TYPES[kind]))
        for offset, kind, name, _ in rows("offset", "type", "record field", "meaning")
    }
    assert documented == {name: (offset, kind) for name, (kind, offset) in RECORD_DTYPE.fields.items()}


def test_the_header_is_laid_out_as_documented() -> None:
    offsets = [int(row[0]) for row in rows("offset", "type", "header field")]
    assert offsets == [0, 8, 12, 16, 20, 24, 32, 40, 48, 52]
    page = LogHeader(capacity_records=5, pinned_records=6, written_records=7, closed=True).pack()
    assert [struct.unpack_from("<I", page, at)[0] for at in offsets[1:5]] == [1, HEADER_BYTES, RECORD_BYTES, 1]
    assert [struct.unpack_from("<Q", page, at)[0] for at in offsets[5:8]] == [5, 6, 7]
    (length,) = struct.unpack_from("<I", page, 48)
    assert page[52:53] == b"{"
    assert page[52 + length - 1 : 52 + length + 1] == b"}\0"


def test_the_entry_of_a_collective_log_is_laid_out_as_documented() -> None:
    documented = {
        name.strip("`"): (np.dtype(TYPES[kind]), int(offset))
        for offset, kind, name, _ in rows("offset", "type", "entry field", "meaning")
    }
    assert documented == dict(ENTRY_DTYPE.fields)


def test_the_header_of_a_collective_log_is_laid_out_as_documented() -> None:
    offsets = [int(row[0]) for row in rows("offset", "type", "group header field")]
    page = CollectiveLogHeader(name="0", ranks=(0, 3), rank=3, capacity=9, closed=True).pack()
    assert page[: offsets[1]] == b"OVLGROUP"
    assert [struct.unpack_from("<I", page, at)[0] for at in offsets[1:5]] == [1, 4096, ENTRY_DTYPE.itemsize, 1]
    assert struct.unpack_from("<Q", page, offsets[5]) == (9,)
    (length,) = struct.unpack_from("<I", page, offsets[6])
    assert json.loads(page[offsets[7] : offsets[7] + length])["ranks"] == [0, 3]


def test_a_pass_is_laid_out_as_documented() -> None:
    tensors = 5
    documented = {}
    for offset, kind, name, _ in rows("offset", "type", "pass field", "meaning"):
        start, _, per_tensor = offset.partition("+")
        number = int(start) + (tensors * int(per_tensor.replace("`T`", "")) if per_tensor else 0)
        documented[name.strip("`")] = (number, np.dtype(TYPES[kind.removeprefix("`T` ")]), kind.startswith("`T`"))
    fields = fingerprint_pass_dtype(tensors).fields
    assert fields is not None
    assert documented == {name: (at, kind.base, kind.shape == (tensors,)) for name, (kind, at) in fields.items()}


def test_every_number_has_its_documented_meaning() -> None:
    kinds = [row[0].split() for row in rows("kind", "record", "`index`")]
    assert [(int(number), name) for number, name in kinds] == [(kind.value, kind.name.lower()) for kind in Kind]
    phases = re.findall(r"(\d) (\w+)", PAGE.partition("Phases: ")[2].partition("\n")[0])
    assert [(int(number), name) for number, name in phases] == [(p.value, p.name.lower()) for p in Phase]
    (operations,) = [row[3] for row in rows("offset", "type", "record field", "meaning") if row[2] == "`op`"]
    assert operations == ", ".join(f"{number} {name}" for number, name in enumerate(OPS))


def test_every_table_has_its_documented_columns(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path))
    documented = {row[0].strip("`"): row[2] for row in rows("table", "a row per", "columns")}
    tables = [field.name for field in fields(Trace) if isinstance(getattr(trace, field.name), pd.DataFrame)]
    assert sorted(documented) == sorted(tables)
    for name, text in documented.items():
        plain = re.sub(r"\([^)]*\)", "", text).replace(" and ", ", ").replace(" in the bucket", "")
        assert [column.strip() for column in plain.split(",")] == list(getattr(trace, name).columns), name


def test_tables_on_disk_are_those_of_read_trace_once_clocks_are_taken_into_account(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=3, steps=4)
    on_another_host(tmp_path, 2, shift_ns=0)
    write_pings(tmp_path, 2, [[1_000_000_000, 1_000_010_700, 1_000_020_000]])
    trace = read_trace(tmp_path)
    tables = tmp_path / "tables"
    clocks = pd.read_parquet(tables / "clocks.parquet")
    assert clocks["rank"].unique().tolist() == [2]
    for name in ("steps", "phases", "collectives", "copies"):
        found = pd.read_parquet(tables / name)
        expected = getattr(trace, name)
        assert found["rank"].tolist() == expected["rank"].tolist()
        own_ns = found["end_ns"].to_numpy(np.int64)
        later = own_ns + np.rint(np.interp(own_ns, clocks["own_ns"], clocks["offset_ns"])).astype(np.int64)
        is_of_other_clock = found["rank"].isin(clocks["rank"])
        assert np.where(is_of_other_clock, later, own_ns).tolist() == expected["end_ns"].tolist()
    for name in ("ranks", "plans", "call_sites", "links", "user_collectives"):
        pd.testing.assert_frame_equal(pd.read_parquet(tables / f"{name}.parquet"), getattr(trace, name))


def test_every_machine_fact_is_documented() -> None:
    documented = [tuple(cell.strip("`") for cell in row) for row in rows("source", "fact", "what it is", "kind")]
    assert documented == [(source, fact.name, fact.meaning, fact.kind) for source, fact in iter_facts()]


def test_every_file_of_a_rank_is_documented_as_in_the_registry() -> None:
    headings = ("file", "what it is", "written by", "read by")
    registered = [[f"`{kind.name}`", kind.meaning, f"`{kind.writer}`", f"`{kind.reader}`"] for kind in RANK_FILES]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in registered)
    assert rows(*headings) == registered, f"the table in docs/trace-format.md should be:\n{lines}"
    described = {re.sub(r"_[A-Z]\.", "_*.", name) for row in rows("file", "content") for name in files_of_rank(row)}
    assert described == {kind.name for kind in RANK_FILES}


def files_of_rank(row: list[str]) -> list[str]:
    """The names in a row that are those of files in a rank's folder."""
    named = row[0].removeprefix("`rank_N/").rstrip("`") if row[0].startswith("`rank_N/") else None
    beside = re.findall(r"; `(p2p_G\.log)`: of its", row[1])
    return [named, *beside] if named else []


@pytest.mark.parametrize("kind", RANK_FILES, ids=lambda kind: kind.name)
def test_the_registry_names_who_writes_and_reads_a_file(kind: FileKind) -> None:
    assert can_resolve(f"overlapscope.{kind.writer}") or can_resolve(f"instrumented_ddp.{kind.writer}")
    assert can_resolve(f"overlapscope.{kind.reader}")


def can_resolve(name: str) -> bool:
    """Whether there is a module, and a name in it."""
    try:
        return resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False
