"""How a training loop becomes steps and phases, seen through the trace that it leaves."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import instrumented_ddp
from dashboards.pages.shell import list_run_facts
from instrumented_ddp import DistributedDataParallel, native
from instrumented_ddp.recording import recorder
from overlapscope.report.summary import describe_recording
from overlapscope.trace.recording import read_trace
from tests.instrumented_ddp.recording.lone_training import backward, make_model, phases_by_step, recorded


@pytest.fixture(autouse=True)
def _every_gradient_is_recorded(monkeypatch):
    monkeypatch.setenv("OVERLAPSCOPE_DETAIL", "parameters")


def test_a_plain_loop_gives_a_step_per_optimizer_step_with_its_phases_in_order(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    trace = recorded(model, traces)
    once = ["forward", "backward", "finalize", "optimizer"]
    assert phases_by_step(trace) == {0: once, 1: ["loop", *once], 2: ["loop", *once]}
    assert list(trace.steps["step"]) == [0, 1, 2]
    assert list(trace.steps["start_ns"])[1:] == list(trace.steps["end_ns"])[:-1], "steps leave no gap"


def test_phases_of_a_rank_do_not_overlap(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        optimizer.step()
    phases = recorded(model, traces).phases.sort_values("start_ns")
    assert (phases["start_ns"].to_numpy()[1:] >= phases["end_ns"].to_numpy()[:-1]).all()


def test_accumulation_under_no_sync_is_part_of_one_step_and_marked(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.no_sync():
            backward(model)
        backward(model)
        optimizer.step()
    trace = recorded(model, traces)
    one_step = ["loop", "forward", "backward", "loop", "forward", "backward", "finalize", "optimizer"]
    assert phases_by_step(trace)[1] == one_step
    backwards = trace.phases[trace.phases["phase"] == "backward"].sort_values("start_ns")
    assert list(backwards["no_sync"]) == [True, False, True, False]
    assert len(trace.collectives.query("op == 'all_reduce'")) == 2, "one bucket, reduced once a step"


def test_a_closure_runs_inside_the_optimizer_and_its_update_follows_the_backward(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> None:
        optimizer.zero_grad()
        with model.no_sync():
            backward(model)
        backward(model)

    for _ in range(2):
        optimizer.step(closure)
    one_step = ["forward", "backward", "optimizer", "forward", "backward", "finalize", "optimizer"]
    assert phases_by_step(recorded(model, traces)) == {0: one_step, 1: ["loop", *one_step]}


def test_an_optimizer_that_calls_its_closure_many_times_makes_one_step(traces):
    model = make_model(traces)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    trace = recorded(model, traces)
    assert list(trace.steps["step"]) == [0, 1]
    assert len(trace.phases.query("phase == 'forward'")) == len(calls) > 2


def test_an_evaluation_belongs_to_the_step_that_follows(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        backward(model)
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(8, 4))
    backward(model)
    optimizer.step()
    trace = recorded(model, traces)
    assert phases_by_step(trace)[1][:4] == ["loop", "evaluation", "loop", "forward"]
    assert list(trace.steps["step"]) == [0, 1, 2]


def test_two_optimizers_of_one_model_make_one_step(traces):
    model = make_model(traces)
    weights, biases = (
        [p for name, p in model.named_parameters() if name.endswith(kind)] for kind in ("weight", "bias")
    )
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.Adam(biases)]
    for _ in range(2):
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
    trace = recorded(model, traces)
    assert phases_by_step(trace)[1][-2:] == ["optimizer", "optimizer"]
    assert list(trace.steps["step"]) == [0, 1]


def test_an_optimizer_of_another_model_is_not_part_of_the_loop(traces):
    model, other = make_model(traces), nn.Linear(2, 2)
    optimizer, others = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        backward(model)
        others.step()
        optimizer.step()
    trace = recorded(model, traces)
    assert phases_by_step(trace)[0] == ["forward", "backward", "finalize", "optimizer"]


def test_without_an_optimizer_of_torch_a_step_ends_where_the_next_forward_begins(traces):
    model = make_model(traces)
    for _ in range(3):
        backward(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    trace = recorded(model, traces)
    assert list(trace.steps["step"]) == [0, 1], "the last step has no end that anybody saw"


def test_an_update_that_is_left_out_ends_no_step(traces):
    """As for gradients that are not finite, or by an accumulation without no_sync()."""
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_finite in (False, True, False, True):
        backward(model)
        if is_finite:
            optimizer.step()
    trace = recorded(model, traces)
    assert list(trace.steps["step"]) == [0, 1]
    once = ["loop", "forward", "backward", "finalize"]
    assert phases_by_step(trace) == {0: [*once[1:], *once, "optimizer"], 1: [*once, *once, "optimizer"]}


def test_the_users_step_marker_overrules_the_hooks(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            backward(model)
            optimizer.step()
        instrumented_ddp.step()
    trace = recorded(model, traces)
    # The first marker comes after hooks have ended two steps; from then on only markers end one.
    assert list(trace.steps["step"]) == [0, 1, 2, 3]
    assert phases_by_step(trace)[3].count("optimizer") == 3


def test_the_step_marker_does_nothing_when_nothing_is_recorded():
    instrumented_ddp.step()


def test_gradients_buckets_and_their_collectives_come_in_order(traces):
    model = make_model(traces)
    backward(model)
    trace = recorded(model, traces)
    names = trace.plans.drop_duplicates("parameter").set_index("parameter")["name"]
    ready = trace.gradients.sort_values("ready_ns")["parameter"].map(names)
    assert list(ready)[:2] == ["2.bias", "2.weight"]
    (bucket,) = trace.collectives.query("op == 'all_reduce'").to_dict("records")
    assert trace.gradients["ready_ns"].max() <= bucket["ready_ns"] <= bucket["launch_ns"] <= bucket["end_ns"]
    assert bucket["elements"] == sum(p.numel() for p in model.parameters())
    assert bucket["bytes"] == 4 * bucket["elements"]


def test_buffers_are_broadcast_and_recorded_outside_of_any_bucket(traces):
    model = make_model(traces)
    backward(model)
    backward(model)
    broadcasts = recorded(model, traces).collectives.query("op == 'broadcast'")
    assert list(broadcasts["bucket"]) == [-1, -1]
    assert list(broadcasts["step"]) == [0, 1]
    assert set(broadcasts["elements"]) == {4 + 4 + 1}


def test_the_launch_names_the_users_line(traces):
    model = make_model(traces)
    model(torch.randn(8, 4)).sum().backward()
    trace = recorded(model, traces)
    sites = trace.call_sites.set_index("call_site")
    site = sites.loc[trace.collectives.query("op == 'all_reduce'")["call_site"].iloc[0]]
    assert site["file"] == __file__
    assert site["function"] == "test_the_launch_names_the_users_line"


def test_both_plans_are_in_the_trace_and_the_launches_say_which(traces):
    model = make_model(traces)
    for _ in range(2):
        backward(model)
    trace = recorded(model, traces)
    assert sorted(set(trace.plans["plan_epoch"])) == [0, 1]
    all_reduces = trace.collectives.query("op == 'all_reduce'")
    assert list(all_reduces["plan_epoch"]) == [0, 1]
    first_words = trace.plans.groupby("plan_epoch")["plan_hash"].first().map(lambda text: int(text[:8], 16))
    assert list(all_reduces["plan_hash"]) == list(first_words)


def test_a_folder_that_holds_a_recording_is_left_alone_and_training_goes_on(traces, capsys):
    (traces / "rank_0").mkdir(parents=True)
    (traces / "rank_0" / "events.log").write_bytes(b"precious")
    model = make_model(traces)
    backward(model)
    assert model.recorder is None
    assert (traces / "rank_0" / "events.log").read_bytes() == b"precious"
    message = capsys.readouterr().err
    assert "already holds a recording" in message
    assert message.count("\n") == 1


def test_bad_settings_are_said_and_training_goes_on(traces, capsys, monkeypatch):
    monkeypatch.setenv("OVERLAPSCOPE_LIMIT_MB", "lots")
    model = make_model(traces)
    backward(model)
    assert "OVERLAPSCOPE_LIMIT_MB=lots" in capsys.readouterr().err


def test_nothing_is_recorded_unless_asked_for(lone_rank, tmp_path):
    model = DistributedDataParallel(nn.Linear(4, 2))
    backward(model)
    assert model.recorder is None


def test_a_second_model_shares_the_recording(traces):
    first, second = make_model(traces), DistributedDataParallel(nn.Linear(4, 2), trace=traces)
    backward(first)
    backward(second)
    trace = recorded(first, traces)
    assert [model["class"] for model in trace.run["models"]] == ["Sequential", "Linear"]
    assert set(trace.collectives.query("op == 'all_reduce'")["model"]) == {0, 1}


def test_training_goes_on_after_the_recording_was_closed(traces):
    model = make_model(traces)
    backward(model)
    trace = recorded(model, traces)
    backward(model)
    assert len(read_trace(traces).collectives) == len(trace.collectives)


def test_a_disk_that_fills_up_is_said_once_and_training_goes_on(traces, capsys, monkeypatch):
    model = make_model(traces)

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    # A full disk can't be had without mounting one; this is where it would be met at a rebuild.
    monkeypatch.setattr("instrumented_ddp.recording.recorder.append_plan", no_space)
    monkeypatch.setattr("instrumented_ddp.recording.recorder.write_json", no_space)
    for _ in range(3):
        backward(model)
    DistributedDataParallel(nn.Linear(4, 2), trace=traces)
    message = capsys.readouterr().err
    assert message.count("No space left on device") == 1


def test_gradients_that_are_ready_in_a_bucket_that_never_is_are_in_the_trace(traces):
    model = DistributedDataParallel(nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(4, 2)}), trace=traces)
    model.module.forward = model.module["used"].forward
    backward(model)
    trace = recorded(model, traces)
    names = trace.plans.drop_duplicates("parameter").set_index("parameter")["name"]
    assert sorted(trace.gradients["parameter"].map(names)) == ["used.bias", "used.weight"]
    assert len(trace.collectives) == 0
    assert set(trace.gradients["step"]) == {0}


def test_every_gradient_of_every_pass_is_recorded_once(traces):
    model = make_model(traces)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with model.no_sync():
            backward(model)
        backward(model)
        optimizer.step()
    trace = recorded(model, traces)
    per_parameter = trace.gradients.groupby(["step", "parameter"]).size()
    assert len(per_parameter) == 3 * len(list(model.parameters()))
    assert set(per_parameter) == {2}


def test_a_communication_hook_is_named(traces):
    model = make_model(traces)
    model.register_comm_hook(None, allreduce_hook)
    backward(model)
    assert [entry["comm_hook"] for entry in recorded(model, traces).run["models"]] == ["allreduce_hook"]


def test_it_is_written_down_which_recorder_records(traces):
    model = make_model(traces)
    backward(model)
    language = recorded(model, traces).run["recorder"]["language"]
    assert language == ("C" if native.IS_NATIVE else "Python")


def test_a_recorder_in_python_says_why_it_is_not_the_one_in_c(monkeypatch):
    monkeypatch.setenv("OVERLAPSCOPE_NATIVE", "0")
    module, why = native._load()
    assert module is None
    assert "OVERLAPSCOPE_NATIVE=0" in why
    monkeypatch.delenv("OVERLAPSCOPE_NATIVE")
    build = ModuleType("instrumented_ddp.native._native")
    monkeypatch.setitem(sys.modules, build.__name__, build)
    build.INTERFACE = native.INTERFACE - 1  # type: ignore[attr-defined]
    assert native._load()[0] is None
    build.INTERFACE = native.INTERFACE  # type: ignore[attr-defined]
    assert native._load() == (build, "")
    monkeypatch.setitem(sys.modules, build.__name__, None)  # there was no compiler
    module, why = native._load()
    assert module is None
    assert "compiler" in why


def test_that_ends_of_collectives_are_only_bounds_is_said_at_the_start_and_wherever_they_are_shown(
    traces, monkeypatch, capsys
):
    why = "a stream can't wait for the backend mine alone"
    monkeypatch.setattr(recorder, "explain_bounds", lambda *_: why)
    model = make_model(traces)
    assert capsys.readouterr().err.count(why) == 1
    backward(model)
    trace = recorded(model, traces)
    assert trace.run["ends_are_bounds"] == why
    assert why in describe_recording(trace)
    assert why in dict(list_run_facts(trace))["backend"]
