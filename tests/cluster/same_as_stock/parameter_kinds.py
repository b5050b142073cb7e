"""Parameters of every kind: sparse, complex, shared, frozen, empty, of several dtypes and layouts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.cluster.same_as_stock.scenarios import MakeDdp, Scenarios
from tests.cluster.same_as_stock.seen import Seen
from tests.cluster.same_as_stock.training import WIDTH, Branches, batch, logged, make_mlp, mean_square, train
from tests.cluster.same_as_stock.unused_parameters import running

scenarios = Scenarios()
BOTH = (False, True)


def tokens(step: int) -> torch.Tensor:
    """Rows of an embedding, others on each rank, some of them twice."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(0, 10, (3, 4), generator=generator)


class Words(nn.Module):
    """An embedding with sparse gradients before dense layers."""

    def __init__(self, embedding: Callable[..., nn.Module], dense: bool = True) -> None:
        super().__init__()
        self.embedding = embedding(10, WIDTH, sparse=True)
        self.dense = nn.Linear(WIDTH, WIDTH) if dense else nn.Identity()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Embed."""
        return self.dense(self.embedding(words))


@scenarios.add(embedding=(nn.Embedding, nn.EmbeddingBag), dense=BOTH, view=BOTH)
def sparse_gradients(
    make_ddp: MakeDdp, seen: Seen, embedding: Callable[..., nn.Module], dense: bool, view: bool
) -> None:
    model = make_ddp(Words(embedding, dense), gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(tokens(step)).square().mean().backward()
        seen.gradients(f"step {step}", model)
        optimizer.step()
    seen.state("in the end", model)
    seen.note("logged", logged(model))


@scenarios.add()
def sparse_gradients_are_accumulated(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Words(nn.Embedding))
    for step in range(3):
        with model.no_sync():
            model(tokens(step)).square().mean().backward()
        seen.gradients(f"step {step}, inside no_sync", model)
        model(tokens(step + 10)).square().mean().backward()
        seen.gradients(f"step {step}", model)


@scenarios.add()
def sparse_gradients_where_some_are_unused(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Words(nn.Embedding), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        output = model(tokens(step)) if step else model.module.dense(torch.ones(WIDTH))
        output.square().mean().backward()
        seen.gradients(f"step {step}", model)


@scenarios.add()
def a_module_that_promises_sparse_gradients_and_gives_dense_ones(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Words(nn.Embedding))
    loss = functional.linear(model(tokens(0)), model.module.embedding.weight).sum()
    seen.error("backward", loss.backward)


class Complex(nn.Module):
    """A complex and a real parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the absolute values of a complex product."""
        return self.linear((x.to(torch.complex64) @ self.matrix).abs())


@scenarios.add(view=BOTH, bucket_cap_mb=(None, 1e-4))
def complex_parameters(make_ddp: MakeDdp, seen: Seen, view: bool, bucket_cap_mb: float | None) -> None:
    model = make_ddp(Complex(), gradient_as_bucket_view=view, bucket_cap_mb=bucket_cap_mb)
    train(model, seen)


def make_convnet() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, (1, 3)), nn.Flatten(), nn.Linear(24, 2))


@scenarios.add(view=BOTH, static_graph=BOTH)
def channels_last(make_ddp: MakeDdp, seen: Seen, view: bool, static_graph: bool) -> None:
    module = make_convnet().to(memory_format=torch.channels_last)
    model = make_ddp(module, gradient_as_bucket_view=view, static_graph=static_graph, bucket_cap_mb=1e-4)
    train(
        model,
        seen,
        loss_of=lambda model, step: (
            model(batch(step, 2, 3, 8, 6).to(memory_format=torch.channels_last)).square().mean()
        ),
    )


@scenarios.add(view=BOTH)
def transposed_parameters(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    module = make_mlp(2)
    for layer in (module[0], module[2]):
        layer.weight = nn.Parameter(torch.rand(WIDTH, WIDTH).t())
    train(make_ddp(module, gradient_as_bucket_view=view), seen)


@scenarios.add(view=BOTH)
def a_gradient_of_another_layout_than_its_parameter(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(2), gradient_as_bucket_view=view)
    weight = model.module[0].weight
    weight.grad = torch.ones(WIDTH, WIDTH).t()
    weight.grad[0, 1] = 5.0
    mean_square(model, 0).backward()
    seen.gradients("after backward", model)


class WithEmptyParameter(nn.Module):
    """A linear layer and a parameter without elements, which is used all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all."""
        return self.scalar * self.linear(torch.cat([x, self.empty]))


@scenarios.add(view=BOTH, bucket_cap_mb=(None, 1e-6))
def empty_and_scalar_parameters(make_ddp: MakeDdp, seen: Seen, view: bool, bucket_cap_mb: float | None) -> None:
    train(make_ddp(WithEmptyParameter(), gradient_as_bucket_view=view, bucket_cap_mb=bucket_cap_mb), seen)


@scenarios.add(dtype=(torch.float64, torch.bfloat16, torch.float16), view=BOTH)
def another_dtype(make_ddp: MakeDdp, seen: Seen, dtype: torch.dtype, view: bool) -> None:
    model = make_ddp(make_mlp().to(dtype), gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    train(model, seen, loss_of=lambda model, step: model(batch(step, dtype=dtype)).float().square().mean())


class OfManyDtypes(nn.Module):
    """Layers of four dtypes, used in turn."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float()


@scenarios.add(view=BOTH, find_unused_parameters=BOTH, bucket_cap_mb=(None, 1e-4))
def mixed_dtypes(
    make_ddp: MakeDdp, seen: Seen, view: bool, find_unused_parameters: bool, bucket_cap_mb: float | None
) -> None:
    model = make_ddp(
        OfManyDtypes(),
        gradient_as_bucket_view=view,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=bucket_cap_mb,
    )
    train(model, seen)
    seen.note("logged", logged(model))


class Tied(nn.Module):
    """Two layers share a weight, and one module appears twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the shared weight three times."""
        return self.again(torch.tanh(self.second(torch.tanh(self.first(x)))))


@scenarios.add(view=BOTH)
def shared_parameters(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    train(make_ddp(Tied(), gradient_as_bucket_view=view, bucket_cap_mb=1e-4), seen)


@scenarios.add(view=BOTH)
def frozen_parameters(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    module = make_mlp()
    module[0].requires_grad_(False)
    module[4].bias.requires_grad_(False)
    model = make_ddp(module, gradient_as_bucket_view=view, bucket_cap_mb=1e-3)
    train(model, seen)
    seen.note("logged", logged(model))


@scenarios.add(find_unused_parameters=BOTH)
def a_parameter_is_frozen_after_construction(make_ddp: MakeDdp, seen: Seen, find_unused_parameters: bool) -> None:
    model = make_ddp(make_mlp(), find_unused_parameters=find_unused_parameters)
    train(model, seen)
    model.module[2].requires_grad_(False)
    mean_square(model, 0).backward()
    seen.gradients("frozen", model)
    if find_unused_parameters:
        mean_square(model, 1).backward()
        seen.gradients("frozen, again", model)
        model.module[2].requires_grad_(True)
        train(model, seen)
    else:
        seen.error(
            "next forward",
            lambda: mean_square(model, 1),
            sentence="Expected to have finished reduction in the prior iteration",
            names=["2.weight", "2.bias"],
        )


@scenarios.add()
def a_parameter_is_thawed_after_construction(make_ddp: MakeDdp, seen: Seen) -> None:
    module = make_mlp()
    module[2].requires_grad_(False)
    model = make_ddp(module)
    module[2].requires_grad_(True)
    train(model, seen)  # its gradient is this rank's own


@scenarios.add(view=BOTH)
def the_data_of_a_parameter_are_replaced(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view)
    train(model, seen)
    model.zero_grad()
    model.module[2].weight.data = torch.rand(WIDTH, WIDTH)
    train(model, seen)


@scenarios.add()
def the_layout_changes_after_construction(make_ddp: MakeDdp, seen: Seen) -> None:
    # With gradients that are no views, stock gives out such gradients with their elements in the wrong places.
    model = make_ddp(make_convnet(), gradient_as_bucket_view=True)
    model.to(memory_format=torch.channels_last)
    train(model, seen, loss_of=lambda model, step: model(batch(step, 2, 3, 8, 6)).square().mean())


@scenarios.add(view=BOTH)
def the_dtype_changes_after_construction(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    model = make_ddp(make_mlp(), gradient_as_bucket_view=view)
    model.double()
    loss = model(batch(0, dtype=torch.float64)).sum()
    seen.error("backward", loss.backward, sentence="Expected ")


@scenarios.add()
def a_parameter_is_exchanged_after_construction(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(make_mlp())
    model.module[2].weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
    mean_square(model, 0).backward()
    seen.gradients("after backward", model)
    seen.error(
        "next forward",
        lambda: mean_square(model, 1),
        sentence="Expected to have finished reduction in the prior iteration",
        names=["2.weight"],
    )


class Listed(nn.Module):
    """Parameters in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.rand(WIDTH) for _ in range(3)])
        self.named = nn.ParameterDict({"b": torch.rand(WIDTH), "a": torch.rand(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all."""
        return sum((x * p for p in self.listed), self.named["a"] * self.named["b"])


@scenarios.add(view=BOTH)
def parameters_in_lists_and_dictionaries(make_ddp: MakeDdp, seen: Seen, view: bool) -> None:
    train(make_ddp(Listed(), gradient_as_bucket_view=view, bucket_cap_mb=1e-4), seen)


@scenarios.add()
def parametrised_weights(make_ddp: MakeDdp, seen: Seen) -> None:
    module = make_mlp(3)
    nn.utils.parametrizations.weight_norm(module[0])
    nn.utils.parametrizations.orthogonal(module[2])
    train(make_ddp(module, bucket_cap_mb=1e-4), seen)


@scenarios.add()
def a_recurrent_module(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True))
    train(model, seen, loss_of=lambda model, step: model(batch(step, 2, 3, WIDTH))[0].square().mean())


@scenarios.add()
def lazy_parameters(make_ddp: MakeDdp, seen: Seen) -> None:
    seen.error("not initialized", lambda: make_ddp(nn.LazyLinear(WIDTH)))
    module = nn.LazyLinear(WIDTH)
    module(batch(0))
    train(make_ddp(module), seen)


@scenarios.add()
def no_parameter_to_train(make_ddp: MakeDdp, seen: Seen) -> None:
    seen.error("no parameter", lambda: make_ddp(nn.ReLU()))
    seen.error("all frozen", lambda: make_ddp(make_mlp().requires_grad_(False)))


@scenarios.add()
def gradients_that_are_there_before_the_first_step(make_ddp: MakeDdp, seen: Seen) -> None:
    model = make_ddp(Branches(), gradient_as_bucket_view=True, find_unused_parameters=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
    model(batch(0), "ab").sum().backward()
    seen.gradients("first step", model)
    train(model, seen, loss_of=running("abcd"))
