"""Dumps of one rank: both formats, several versions, damage."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.flight_recorder import DumpEntry, holds_dumps, read_all_dumps, read_dump
from tests.nccl_dumps import NcclRank

DUMPS = Path(__file__).parent.parent / "data" / "flight_recorder"


def write(folder: Path, content: Any, name: str = "trace_0") -> Path:
    file = folder / name
    file.write_bytes(pickle.dumps(content, 2))
    return file


def minimal(**changes: Any) -> dict[str, Any]:
    """The latest version with one entry."""
    rank = NcclRank(0, {"0": [0, 1]})
    rank.launch("all_reduce", [4])
    content = rank.as_dict()
    content["entries"][0] |= changes
    return content


class TestContent:
    def test_of_gloo(self) -> None:
        dump = read_dump(DUMPS / "op_mismatch_gloo" / "pickle" / "trace_1")
        assert (dump.version, dump.rank, dump.members) == ("2.10", None, {"": (0, 1)})
        assert [entry.number for entry in dump.entries] == list(range(1, 12))
        last = dump.entries[-1]
        assert (last.group, last.description, last.name) == ("0", "default_pg", "gloo:broadcast")
        assert (last.input_shapes, last.input_dtypes) == (((8,),), ("Float",))
        assert (last.state, last.is_retired, last.completed_ns) == ("scheduled", True, None)
        assert last.call_site is not None
        assert (last.call_site.file, last.call_site.line) == ("/workspace/train.py", 120)

    def test_of_json_is_that_of_the_pickle_without_lines(self) -> None:
        for folder in ("op_mismatch_gloo", "healthy_gloo", "missing_collective_gloo"):
            for rank in (0, 1):
                of_pickle = read_dump(DUMPS / folder / "pickle" / f"trace_{rank}")
                of_json = read_dump(DUMPS / folder / "json" / f"trace_{rank}.json")
                assert of_json.members == of_pickle.members
                assert [what(entry) for entry in of_json.entries] == [what(entry) for entry in of_pickle.entries]
                assert all(entry.call_site is None for entry in of_json.entries)

    def test_of_nccl(self, tmp_path: Path) -> None:
        rank = NcclRank(1, {"0": [0, 1, 2, 3], "7": [1, 3]})
        rank.launch("all_reduce", [3, 5], line=42)
        rank.launch("_all_gather_base", [8], group="7", state="started", dtype="BFloat16")
        rank.write(tmp_path)
        dump = read_dump(tmp_path / "nccl_trace_rank_1")
        assert dump.members == {"0": (0, 1, 2, 3), "7": (1, 3)}
        first, second = dump.entries
        assert (first.state, first.completed_ns is not None) == ("completed", True)
        assert (second.group, second.state, second.started_ns is not None) == ("7", "started", True)
        assert first.call_site is not None
        assert str(first.call_site.line) == "42"

    @pytest.mark.parametrize("version", ["2.0", "2.2", "2.3", "2.5", "2.7", "2.10", "2.99"])
    def test_of_versions_that_lack_the_newer_fields(self, tmp_path: Path, version: str) -> None:
        content = minimal() | {"version": version}
        for name in ("thread_name", "thread_id", "timeout_ms", "retired", "output_dtypes", "duration_ms"):
            content["entries"][0].pop(name, None)
        if version == "2.0":
            content["entries"][0].pop("process_group")
            content.pop("pg_status")
            content["pg_config"] = {"0": [0, 1]}
        dump = read_dump(write(tmp_path, content))
        assert dump.members == {"0": (0, 1)}
        assert [(entry.group, entry.number, entry.name) for entry in dump.entries] == [("0", 1, "nccl:all_reduce")]

    def test_has_no_line_of_torch_frameworks_or_c_plus_plus(self, tmp_path: Path) -> None:
        def call_site(*files: str) -> str | None:
            frames = [{"name": "f", "filename": file, "line": 1} for file in files]
            site = read_dump(write(tmp_path, minimal(frames=frames))).entries[0].call_site
            return site and site.file

        for foreign in (
            "/opt/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py",
            "/usr/lib/python3/dist-packages/torch/_tensor.py",
            "/opt/venv/lib/python3.11/site-packages/typing_extensions.py",
            "/opt/venv/lib/python3.11/site-packages/lightning/pytorch/trainer/trainer.py",
            "/src/pytorch/torch/distributed/distributed_c10d.py",
            "/usr/lib/python3.11/contextlib.py",
            "/src/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
            "<frozen runpy>",
            "??",
            "",
        ):
            assert call_site(foreign) is None
            assert call_site(foreign, "/home/me/torch/train.py", "/home/me/outer.py") == "/home/me/torch/train.py"
        assert call_site("/opt/venv/lib/python3.11/site-packages/mylib/comm.py") is not None


def what(entry: DumpEntry) -> tuple[Any, ...]:
    return entry.group, entry.number, entry.name, entry.input_shapes, entry.input_dtypes, entry.is_retired


class TestRefusal:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ([], "no dictionary with a version"),
            ({}, "no dictionary with a version"),
            ({"version": "1.5", "entries": []}, "format 1.5"),
            ({"version": "3.0", "entries": []}, "format 3.0"),
            ({"version": "2.10"}, "holds no entries"),
            ({"version": "2.10", "entries": {}}, "entries is not a list"),
            ({"version": "2.10", "entries": [7]}, "entry 0 is not a dictionary"),
            ({"version": "2.10", "entries": [{}]}, "pg_id of entry 0"),
            (minimal() | {"pg_config": []}, "pg_config"),
            (minimal() | {"pg_config": {"0": {"ranks": 5}}}, "pg_config"),
            (minimal(collective_seq_id=None), "collective_seq_id of entry 0"),
            (minimal(collective_seq_id=True), "collective_seq_id of entry 0"),
            (minimal(collective_seq_id="one"), "collective_seq_id of entry 0"),
            (minimal(record_id=1.5), "record_id of entry 0"),
            (minimal(profiling_name=3), "profiling_name of entry 0"),
            (minimal(input_sizes=[4]), "input_sizes of entry 0"),
            (minimal(input_sizes=[[4.0]]), "input_sizes of entry 0"),
            (minimal(input_sizes=[[2] * 65]), "input_sizes of entry 0"),
            (minimal(input_dtypes="Float"), "input_dtypes of entry 0"),
            (minimal(frames=["main"]), "frame of entry 0"),
            (minimal(process_group=("0",)), "process_group of entry 0"),
        ],
    )
    def test_names_what_is_wrong(self, tmp_path: Path, content: Any, reason: str) -> None:
        file = write(tmp_path, content)
        with pytest.raises(OverlapScopeError, match=reason) as refused:
            read_dump(file)
        assert str(file) in str(refused.value)

    def test_of_an_empty_file_says_that_its_process_was_killed(self, tmp_path: Path) -> None:
        (tmp_path / "trace_0").touch()
        with pytest.raises(OverlapScopeError, match="empty"):
            read_dump(tmp_path / "trace_0")

    def test_lets_no_control_characters_through(self, tmp_path: Path) -> None:
        evil = "\x1b[2J\nall_reduce\ud800"
        frames = [{"name": evil, "filename": f"/workspace/{evil}.py", "line": 1}]
        dump = read_dump(write(tmp_path, minimal(process_group=("0", evil), frames=frames)))
        site = dump.entries[0].call_site
        assert site is not None
        assert (dump.entries[0].description + site.file + site.function).isprintable()

    @pytest.mark.parametrize(
        "changes",
        [
            {"profiling_name": "nccl:all_re)uce"},
            {"profiling_name": "nccl:all_rfduce"},
            {"profiling_name": "nccl:send 0-=1"},
            {"input_dtypes": ["Floap"]},
            {"state": "scheduldd"},
        ],
    )
    def test_takes_a_name_with_a_changed_letter_for_damage(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        with pytest.raises(OverlapScopeError, match="damaged"):
            read_dump(write(tmp_path, minimal(**changes)))

    def test_knows_that_there_may_be_other_names(self, tmp_path: Path) -> None:
        dump = read_dump(
            write(tmp_path, minimal(profiling_name="ncclx:all_gather_quantized", input_dtypes=["QUInt4x2"]))
        )
        assert (dump.entries[0].name, dump.entries[0].input_dtypes) == ("ncclx:all_gather_quantized", ("QUInt4x2",))

    @given(st.data())
    def test_answers_any_values_in_the_place_of_others_with_a_dump_or_a_sentence(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        anything = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        )
        content = minimal()
        place = data.draw(st.sampled_from([content, content["entries"][0], content["entries"][0]["frames"][1]]))
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(anything)
        file = write(tmp_path_factory.mktemp("dump"), content)
        try:
            read_dump(file)
        except OverlapScopeError as error:
            assert str(file) in str(error)  # noqa: PT017


class TestFiles:
    def test_are_recognized(self, tmp_path: Path) -> None:
        assert holds_dumps(DUMPS / "healthy_gloo" / "pickle")
        assert holds_dumps(DUMPS / "healthy_gloo" / "json")
        assert holds_dumps(DUMPS / "healthy_gloo" / "json" / "trace_0.json")
        assert not holds_dumps(DUMPS / "healthy_gloo")
        assert not holds_dumps(tmp_path)
        assert not holds_dumps(tmp_path / "missing")
        (tmp_path / "rank_0").mkdir()
        (tmp_path / "rank_0" / "run.json").write_text('{"world_size": 2}')
        (tmp_path / "metrics_0.json").write_text('{"loss": 1}')
        (tmp_path / "notes.txt").write_text("pg_config")
        assert not holds_dumps(tmp_path)

    @pytest.mark.parametrize("name", ["trace_12", "nccl_trace_rank_12", "trace_12.json", "12", "job.7_rank12.pickle"])
    def test_give_the_rank(self, tmp_path: Path, name: str) -> None:
        if name.endswith(".json"):
            rank = NcclRank(12, {"0": range(16)})
            rank.launch("all_reduce", [4])
            rank.write_json(tmp_path)
            (tmp_path / "nccl_trace_rank_12.json").rename(tmp_path / name)
        else:
            write(tmp_path, minimal(), name)
        assert list(read_all_dumps(tmp_path / name)[0]) == [12]

    def test_say_their_rank_if_they_are_called_otherwise(self, tmp_path: Path) -> None:
        assert list(read_all_dumps(write(tmp_path, minimal() | {"rank": 5}, "dump.pickle"))[0]) == [5]
        content = minimal() | {"pg_config": {"0": {"ranks": "[0, 3]"}, "1": {"ranks": "[3]"}}}
        assert list(read_all_dumps(write(tmp_path, content, "dump.pickle"))[0]) == [3]
        with pytest.raises(OverlapScopeError, match="which rank"):
            read_all_dumps(write(tmp_path, minimal(), "dump.pickle"))
        with pytest.raises(OverlapScopeError, match="which rank"):
            read_all_dumps(write(tmp_path, minimal(), "dump_of_1760000000"))

    def test_that_are_damaged_leave_the_others(self, tmp_path: Path) -> None:
        for rank in (0, 1, 2, 3):
            write(tmp_path, minimal(), f"trace_{rank}")
        (tmp_path / "trace_1").write_bytes(b"")
        (tmp_path / "trace_2").write_bytes(pickle.dumps(minimal())[:-9])
        (tmp_path / "other_9").write_bytes(b"")
        dumps, problems = read_all_dumps(tmp_path)
        assert sorted(dumps) == [0, 3]
        assert [problem.severity for problem in problems] == ["error", "error"]
        assert "trace_1: empty" in problems[0].message
        assert "trace_2: refused" in problems[1].message

    def test_that_are_no_files_are_named(self, tmp_path: Path) -> None:
        write(tmp_path, minimal(), "trace_0")
        (tmp_path / "trace_1").mkdir()
        (tmp_path / "trace_2").symlink_to(tmp_path / "gone")
        (tmp_path / "other_3").mkdir()
        dumps, problems = read_all_dumps(tmp_path)
        assert sorted(dumps) == [0]
        assert [problem.severity for problem in problems] == ["error", "error"]
        assert "trace_1: a folder" in problems[0].message
        assert "trace_2: a link to nowhere" in problems[1].message

    def test_of_different_jobs_are_refused(self, tmp_path: Path) -> None:
        for rank, world in ((0, 2), (1, 2), (2, 4)):
            write(tmp_path, minimal() | {"pg_config": {"0": {"ranks": str(list(range(world)))}}}, f"trace_{rank}")
        with pytest.raises(
            OverlapScopeError, match="different jobs: the default group has 2 ranks in trace_0 and 4 in trace_2"
        ):
            read_all_dumps(tmp_path)

    def test_that_are_none_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "trace_0").write_text("no such thing")
        with pytest.raises(OverlapScopeError, match="; trace_0 is none"):
            read_all_dumps(tmp_path)

    def test_of_which_none_can_be_read_are_one_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "trace_0").write_bytes(b"\x80\x02cos\nsystem\n.")
        (tmp_path / "trace_1").write_bytes(b"\x80\x02")
        assert holds_dumps(tmp_path)
        with pytest.raises(OverlapScopeError, match="trace_0: refused at offset 2: GLOBAL"):
            read_all_dumps(tmp_path)

    def test_of_one_rank_in_both_formats_count_once(self) -> None:
        dumps, problems = read_all_dumps(DUMPS / "hang_3")
        assert sorted(dumps) == [0, 1, 2]
        assert not problems
        assert all(dump.entries[0].call_site for dump in dumps.values())
