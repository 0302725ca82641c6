r"""04: all-reduce every gradient on its own, while backward is still running.

Backward computes the gradients of the last layers first. Once one is complete its all-reduce runs
in the background, while backward goes on to the layers below. Every call still costs its latency.

    make 04_overlap_ddp NPROC=2                                             (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 04_overlap_ddp/overlap_ddp.py  (one host)
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


class OverlapDDP(nn.Module):
    """Average gradients: launch an all-reduce for each in backward; then wait for all; reset.

    model = OverlapDDP(module)                  # on every rank; takes rank 0's weights
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
        # Ranks match calls by their order alone, so all use this one, which is close to backward's.
        self.order = [p for p in module.parameters() if p.requires_grad][::-1]
        self.waiting = self.order.copy()  # not launched yet
        self.ready = set()  # parameters whose gradient is complete
        self.works = []  # all-reduces under way
        self.in_step = False  # True from a forward to the finish: only then hooks act
        hook = self._gradient_is_ready
        self.hooks = [p.register_post_accumulate_grad_hook(hook) for p in self.order]

    def forward(self, *inputs, **kwargs):
        self.in_step = self.in_step or torch.is_grad_enabled()
        return self.module(*inputs, **kwargs)

    def _gradient_is_ready(self, parameter):  # autograd calls it when parameter.grad is complete
        if parameter in self.ready:
            raise RuntimeError("a gradient came twice: no_sync() is for all but the last backward")
        if self.in_step and self.synchronizing:
            self.ready.add(parameter)
            self._launch_ready()

    def _launch_ready(self):
        while self.waiting and self.waiting[0] in self.ready:
            gradient = gradient_or_zeros(self.waiting.pop(0))  # an unused one counts as zero
            gradient.mul_(1 / self.world_size)  # before the sum, which could overflow
            self.works.append(dist.all_reduce(gradient, group=self.process_group, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients. Call it after backward(), before optimizer.step()."""
        if not self.synchronizing:
            return
        self.in_step = False
        self.ready.update(self.order)  # also what backward did not reach
        self._launch_ready()
        for work in self.works:
            work.wait()
        self.waiting = self.order.copy()  # reset
        self.ready.clear()
        self.works.clear()
        if {p for p in self.module.parameters() if p.requires_grad} != set(self.order):
            raise RuntimeError("parameters were frozen or replaced: wrap the module again")

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
    ladder.run(OverlapDDP, train_step, __doc__)
