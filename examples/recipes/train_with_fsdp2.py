"""Train a small transformer as torchtitan does: made on the meta device, sharded block by block by ``fully_shard``.

    overlapscope record -o traces/ -- torchrun --nproc-per-node 2 train_with_fsdp2.py

Nothing in it is about the recording: gathers, reduce-scatters and the time that the step waits for them are recorded.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

WORDS = 512
WIDTH = 128
LENGTH = 32


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, position, width) to the same shape."""
        batch, positions, width = x.shape
        packed = self.query_key_value(self.attention_norm(x)).view(batch, positions, 3, 4, width // 4)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Words in, logits of the next word out."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Map words (batch, position) to logits (batch, position, WORDS)."""
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.RMSNorm):
        module.reset_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))

    with torch.device("meta"):
        model = Transformer(arguments.layers)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=device)
    torch.manual_seed(1)
    model.apply(init_weights)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = torch.randint(WORDS, (8, LENGTH + 1), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    for step in range(arguments.steps):
        logits = model(words[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
