"""Train a small network with Ray Train: two workers, each of which records itself.

    python train_with_ray.py FOLDER

Ray starts the workers, also on other hosts, so the script asks for the recording. Ray kills them when the training is
done, so it also says that it is done. On several hosts FOLDER is on a file system that all of them see.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from instrumented_ddp import attach, detach

WORKERS = 2
STEPS = 8


def points() -> TensorDataset:
    """Return points of noise; the class is the largest of the first ten coordinates."""
    found = torch.randn(WORKERS * 8 * STEPS, 64, generator=torch.Generator().manual_seed(2))
    return TensorDataset(found, found[:, :10].argmax(1))


def train(settings: dict[str, Any]) -> None:
    attach(settings["traces"])
    torch.manual_seed(1)
    model = prepare_model(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch, classes in prepare_data_loader(DataLoader(points(), batch_size=8)):
        loss = cross_entropy(model(batch), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ray.train.report({"loss": loss.item()})
    detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    uses_gpu = torch.cuda.is_available()
    trainer = TorchTrainer(
        train,
        train_loop_config={"traces": str(folder / "traces")},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=uses_gpu),
        torch_config=TorchConfig(backend="nccl" if uses_gpu else "gloo"),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
