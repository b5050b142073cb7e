"""Tables as files: what is in them is what the pages show, wherever the pages are."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pandas as pd
import pytest

from dashboards.access import Access
from dashboards.pages.runs import build_row_view
from dashboards.recording import RecordingCache, Snapshot
from dashboards.runs import RunIndex
from dashboards.saving import TABLES
from overlapscope.interop import table_files
from overlapscope.interop.table_files import encode_table
from tests.dashboards.running import Answer, Running, running
from tests.dashboards.test_order_page import faulty
from tests.segments import write_ring_recording
from tests.synthetic import write_recording, write_straggling_recording

NAME = "nightly/odd #1 ü"
RUNS_OF_TABLES = {"order": "faulty", "segments": "ring"}
"""That have something to show in them, where others have not."""


def late_us(rank: int, _step: int) -> int:
    return 3_000 * (rank == 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a straggler, one with a fault, one of a single rank, and one that reduces by a ring."""
    folder = tmp_path_factory.mktemp("saving") / "traces"
    write_straggling_recording(folder / NAME, late_us=late_us, ranks=4, steps=40)
    faulty(folder / "faulty")
    write_recording(folder / "single", ranks=1, steps=5)
    write_ring_recording(folder / "ring")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(RunIndex([folder])) as server:
        yield server


def snapshot_of(folder: Path, run: str) -> Snapshot:
    return RecordingCache(folder / run).latest()


def table_at(server: Running, run: str, file: str) -> Answer:
    return server.get(f"/runs/{quote(run)}/-/tables/{file}")


def cells_of(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode())))


def as_text(frame: pd.DataFrame) -> list[list[str]]:
    rows = [["" if pd.isna(cell) else str(cell) for cell in row] for row in frame.astype(object).to_numpy().tolist()]
    return [frame.columns.tolist(), *rows]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_of_a_run_is_had_whole_as_csv_and_as_parquet(server: Running, folder: Path, name: str) -> None:
    run = RUNS_OF_TABLES.get(name, NAME)
    frame = TABLES[name](snapshot_of(folder, run), {})
    assert len(frame)
    text, parquet = table_at(server, run, f"{name}.csv"), table_at(server, run, f"{name}.parquet")
    assert (text.status, parquet.status) == (200, 200)
    assert cells_of(text.data) == as_text(frame)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(parquet.data)), frame.reset_index(drop=True))
    file = f"overlapscope-{RUNS_OF_TABLES.get(name, 'nightly-odd-1')}-{name}.csv"
    assert text.headers["Content-Disposition"] == f'attachment; filename="{file}"'
    assert text.headers["Content-Type"].startswith("text/csv")


def test_the_numbers_of_all_tables_have_their_units_in_their_names(folder: Path) -> None:
    """Times are nanoseconds, whatever a page rounds them to."""
    snapshot = snapshot_of(folder, NAME)
    for name in TABLES.keys() - {"order"}:
        frame = TABLES[name](snapshot, {})
        for column in frame.columns:
            assert not str(column).endswith(("_ms", "_us", "time", "start", "end")), (name, column)


def test_the_order_has_a_row_where_a_rank_has_nothing_and_says_where_they_differ(folder: Path) -> None:
    table = TABLES["order"](snapshot_of(folder, "faulty"), {})
    assert set(table["rank"]) == {0, 1, 2}
    last = table[table["number"] == table["number"].max()].set_index("rank")["state"]
    assert last[0] == last[2] == "nothing in the log"
    assert last[1] == "completed"
    assert table.loc[table["difference"].notna(), "number"].min() == 7


def test_bucket_sizes_are_those_of_the_options_that_the_page_has(server: Running, folder: Path) -> None:
    def sizes(query: str) -> pd.DataFrame:
        return pd.read_parquet(io.BytesIO(table_at(server, NAME, f"bucket-sizes.parquet{query}").data))

    curve = snapshot_of(folder, NAME).forecast.result().reference
    assert sizes("")["predicted_ns"].tolist() == curve.predicted_ns.tolist()
    assert sizes("")["is_now"].sum() == 1
    compressed = sizes("?compression=fp16&cap_mb=3&theme=dark")
    assert compressed["exposed_ns"].min() < sizes("")["exposed_ns"].min()


def test_the_predicted_buckets_are_those_of_the_chosen_size(server: Running) -> None:
    spans = {
        cap_mb: pd.read_csv(io.BytesIO(table_at(server, NAME, f"bucket-spans.csv?cap_mb={cap_mb}").data))
        for cap_mb in (0.5, 1000)
    }
    buckets = {cap_mb: table[table["step"] == "predicted"]["bucket"].nunique() for cap_mb, table in spans.items()}
    assert buckets[0.5] > buckets[1000] == 1
    assert spans[0.5].query("step == 'recorded'").equals(spans[1000].query("step == 'recorded'"))


def test_the_table_of_runs_has_the_numbers_of_its_rows(folder: Path) -> None:
    runs = RunIndex([folder])
    with running(runs) as server:
        while any(row.judged is None for row in runs.latest()):
            pass
        table = pd.read_parquet(io.BytesIO(server.get("/tables/runs.parquet").data)).set_index("run")
        assert server.get("/tables/steps.csv").status == 404
    rows = {row.run.name: row for row in runs.latest()}
    assert set(table.index) == rows.keys() == {"faulty", "single", "ring", NAME}
    assert table.loc[NAME, "step_ns"] == rows[NAME].judged.step_ns  # type: ignore[union-attr]
    assert pd.isna(table.loc["faulty", "step_ns"])
    assert table.loc["faulty", "is_incident"]
    for name, row in rows.items():
        assert table.loc[name, "sentence"] == build_row_view(row).line


def test_a_run_that_is_served_alone_has_its_tables_at_the_top_and_behind_a_prefix(folder: Path) -> None:
    with running(RunIndex([folder / "single"]), prefix="lab") as server:
        answer = server.get("/lab/tables/steps.csv")
        assert len(cells_of(answer.data)) == 1 + 5
        assert 'filename="overlapscope-single-steps.csv"' in answer.headers["Content-Disposition"]
        assert server.get("/tables/steps.csv").status == 404


def test_a_table_that_there_is_none_of_is_a_page_that_says_why(server: Running) -> None:
    for run, file, why in (
        ("single", "stragglers.csv", "only one rank"),
        ("single", "order.csv", "has no order of collectives"),
        ("single", "nothing.csv", "no table at this address"),
        ("gone", "steps.csv", "no run of the name"),
    ):
        answer = table_at(server, run, file)
        assert answer.status == 404
        assert why in answer.text


def test_who_has_to_log_in_elsewhere_gets_no_table_and_no_news(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEY", "SECRET"):
        monkeypatch.setenv(f"PANEL_OAUTH_{name}", "none")
    with running(RunIndex([folder / "single"]), Access(oauth="github")) as server:
        for path in ("/tables/steps.csv", "/news"):
            answer = server.get(path)
            assert answer.status == 302
            assert "login" in answer.headers["Location"]


def test_a_long_table_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "_ROWS", 3)
    for rows in (0, 1, 3, 7):
        frame = pd.DataFrame({"step": range(rows), "said": ['a "b", c'] * rows})
        assert b"".join(encode_table(frame, "csv")).decode() == frame.to_csv(index=False)
        pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(b"".join(encode_table(frame, "parquet")))), frame)
