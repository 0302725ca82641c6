r"""05: all-reduce the gradients in buckets, while backward is still running.

Communication starts during backward, as in 04, but gradients share a call: they are packed into
buckets of limited size, last layers first, as in torch's own DDP.

    make 05_bucketed NPROC=2                                          (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/bucketed.py  (one host)
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


class Bucket:
    """Parameters that share an all-reduce, and the flat tensor of their gradients."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
        views = views_like(parameters, self.flat)  # the gradients' places in flat
        self.view_of = dict(zip(parameters, views, strict=True))

    def put(self, parameter: nn.Parameter, world_size: int):
        """Copy its gradient into flat; .grad becomes the view: nothing is copied back."""
        view = self.view_of[parameter]
        torch.mul(gradient_or_zeros(parameter), 1 / world_size, out=view)  # copy and divide
        parameter.grad = view


class BucketedDDP(nn.Module):
    """Average gradients: launch an all-reduce per bucket in backward; then wait for all; reset.

    model = BucketedDDP(module)                 # on every rank; takes rank 0's weights
    loss_fn(model(x), y).backward()             # of this rank's share of the batch
    model.finish_gradient_synchronization()     # averages all gradients
    optimizer.step()                            # the same step on every rank
    optimizer.zero_grad()

    A bucket holds at most `bucket_size_mb` MB (2^20 bytes; None: no limit), or one larger gradient.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float | None = 25.0, process_group=None):
        super().__init__()
        self.module = module
        self.process_group = process_group  # the ranks that train together; None: all of them
        self.world_size = dist.get_world_size(process_group)
        self.synchronizing = True  # False within no_sync()
        broadcast_from_rank_0(module, process_group)
        # Ranks match calls by their order alone, so all use this one, which is close to backward's.
        self.order = [p for p in module.parameters() if p.requires_grad][::-1]
        self.buckets = [Bucket(members) for members in fill_buckets(self.order, bucket_size_mb)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.waiting = self.buckets.copy()  # not launched yet
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
            self.bucket_of[parameter].put(parameter, self.world_size)
            self._launch_ready()

    def _launch_ready(self):
        while self.waiting and self.ready.issuperset(self.waiting[0].parameters):
            flat = self.waiting.pop(0).flat
            self.works.append(dist.all_reduce(flat, group=self.process_group, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        """Average all gradients. Call it after backward(), before optimizer.step()."""
        if not self.synchronizing:
            return
        self.in_step = False
        for parameter in set(self.order) - self.ready:  # an unused one counts as zero
            self.bucket_of[parameter].put(parameter, self.world_size)
        self.ready.update(self.order)  # also what backward did not reach
        self._launch_ready()
        for work in self.works:
            work.wait()
        self.waiting = self.buckets.copy()  # reset
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


def fill_buckets(parameters: list[nn.Parameter], bucket_size_mb: float | None) -> list[list]:
    """Split parameters, in this order, into lists of limited size, each of one dtype and device."""
    limit = torch.inf if bucket_size_mb is None else bucket_size_mb * 2**20
    buckets = []
    last = {}  # (dtype, device) -> the last bucket of that kind
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        bucket = last.get(kind)
        if bucket is None or sum(p.nbytes for p in bucket) + parameter.nbytes > limit:
            bucket = last[kind] = []
            buckets.append(bucket)
        bucket.append(parameter)
    return buckets


def views_like(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return each tensor's place in flat memory, one after another, in its shape and strides."""
    views = []
    start = 0
    for tensor in tensors:
        strides = torch.empty_like(tensor, device="meta").stride()  # channels_last, too
        place = flat[start : start + tensor.numel()]
        views.append(place.as_strided(tensor.shape, strides))
        start += tensor.numel()
    return views


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
    ladder.run(BucketedDDP, train_step, __doc__, has_buckets=True)
