"""A graph that the user promises not to change: what the first step finds out holds for all."""

from __future__ import annotations

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import Branches, batch, make_mlp, train
from tests.cluster.same_as_stock.unused_parameters import running

scenarios = Scenarios()
BOTH = (False, True)

USED_NO_LONGER = (
    "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in first "
    "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to True."
)
USED_ONLY_LATER = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then got "
    "used in the second iteration. this is not compatible with static_graph set to True."
)


@scenarios.add(view=BOTH, bucket_cap_mb=(None, 1e-4))
def all_parameters_are_used(make_ddp: MakeDdp, seen: Seen, view: bool, bucket_cap_mb: float | None) -> None:
    train(make_ddp(make_mlp(), static_graph=True, gradient_as_bucket_view=view, bucket_cap_mb=bucket_cap_mb), seen)


@scenarios.add(view=BOTH)
def some_parameters_are_unused(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(Branches(), static_graph=True, gradient_as_bucket_view=view)
    train(model, seen, loss_of=running("abd"))


@scenarios.add(view=BOTH)
def a_layer_is_used_twice(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(Branches(), static_graph=True, gradient_as_bucket_view=view)
    train(model, seen, loss_of=running("abcdab"))


@scenarios.add(view=BOTH)
def gradients_are_accumulated(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), static_graph=True, gradient_as_bucket_view=view)
    train(model, seen, steps=[0])  # which is to be a step that reduces
    for step in range(0, 6, 2):
        model.zero_grad()
        with model.no_sync():
            model(batch(step)).sum().backward()
        seen.gradients(f"step {step}, inside no_sync", model)
        model(batch(step + 1)).sum().backward()
        seen.gradients(f"step {step}", model)


@scenarios.add()
def two_forwards_before_two_backwards(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), static_graph=True)
    for step in range(3):
        model.zero_grad()
        first, second = model(batch(step)).sum(), model(batch(step + 10)).sum()
        (first + second).backward()
        seen.gradients(f"step {step}", model)


@scenarios.add()
def a_parameter_is_used_no_longer(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), static_graph=True)
    train(model, seen, loss_of=running("abcd"))
    model(batch(0), "abd").sum().backward()
    seen.error("next forward", lambda: model(batch(1), "abcd"), sentence=USED_NO_LONGER, names=["layers.c.0.weight"])


@scenarios.add()
def a_parameter_is_used_only_later(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), static_graph=True)
    train(model, seen, loss_of=running("abd"))
    loss = model(batch(0), "abcd").sum()
    seen.error("backward", loss.backward, sentence=USED_ONLY_LATER, names=["layers.c"])


@scenarios.add()
def a_parameter_is_used_more_often_later(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), static_graph=True)
    train(model, seen, loss_of=running("abcd"))
    train(model, seen, loss_of=running("abcdc"))


@scenarios.add()
def the_promise_is_given_after_construction(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches())
    with seen.warnings("first promise"):
        model._set_static_graph()
    with seen.warnings("second promise"):
        model._set_static_graph()
    train(model, seen, loss_of=running("abdab"))
    seen.note("logged", model._get_ddp_logging_data()["static_graph"])


@scenarios.add()
def the_promise_makes_finding_unused_parameters_needless(make_ddp: MakeDdp, seen: Seen) -> None:
    with seen.warnings("construction", with_file=False):  # stock's is about a line of its own
        model = make_ddp(Branches(), static_graph=True, find_unused_parameters=True)
    train(model, seen, loss_of=running("abd"))


@scenarios.add()
def evaluation_between_steps(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp(), static_graph=True)
    for step in range(3):
        train(model, seen, steps=[step])
        model.eval()
        seen.note("evaluation", model(batch(step)))
        model.train()
