"""A training script with torch's own DDP. It knows nothing of an emulated network."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(25):
        if step == 5:  # warm
            start = time.perf_counter()
        loss = model(torch.randn(32, 1000)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    milliseconds = 1000 * (time.perf_counter() - start) / 20
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}, {milliseconds:.1f} ms a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
