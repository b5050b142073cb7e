"""Traces of torch.profiler become recordings: with known numbers, and beside our own recording of the same steps."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from dashboards.pages.order import build_unavailable_context
from overlapscope.cli.main import main
from overlapscope.interop.communication import compute_overlap
from overlapscope.interop.kineto import parse_rank_in_name, read_profile
from overlapscope.interop.training import convert_profile
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.schema import Kind, Phase
from tests.cli.command_line import overlapscope

DATA = Path(__file__).parent / "data"
RESNET = DATA / "resnet50_ddp_nccl_rank0of2.json.gz"
BUCKETS = (2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040)
"""Elements of ResNet-50's, 25,557,032 in all."""


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("imported") / "traces"
    assert main(["import", str(RESNET), "-o", str(folder)]) == 0
    return read_trace(folder)


def test_communication_of_kernels_is_what_others_count_to_the_nanosecond():
    found = compute_overlap(read_profile(RESNET))
    # By union of intervals: 46,876.5 us of communication, 7,317.0 of it hidden, 39,559.5 exposed.
    assert (found.communication_ns, found.hidden_ns, found.exposed_ns) == (46_876_493, 7_317_025, 39_559_468)


@pytest.mark.parametrize(
    ("worker", "communication_us", "hidden_us"),
    [
        # A broadcast at 16-32, an all-reduce at 162-1718; the other kernel runs at 130-291: 16 + 1556, and 291 - 162.
        # The reference tool has 1,169 and 75: it counts operators of the host as compute, within steps of its own.
        (0, 1572, 129),
        # 8-39 and 562-1620; the other kernel runs at 30-191: 31 + 1058, and 39 - 30.
        (1, 1089, 9),
    ],
)
def test_communication_of_kernels_in_a_few_events(worker, communication_us, hidden_us):
    found = compute_overlap(read_profile(DATA / f"golden_nccl_worker{worker}.json"))
    assert (found.communication_ns, found.hidden_ns) == (communication_us * 1000, hidden_us * 1000)


def test_buckets_are_those_of_ddp(resnet):
    reduced = resnet.collectives[resnet.collectives["bucket"] >= 0]
    for _, step in reduced.groupby("step"):
        assert tuple(step.sort_values("bucket")["elements"]) == BUCKETS
    assert sorted(reduced["step"].unique()) == [4, 5, 6]  # as ProfilerStep# says
    assert set(reduced["dtype"]) == {"float32"}
    ran = resnet.collectives
    assert (ran["end_ns"] - ran["start_ns"]).sum() == 46_876_493  # none ran beside another


def test_phases_follow_each_other_and_fill_the_step_with_the_gaps_between_them(resnet):
    for (_, step), phases in resnet.phases.groupby(["rank", "step"]):
        ordered = phases.sort_values("start_ns")
        assert list(ordered["phase"]) == ["loop", "forward", "backward", "finalize", "optimizer"], step
        assert (ordered["start_ns"].to_numpy()[1:] >= ordered["end_ns"].to_numpy()[:-1]).all()
    steps = resnet.steps.sort_values("step")
    assert (steps["start_ns"].to_numpy()[1:] == steps["end_ns"].to_numpy()[:-1]).all()


def test_buckets_are_copied_back_after_their_all_reduce_and_before_the_optimizer(resnet):
    out = resnet.copies[resnet.copies["direction"] == "out"].merge(
        resnet.collectives[["step", "bucket", "end_ns"]], on=["step", "bucket"], suffixes=("", "_of_sum")
    )
    assert len(out) == 15
    assert (out["start_ns"] >= out["end_ns_of_sum"]).all()
    finalized = resnet.phases[resnet.phases["phase"] == "finalize"].set_index("step")["end_ns"]
    assert (out["end_ns"] <= out["step"].map(finalized)).all()


def test_work_that_waits_on_the_device_makes_phases_end_later(tmp_path):
    """The host is 5 us ahead: a forward of 10-20 us whose kernel runs at 15-40 us is over at 40."""
    annotations = [("ProfilerStep#0", 0, 100), ("DistributedDataParallel.forward", 10, 10)]
    annotations += [("Optimizer.step#SGD.step", 60, 20)]
    events = [event("user_annotation", *each) for each in annotations]
    events += [event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 30, 10, tid=2)]
    events += [event("cuda_runtime", "cudaLaunchKernel", 12, 1, args={"correlation": 7})]
    events += [event("kernel", "gemm", 15, 25, tid=7, args={"correlation": 7, "stream": 7})]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    records = convert_profile(read_profile(tmp_path / "trace.json")).records
    of_phases = records[records["kind"] == Kind.PHASE]
    spans_us = {Phase(each["index"]).name: (each["start_ns"] / 1e3, each["end_ns"] / 1e3) for each in of_phases}
    assert spans_us["FORWARD"] == (10, 40)
    assert spans_us["BACKWARD"] == (40, 40)  # of its work nothing is in the trace
    assert spans_us["OPTIMIZER"] == (60, 80)


def event(
    cat: str, name: str, ts: float, dur: float, tid: int = 1, args: dict[str, int] | None = None
) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args or {}}


def test_of_forwards_in_a_row_those_are_trained_whose_operators_lead_to_a_backward(tmp_path):
    """An evaluation at 5-8 us, then two modules one after the other, and one backward of both."""
    forwards = [("DistributedDataParallel.forward", begin, 3) for begin in (5, 10, 14)]
    annotations = [("ProfilerStep#0", 0, 100), *forwards, ("Optimizer.step#SGD.step", 60, 20)]
    events = [event("user_annotation", *each) for each in annotations]
    events += [event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 30, 10, tid=2)]
    events += [
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": ts, "pid": 1, "tid": 1, "ts": ts} for ts in (11, 15)
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    records = convert_profile(read_profile(tmp_path / "trace.json")).records
    phases = [Phase(each["index"]).name for each in records[records["kind"] == Kind.PHASE]]
    assert phases == ["LOOP", "EVALUATION", "FORWARD", "FORWARD", "BACKWARD", "OPTIMIZER"]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3.json", 3), ("trace_rank-12.json.gz", 12), ("Rank_0_of_2.json", 0), ("trace.json", None)],
)
def test_the_rank_may_be_in_the_name(name, rank):
    assert parse_rank_in_name(Path(name)) == rank


def test_one_that_is_cut_short_is_left_out_and_said(tmp_path, capsys):
    (tmp_path / "cut.json.gz").write_bytes(RESNET.read_bytes()[:300_000])
    shutil.copy(RESNET, tmp_path / "whole.json.gz")
    arguments = ["import", str(tmp_path / "cut.json.gz"), str(tmp_path / "whole.json.gz"), "-o", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "cut.json.gz: left out: " in capsys.readouterr().err
    assert read_trace(tmp_path / "out").ranks["rank"].tolist() == [0]
    assert main(["import", str(tmp_path / "cut.json.gz"), "-o", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()


def test_bad_input_is_one_line_and_leaves_no_folder(tmp_path, golden):
    without_rank = json.loads(gzip.decompress(RESNET.read_bytes()))
    del without_rank["distributedInfo"]
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(without_rank))
    said = []
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    (tmp_path / "execution.json").write_text('{"schema": "1.1.1-chakra.0.0.4", "pid": 7, "nodes": []}')
    (tmp_path / "memory.json").write_text("[[0, 1], [[512, 0, 0], [1024, 0, 0]]]")
    (tmp_path / "memory.html").write_text("<html><head></head></html>")
    (tmp_path / "stacks.txt").write_text("train.py(3): <module>;model.py(9): forward 1200\n")
    (tmp_path / "nothing").mkdir()
    cases: list[list[str | Path]] = [
        ["a.json", "b.json"],
        [RESNET, RESNET],
        [RESNET, DATA / "dlrm_2023" / "rank1.json.gz"],
    ]
    cases += [
        [name] for name in ("empty.json", "execution.json", "memory.json", "memory.html", "stacks.txt", "nothing")
    ]
    for files in cases:
        ran = overlapscope("import", *[tmp_path / file for file in files], "-o", tmp_path / "out")
        assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
        assert not (tmp_path / "out").exists()
        said.append(ran.stderr.replace(f"{tmp_path}/", "").replace(f"{DATA}/", ""))
    golden("refused/import_kineto", "".join(said))


@pytest.mark.parametrize(
    "odd", [{"ph": "X", "cat": "kernel", "name": "gemm"}, {"ph": "X", "cat": "cpu_op", "name": 7}, 3, {"ph": {}}]
)
def test_an_event_that_is_none_is_said(tmp_path, capsys, odd):
    (tmp_path / "odd.json").write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": "Trace"}, odd]}))
    assert main(["import", str(tmp_path / "odd.json"), "-o", str(tmp_path / "out")]) == 1
    assert "odd.json: " in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_a_recording_is_not_overwritten_unasked(tmp_path, capsys):
    arguments = ["import", str(RESNET), "-o", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert main(arguments) == 1
    assert "already holds a recording" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert len(read_trace(tmp_path / "out").steps) == 3


def test_what_reads_recordings_reads_imports(tmp_path, capsys):
    assert main(["import", str(RESNET), "-o", str(tmp_path / "out")]) == 0
    main(["summary", str(tmp_path / "out")])
    shown = capsys.readouterr()
    assert "3 steps" in shown.out
    assert "of 2 ranks, 1 was not imported: 1" in shown.err
    main(["report", str(tmp_path / "out"), "-o", str(tmp_path / "report.html")])
    assert "ResNet" not in (tmp_path / "report.html").read_text()  # what a trace does not say is not guessed


def longer_imported(recorded: Trace, imported: Trace, steps: range, *phases: str) -> pd.Series[float]:
    """By rank and step, microseconds by which phases together, or without any the step, last longer in an import.

    Of the same steps: medians of each would be of different steps where these differ, as on a busy machine.
    """
    both = []
    for trace in (imported, recorded):
        spans = trace.phases[trace.phases["phase"].isin(phases)] if phases else trace.steps
        spans = spans[spans["step"].isin(steps)]
        both.append(((spans["end_ns"] - spans["start_ns"]) / 1e3).groupby([spans["rank"], spans["step"]]).sum())
    assert (both[0].index == both[1].index).all()
    return both[0] - both[1]


TRAINING = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

dist.init_process_group("gloo")
torch.set_num_threads(1)
layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=3, warmup=2, active=12), record_shapes=True,
             on_trace_ready=lambda p: p.export_chrome_trace(f"{sys.argv[1]}/rank{dist.get_rank()}.json")) as profiler:
    for _ in range(18):
        model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.cluster
def test_a_profile_and_our_own_recording_of_the_same_steps_agree(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    launcher = ["torchrun", "--standalone", "--nproc-per-node", "2", str(tmp_path / "train.py"), str(tmp_path)]
    assert main(["record", "-o", str(tmp_path / "recorded"), "--", *launcher]) == 0
    traces = [str(tmp_path / f"rank{rank}.json") for rank in range(2)]
    assert main(["import", *traces, "-o", str(tmp_path / "imported")]) == 0
    imported, recorded = read_trace(tmp_path / "imported"), read_trace(tmp_path / "recorded")
    steps = range(6, 17)  # the first one of a profile begins in the middle
    assert set(steps) <= set(imported.steps["step"])
    assert longer_imported(recorded, imported, steps).median() == pytest.approx(0, abs=50)
    assert longer_imported(recorded, imported, steps, "optimizer").median() == pytest.approx(0, abs=300)
    # A forward's annotation begins before DDP has looked at what it was given, ours when it calls the module: that part
    # of a step is data wait in ours.
    assert longer_imported(recorded, imported, steps, "loop", "forward").median() == pytest.approx(0, abs=1000)

    def buckets(trace: Trace) -> list[tuple[int, int]]:
        reduced = trace.collectives[(trace.collectives["bucket"] >= 0) & trace.collectives["step"].isin(steps)]
        return list(zip(reduced["bucket"].tolist(), reduced["elements"].tolist(), strict=True))

    assert sorted(buckets(imported)) == sorted(buckets(recorded))


def test_what_an_import_can_t_say_is_said(tmp_path, capsys):
    for rank in range(2):
        content = json.loads(gzip.decompress(RESNET.read_bytes()))
        content["distributedInfo"]["rank"] = rank
        (tmp_path / f"{rank}.json").write_text(json.dumps(content))
    folder = str(tmp_path / "out")
    assert main(["import", str(tmp_path / "0.json"), str(tmp_path / "1.json"), "-o", folder]) == 0
    capsys.readouterr()
    assert main(["diagnose", folder]) == 1
    assert main(["recommend", folder]) == 1
    printed = capsys.readouterr()
    order = build_unavailable_context(read_trace(folder), None)
    for said in (printed.out.replace("\n", " "), printed.err, order["message"]):
        assert "imported from torch.profiler" in said
