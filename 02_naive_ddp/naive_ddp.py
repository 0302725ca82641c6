r"""02: all-reduce every gradient on its own, after backward.

Data parallelism in its plainest form: every rank holds the whole model and a share of the batch.
After backward each gradient is averaged, with one blocking all-reduce per parameter, so that all
ranks take the step of one process with the whole batch. Every call costs latency.

    make 02_naive_ddp NPROC=2                                           (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 02_naive_ddp/naive_ddp.py  (one host)
    Two hosts (R is 0 on HOST0, else 1), instead of --standalone:
        --nnodes 2 --node-rank R --master-addr HOST0 --master-port 29400

Source: Li et al., "PyTorch Distributed", VLDB 2020, 3.1 and 3.2; Stanford CS336, assignment 2.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class NaiveDDP(nn.Module):
    """Average gradients with one blocking all-reduce per parameter, after backward.

    model = NaiveDDP(module)                    # on every rank; takes rank 0's weights
    loss_fn(model(x), y).backward()             # of this rank's share of the batch
    model.finish_gradient_synchronization()     # averages all gradients
    optimizer.step()                            # the same step on every rank
    optimizer.zero_grad()
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group  # the ranks that train together; None: all of them
        self.world_size = dist.get_world_size(process_group)
        self.synchronizing = True  # False within no_sync()
        broadcast_from_rank_0(module, process_group)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients. Call it after backward(), before optimizer.step()."""
        if not self.synchronizing:
            return
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                gradient = gradient_or_zeros(parameter)  # an unused one counts as zero
                gradient.mul_(1 / self.world_size)  # before the sum, which could overflow
                dist.all_reduce(gradient, group=self.process_group)

    def no_sync(self):
        return accumulating(self)  # a context: gradients are added up, and nothing is sent


def train_step(model, optimizer, inputs, targets):
    """Train on this rank's share of a batch; return its loss."""
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def broadcast_from_rank_0(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Give all ranks rank 0's parameters and buffers. ValueError if the module is wrapped."""
    for submodule in module.modules():
        if hasattr(submodule, "no_sync") or hasattr(submodule, "finish_gradient_synchronization"):
            raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
    for tensor in [*module.parameters(), *module.buffers()]:
        contiguous = tensor.detach().contiguous()  # as collectives need it
        dist.broadcast(contiguous, group=process_group, group_src=0)
        tensor.detach().copy_(contiguous)


def gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    """Return .grad, which is set to zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@contextmanager
def accumulating(wrapper: nn.Module):
    """Let hooks and finish_gradient_synchronization() do nothing, within `with no_sync():`."""
    before = wrapper.synchronizing
    wrapper.synchronizing = False
    try:
        yield
    finally:
        wrapper.synchronizing = before


if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]
    try:
        from common import ladder
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")
    ladder.run(NaiveDDP, train_step, __doc__)
