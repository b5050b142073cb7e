"""Train a small network with Lightning: accumulation, validation, a checkpoint, and on from there.

    python train_with_lightning.py FOLDER [--instrumented] [--find-unused-parameters]

Each rank leaves its final parameters in FOLDER.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from instrumented_ddp import DistributedDataParallel

ACCUMULATED = 2
STEPS_PER_EPOCH = 4
EPOCHS = 3


class InstrumentedDDPStrategy(DDPStrategy):
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class Classifier(LightningModule):
    """Classifies points.

    With ``spare_parts`` a part of it is used by some batches and ranks only, and another by none.
    """

    def __init__(self, *, spare_parts: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(512, 10)
        if spare_parts:
            self.second_head = nn.Linear(512, 10)
            self.unused = nn.Linear(10, 10)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(points))

    def training_step(self, batch: list[torch.Tensor], batch_number: int) -> torch.Tensor:
        points, classes = batch
        features = self.body(points)
        scores = self.head(features)
        if hasattr(self, "second_head") and (batch_number // ACCUMULATED + self.global_rank) % 3 == 0:
            scores = scores + self.second_head(features)
        return cross_entropy(scores, classes)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        points, classes = batch
        self.log("loss", cross_entropy(self(points), classes), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(count: int, seed: int) -> DataLoader[list[torch.Tensor]]:
    """Points of noise; the class is the largest of the first ten coordinates."""
    points = torch.randn(8 * count, 64, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(points, points[:, :10].argmax(1)), batch_size=8)


def train(folder: Path, strategy: DDPStrategy, epochs: int, *, spare_parts: bool, checkpoint: str | None) -> Trainer:
    seed_everything(1)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[ModelCheckpoint(folder / "checkpoints", monitor="loss", save_last=True)],
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
    )
    model = Classifier(spare_parts=spare_parts)
    trainer.fit(model, batches(2 * ACCUMULATED * STEPS_PER_EPOCH, seed=2), batches(4, seed=3), ckpt_path=checkpoint)
    assert trainer.global_step == epochs * STEPS_PER_EPOCH
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instrumented", action="store_true", help="use instrumented_ddp in place of torch's class")
    parser.add_argument("--find-unused-parameters", action="store_true", help="train a model that has some")
    arguments = parser.parse_args()
    unused = arguments.find_unused_parameters

    def strategy() -> DDPStrategy:
        strategy_class = InstrumentedDDPStrategy if arguments.instrumented else DDPStrategy
        return strategy_class(find_unused_parameters=unused, bucket_cap_mb=1)

    train(arguments.folder, strategy(), 1, spare_parts=unused, checkpoint=None)
    trainer = train(arguments.folder, strategy(), EPOCHS, spare_parts=unused, checkpoint="last")
    torch.save(trainer.lightning_module.state_dict(), arguments.folder / f"rank_{trainer.global_rank}.pt")
    torch.distributed.destroy_process_group()  # else a thread of gloo's may abort the process (pytorch #179291)


if __name__ == "__main__":
    main()
