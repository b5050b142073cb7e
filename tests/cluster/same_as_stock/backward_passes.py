"""Ways to run backward that are not one forward, one loss, one backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, batch, make_mlp, mean_square, train

scenarios = Scenarios()
BOTH = (False, True)


class TwoHeads(nn.Module):
    """A body with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both outputs."""
        x = torch.tanh(self.body(x))
        return self.left(x), self.right(x)


@scenarios.add(view=BOTH, bucket_cap_mb=(None, 1e-3))
def usual(make_ddp: MakeDdp, seen: Seen, view: bool, bucket_cap_mb: float | None) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=bucket_cap_mb)
    train(model, seen, steps=range(6))


@scenarios.add(view=BOTH, zero=("to_none", "to_zero", "never"))
def gradients_are_accumulated_inside_no_sync(make_ddp: MakeDdp, seen: Seen, view: bool, zero: str) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    for step in range(0, 8, 2):
        if zero != "never":
            model.zero_grad(set_to_none=zero == "to_none")
        with model.no_sync():
            mean_square(model, step).backward()
        seen.gradients(f"step {step}, inside no_sync", model)
        mean_square(model, step + 1).backward()
        seen.gradients(f"step {step}", model)


@scenarios.add(view=BOTH, batched_grad_copy=BOTH)
def gradients_are_handled_in_many_ways_between_steps(
    make_ddp: MakeDdp, seen: Seen, view: bool, batched_grad_copy: bool
) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, batched_grad_copy=batched_grad_copy, bucket_cap_mb=1e-3)
    for step in range(6):
        mean_square(model, step).backward()
        seen.gradients(f"step {step}", model)
        for place, parameter in enumerate(model.parameters(), start=step):
            if place % 4 == 0:
                parameter.grad = None
            elif place % 4 == 1:
                parameter.grad = 2 * parameter.grad
            elif place % 4 == 2:
                parameter.grad.zero_()


@scenarios.add(view=BOTH)
def the_forward_is_inside_no_sync_and_the_backward_is_not(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view)
    for step in range(2):
        with model.no_sync():
            loss = mean_square(model, step)
        loss.backward()
        seen.gradients(f"step {step}", model)


@scenarios.add()
def the_backward_is_inside_no_sync_and_the_forward_is_not(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    for step in range(2):
        loss = mean_square(model, step)
        with model.no_sync():
            loss.backward()
        seen.gradients(f"step {step}", model)


@scenarios.add(find_unused_parameters=BOTH)
def a_library_prepares_the_reducer_itself(make_ddp: MakeDdp, seen: Seen, find_unused_parameters: bool) -> None:
    # Lightning does so where the user's code runs backward.
    model = make_ddp(TwoHeads(), find_unused_parameters=find_unused_parameters, bucket_cap_mb=1e-3)
    for step in range(3):
        model.zero_grad()
        model.require_backward_grad_sync = False
        left, right = model(batch(step))
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([left] if find_unused_parameters else [])
        (left.sum() if find_unused_parameters else (left + right).sum()).backward()
        seen.gradients(f"step {step}", model)


@scenarios.add(view=BOTH, find_unused_parameters=BOTH)
def each_output_has_a_backward_of_its_own(
    make_ddp: MakeDdp, seen: Seen, view: bool, find_unused_parameters: bool
) -> None:
    model = make_ddp(TwoHeads(), gradient_as_bucket_view=view, find_unused_parameters=find_unused_parameters)
    left, right = model(batch(0))
    left.sum().backward(retain_graph=True)
    if not view:  # where they are, stock divides them one by one, ours when their bucket is ready: never, here
        seen.gradients("after the first backward", model)
    seen.error("second backward", right.sum().backward, sentence="", names=["body"] if find_unused_parameters else [])


@scenarios.add(view=BOTH)
def the_outputs_go_into_one_loss(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(TwoHeads(), gradient_as_bucket_view=view)
    train(model, seen, loss_of=lambda model, step: torch.stack(model(batch(step))).square().mean())


@scenarios.add(view=BOTH)
def the_graph_is_kept_and_run_again(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view)
    loss = mean_square(model, 0)
    loss.backward(retain_graph=True)
    seen.gradients("after the first backward", model)
    loss.backward()
    seen.gradients("after the second backward", model)
    train(model, seen)


@scenarios.add(view=BOTH)
def two_forwards_before_one_backward(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    train(model, seen, loss_of=lambda model, step: mean_square(model, step) + 2 * mean_square(model, step + 10))


@scenarios.add()
def two_forwards_before_two_backwards(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    first, second = mean_square(model, 0), mean_square(model, 1)
    first.backward()
    seen.gradients("after the first backward", model)
    second.backward()
    seen.gradients("after the second backward", model)


@scenarios.add()
def a_forward_without_backward(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    for step in range(3):
        mean_square(model, step)
        model(batch(step + 10)).detach()
        train(model, seen, steps=[step])


@scenarios.add()
def ranks_differ_in_forwards_without_backward(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3, forward_sync_buffers=False)
    train(model, seen)  # which is when buckets are rebuilt, together
    for step in range(3):
        for _ in range(dist.get_rank()):
            mean_square(model, step)
        train(model, seen, steps=[step])


@scenarios.add(mode=(torch.no_grad, torch.inference_mode))
def evaluation_in_between(make_ddp: MakeDdp, seen: Seen, mode: type[torch.no_grad]) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    for step in range(3):
        with mode():
            seen.note(f"step {step}: evaluation", model(batch(step)))
        train(model, seen, steps=[step])


@scenarios.add(view=BOTH)
def gradients_of_gradients(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view)
    inputs = batch(0).requires_grad_()
    loss = model(inputs).square().sum()
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    seen.note("gradient of the input", gradient)
    (loss + gradient.square().sum()).backward()
    seen.gradients("after the penalty", model)
    train(model, seen)


@scenarios.add(view=BOTH)
def a_backward_that_keeps_its_own_graph_inside_no_sync(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view)
    with model.no_sync():
        mean_square(model, 0).backward(create_graph=True)
    seen.gradients("after backward", model)
    sum(parameter.grad.square().sum() for parameter in model.parameters()).backward()
    seen.gradients("after backward of the gradients", model)
    model.zero_grad()


@scenarios.add()
def autograd_grad_reduces_nothing(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    seen.note("gradients", torch.autograd.grad(mean_square(model, 0), list(model.parameters())))
    seen.gradients("none is kept", model)
    train(model, seen)


@scenarios.add()
def backward_to_all_parameters_as_inputs(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    for step in range(3):
        mean_square(model, step).backward(inputs=list(model.parameters()))
        seen.gradients(f"step {step}", model)


@scenarios.add()
def backward_to_some_parameters_as_inputs(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    mean_square(model, 0).backward(inputs=list(model.parameters())[-2:])
    seen.gradients("after backward", model)
    seen.error(
        "next forward",
        lambda: mean_square(model, 1),
        sentence="Expected to have finished reduction in the prior iteration",
        names=["0.weight"],
    )


@scenarios.add()
def the_output_is_changed_in_place(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), find_unused_parameters=True)
    train(model, seen, loss_of=lambda model, step: model(batch(step)).mul_(2).square().mean())


@scenarios.add(find_unused_parameters=BOTH)
def ranks_differ_in_the_size_of_their_batch(make_ddp: MakeDdp, seen: Seen, find_unused_parameters: bool) -> None:
    model = make_ddp(make_mlp(), find_unused_parameters=find_unused_parameters)
    train(model, seen, loss_of=lambda model, step: model(batch(step, 2 + dist.get_rank(), WIDTH)).square().mean())


@scenarios.add()
def a_batch_is_empty(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    train(model, seen, loss_of=lambda model, step: model(batch(step, 2 * dist.get_rank(), WIDTH)).square().sum())


@scenarios.add()
def gradients_that_are_no_numbers(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), bucket_cap_mb=1e-3)
    factor = (float("inf"), float("nan"))[dist.get_rank()]
    (factor * mean_square(model, 0)).backward()
    seen.gradients("after backward", model)
