"""Train a small network with an ``accelerate`` loop: accumulation, clipping, evaluation, a state saved and loaded.

    torchrun --nproc-per-node 2 train_with_accelerate.py FOLDER [--instrumented]

Each rank leaves its final parameters in FOLDER.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATED = 2
STEPS_PER_EPOCH = 4
EPOCHS = 3


class Network(nn.Module):
    """Batch normalization gives it buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1)
        )
        self.classifier = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def images(count: int, seed: int) -> TensorDataset:
    """Images of noise; the class is the brightest pixel of the first ten."""
    pixels = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(pixels, pixels.flatten(1)[:, :10].argmax(1))


def train(folder: Path) -> nn.Module:
    set_seed(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATED,
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)],
    )
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    batches = DataLoader(images(2 * 8 * ACCUMULATED * STEPS_PER_EPOCH, seed=2), batch_size=8, shuffle=True)
    evaluated = DataLoader(images(24, seed=3), batch_size=8)
    model, optimizer, schedule, batches, evaluated = accelerator.prepare(model, optimizer, schedule, batches, evaluated)

    for epoch in range(EPOCHS):
        model.train()
        for pixels, classes in batches:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(pixels), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for pixels, classes in evaluated:
                accelerator.gather_for_metrics((model(pixels).argmax(1), classes))
        if epoch == 0:
            accelerator.save_state(str(folder / "state"))
        elif epoch == 1:
            accelerator.load_state(str(folder / "state"))  # the last epoch goes on from the first
    network = accelerator.unwrap_model(model)
    assert type(network) is Network
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instrumented", action="store_true", help="use instrumented_ddp in place of torch's class")
    arguments = parser.parse_args()
    if arguments.instrumented:
        import instrumented_ddp

        torch.nn.parallel.DistributedDataParallel = instrumented_ddp.DistributedDataParallel

    network = train(arguments.folder)
    torch.save(network.state_dict(), arguments.folder / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()  # else a thread of gloo's may abort the process (pytorch #179291)


if __name__ == "__main__":
    main()
