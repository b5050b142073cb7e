"""Each rank keeps its own BatchNorm statistics, and an average of the weights that is used to evaluate on rank 0.

Nothing is wrong: DDP is told not to broadcast buffers, and the weights are put back after each evaluation.
"""

import copy

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main() -> None:
    rank = job.start()
    net = nn.Sequential(nn.Linear(job.FEATURES, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, job.CLASSES))
    model = job.DistributedDataParallel(net, broadcast_buffers=False)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torch.manual_seed(rank)  # other units are dropped on each rank
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (inputs, labels) in enumerate(job.batches()):
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(net)
        if rank == 0 and step % 20 == 19:
            kept = copy.deepcopy(net.state_dict())
            net.load_state_dict(average.module.state_dict())
            with torch.no_grad():
                net(inputs)
            net.load_state_dict(kept)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
