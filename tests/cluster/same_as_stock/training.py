"""Small modules, inputs that differ between ranks and steps, and a training loop that keeps what it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from tests.cluster.same_as_stock.seen import Seen

TORCH_IS_OLDER = torch.__version__ < (2, 13)
"""Than the one whose class scenarios are made for: it can't do all of it."""
STEPS = 4
WIDTH = 8


class Branches(nn.Module):
    """Layers of different sizes that each call runs as its letters say, first to last."""

    def __init__(self, names: str = "abcd") -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(WIDTH, WIDTH + place), nn.Tanh(), nn.Linear(WIDTH + place, WIDTH))
                for place, name in enumerate(names)
            }
        )

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        """Apply the layers named."""
        for name in names:
            x = x + self.layers[name](x)
        return x


def make_mlp(depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inputs of this rank at this step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(shape or (4, WIDTH), generator=generator).to(dtype)


def mean_square(model: nn.Module, step: int) -> torch.Tensor:
    """The usual loss."""
    return model(batch(step)).square().mean()


def train(
    model: nn.Module,
    seen: Seen,
    *,
    steps: Sequence[int] = range(STEPS),
    loss_of: Callable[[nn.Module, int], torch.Tensor] = mean_square,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train and keep the loss and the gradients of each step, and the state in the end."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        # Every other step keeps gradients in place, so that autograd adds to what is already there.
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = loss_of(model, step)
        loss.backward()
        seen.note(f"step {step}: loss", loss)
        seen.gradients(f"step {step}", model)
        optimizer.step()
    seen.state("in the end", model)


def logged(model: nn.parallel.DistributedDataParallel) -> dict[str, str | int | None]:
    """What the wrapper logs of itself. Of times, that there is one."""
    data = model._get_ddp_logging_data()
    if TORCH_IS_OLDER:
        for key in ("num_buckets_reduced", "unused_parameter_size"):  # stock has them of later versions, or not always
            data.pop(key, None)
    if data["find_unused_parameters"]:
        # Stock tells when the unused parameters first change, and that in this iteration, of one wrapper in a process.
        data.pop("can_set_static_graph", None)
        data.pop("iteration", None)
    if "," in data["dtypes"] or any(getattr(module, "sparse", False) for module in model.modules()):
        # Stock leaves the order of buckets of several kinds to a hash map; ours are in the order of readiness.
        for key in ("rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"):
            if key in data:
                data[key] = ", ".join(sorted(data[key].split(", ")))
    return {key: None if "_time" in key else value for key, value in data.items()}
