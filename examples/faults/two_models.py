"""Two models train in turn, as in a GAN.

Nothing is wrong.
"""

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


def main() -> None:
    job.start()
    generator = job.DistributedDataParallel(nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 32)))
    critic = job.DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.001)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.001)
    for real, _ in job.batches():
        fake = generator(torch.randn(len(real), 8))
        critic_optimizer.zero_grad()
        (functional.softplus(critic(fake.detach())) + functional.softplus(-critic(real))).mean().backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        generator_optimizer.step()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
