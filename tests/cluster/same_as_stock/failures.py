"""Going on after an error, and the private methods that libraries call."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, Branches, batch, logged, make_mlp, mean_square, train
from tests.cluster.same_as_stock.unused_parameters import NOT_FINISHED, running

scenarios = Scenarios()
BOTH = (False, True)


class MayFail(nn.Module):
    """Three layers; fails in the middle of forward or backward if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fails_in = ""
        self.error: BaseException = ValueError("as told")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        x = self.middle(self.first(x))
        if self.fails_in == "forward":
            raise self.error
        if self.fails_in == "backward":
            x.register_hook(self.fail)
        return self.last(x)

    def fail(self, _: torch.Tensor) -> None:
        """Raise."""
        raise self.error


@scenarios.add(find_unused_parameters=BOTH, static_graph=BOTH)
def forward_fails(make_ddp: MakeDdp, seen: Seen, find_unused_parameters: bool, static_graph: bool) -> None:
    model = make_ddp(MayFail(), find_unused_parameters=find_unused_parameters, static_graph=static_graph)
    for step in range(3):
        model.module.fails_in = "forward"
        seen.error(f"step {step}: forward", lambda step=step: mean_square(model, step))
        seen.note("active", nn.parallel.DistributedDataParallel._get_active_ddp_module())
        model.module.fails_in = ""
        train(model, seen, steps=[step])


@scenarios.add(bucket_cap_mb=(None, 1e-4), find_unused_parameters=BOTH)
def backward_fails(make_ddp: MakeDdp, seen: Seen, bucket_cap_mb: float | None, find_unused_parameters: bool) -> None:
    # With small buckets, some have been reduced before.
    model = make_ddp(MayFail(), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=find_unused_parameters)
    train(model, seen)
    model.module.fails_in = "backward"
    loss = mean_square(model, 0)
    seen.error("backward", loss.backward)
    seen.note("gradient of the last layer", model.module.last.weight.grad is not None)
    model.module.fails_in = ""
    seen.error("next forward", lambda: mean_square(model, 1), sentence=NOT_FINISHED, names=["first.weight"])


@scenarios.add()
def backward_is_interrupted(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(MayFail())
    model.module.fails_in, model.module.error = "backward", KeyboardInterrupt()
    loss = mean_square(model, 0)
    try:
        loss.backward()
    except KeyboardInterrupt:
        seen.note("interrupted", True)
    model.module.fails_in = ""
    with torch.no_grad():
        seen.note("evaluation", model(batch(1)))
    seen.error("next forward", lambda: mean_square(model, 1), sentence=NOT_FINISHED, names=["first.weight"])


@scenarios.add()
def the_loss_fails(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    for step in range(3):
        loss = model(batch(step))
        seen.error("no scalar", loss.backward)
        train(model, seen, steps=[step])


@scenarios.add()
def a_backward_without_a_forward_of_the_wrapper(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    train(model, seen)
    model.zero_grad()
    mean_square(model.module, 0).backward()
    seen.gradients("after a backward of the module", model)
    train(model, seen)


@scenarios.add()
def the_first_backward_is_without_a_forward_of_the_wrapper(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    mean_square(model.module, 0).backward()
    seen.gradients("after a backward of the module", model)
    train(model, seen)


@scenarios.add()
def asking_whether_the_reducer_has_finished(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches())
    seen.note("at first", model._check_reducer_finalized())
    train(model, seen, loss_of=running("abcd"))
    seen.note("after steps", model._check_reducer_finalized())
    model(batch(0), "abd").sum().backward()
    seen.error(
        "after an unused parameter", model._check_reducer_finalized, sentence=NOT_FINISHED, names=["layers.c.0.weight"]
    )


@scenarios.add(view=BOTH)
def hooks_are_removed(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view)
    train(model, seen)
    model._remove_autograd_hooks()
    model.zero_grad()
    for step in range(2):
        mean_square(model, step).backward()
        seen.gradients(f"step {step} without hooks", model)
    model._remove_autograd_hooks()


@scenarios.add(after_steps=BOTH)
def the_process_group_changes(make_ddp: MakeDdp, seen: Seen, after_steps: bool) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    if after_steps:
        train(model, seen)
    for ranks in ([0], [1], [0, 1]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            model._update_process_group(group)
            seen.note("has rebuilt", model._has_rebuilt_buckets)
            train(model, seen)
            seen.note("has rebuilt", model._has_rebuilt_buckets)
            seen.note("logged", logged(model))


@scenarios.add()
def the_process_group_changes_after_an_unused_parameter(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), bucket_cap_mb=1e-3)
    model(batch(0), "abd").sum().backward()
    model._update_process_group(dist.new_group([0, 1]))
    train(model, seen, loss_of=running("abcd"))


@scenarios.add()
def the_sampling_of_statistics(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    seen.error("rate of 0", lambda: model._set_ddp_runtime_logging_sample_rate(0))
    model._set_ddp_runtime_logging_sample_rate(3)
    for step in range(17):
        mean_square(model, step).backward()
        seen.note(f"step {step}: logged", logged(model))


@scenarios.add(clones=BOTH)
def whether_outputs_are_cloned(make_ddp: MakeDdp, seen: Seen, clones: bool) -> None:
    model = make_ddp(make_mlp(), find_unused_parameters=True)
    model._set_ddp_sink_clone(clones)
    train(model, seen)

    def change_output_in_place() -> None:
        output = model(batch(0))
        output += 1
        output.square().mean().backward()

    if clones:
        change_output_in_place()
        seen.gradients("after a change in place", model)
    else:
        seen.error("a change in place", change_output_in_place)


@scenarios.add()
def what_the_reducer_tells(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    train(model, seen)
    buckets = model.reducer._get_zeros_like_grad_buckets()
    seen.note("buckets", [(bucket.index(), bucket.is_last(), bucket.buffer()) for bucket in buckets])
    seen.note("has rebuilt", model.reducer._rebuild_buckets())
