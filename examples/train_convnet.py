"""Train a small ResNet on scikit-learn's 1,797 scanned digits.

    torchrun --nproc-per-node 2 examples/train_convnet.py
    overlapscope record -o traces/ -- torchrun --nproc-per-node 2 examples/train_convnet.py

An ordinary DDP script: the one line that differs from stock PyTorch is the import.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def make_resnet(width: int) -> nn.Sequential:
    """Make a ResNet for 8×8 gray images in ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Load the digits as (1, 8, 8) images in 0 to 1, most of them for training and the rest for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = shuffled[:297], shuffled[297:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def measure_accuracy(model: nn.Module, test_set: TensorDataset, device: torch.device) -> float:
    """Return the share of the test images that are classified correctly."""
    model.eval()
    images, labels = (tensor.to(device) for tensor in test_set.tensors)
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return accuracy


def main() -> None:
    """Train, and print the accuracy after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=50, help="images per rank and step")
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--bucket-cap-mb", type=float, default=None, help="as in DDP (default: 25, first bucket 1)")
    parser.add_argument("--stock", action="store_true", help="use torch's own DistributedDataParallel")
    args = parser.parse_args()

    if args.stock:
        from torch.nn.parallel import DistributedDataParallel
    else:
        from instrumented_ddp import DistributedDataParallel

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = DistributedDataParallel(
        make_resnet(args.width).to(device),
        device_ids=[device.index] if on_gpu else None,
        bucket_cap_mb=args.bucket_cap_mb,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_set, test_set = load_images()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = measure_accuracy(model, test_set, device)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {accuracy:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
