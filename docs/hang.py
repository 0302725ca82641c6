"""A run that hangs, because rank 0 makes a collective that rank 1 does not: see hangs.md.

torchrun --standalone --nproc-per-node 2 docs/hang.py
"""

import faulthandler
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

faulthandler.register(signal.SIGUSR1)  # kill -USR1 PID prints where that process is
dist.init_process_group("gloo", timeout=timedelta(seconds=20))  # gloo's default is 30 minutes
rank = dist.get_rank()
print(f"rank {rank} is process {os.getpid()}", flush=True)
loss = torch.ones(1)
if rank == 0:  # "only rank 0 prints the mean, so only rank 0 needs it"
    dist.all_reduce(loss)
    print(f"mean loss {loss.item() / 2}")
dist.barrier()
dist.destroy_process_group()
