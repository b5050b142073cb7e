"""Train a small byte-level GPT on the Python standard library's own sources.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    overlapscope record -o traces/ -- torchrun --nproc-per-node 2 examples/train_gpt.py

An ordinary DDP script: the one line that differs from stock PyTorch is the import.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, position, width) to the same shape."""
        batch, positions, width = x.shape
        packed = self.query_key_value(self.attention_norm(x)).view(batch, positions, 3, self.heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding and the output layer share their weight."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.byte_embedding.weight, std=0.02)
        self.head.weight = self.byte_embedding.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map bytes (batch, position) to logits (batch, position, 256)."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.byte_embedding(text) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(x)))


def read_sources(most_bytes: int = 4_000_000) -> torch.Tensor:
    """Read the standard library's modules, one after the other, as bytes."""
    sources = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        sources += path.read_bytes()
        if len(sources) >= most_bytes:
            break
    return torch.frombuffer(bytearray(sources[:most_bytes]), dtype=torch.uint8)


def draw_batch(text: torch.Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Draw random windows of the text, and the same windows one byte later."""
    starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train, and print the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
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
    model = GPT(args.width, args.layers, args.heads, args.context).to(device)
    model = DistributedDataParallel(
        model, device_ids=[device.index] if on_gpu else None, bucket_cap_mb=args.bucket_cap_mb
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = read_sources()
    generator = torch.Generator().manual_seed(rank)  # every rank reads different windows
    for step in range(args.steps):
        inputs, targets = draw_batch(text, args.batch, args.context, generator)
        logits = model(inputs.to(device))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten().to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
