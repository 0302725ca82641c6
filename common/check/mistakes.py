"""Small classes that are wrong, each in one way that people get wrong: see common/docs/wrong.md.

    make check MINE=common/check/mistakes.py:SumForMean

What is called Right… is right; a wrong one says in its docstring what it does instead.
"""

from itertools import combinations

import torch
import torch.distributed as dist
from torch import nn


class Right(nn.Module):
    """The plainest wrapper: one all-reduce per parameter, after backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.broadcast()

    def broadcast(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *inputs):
        return self.module(*inputs)

    def trained(self):
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def gradient_of(self, parameter):
        """Zeros for what this rank has not used."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def average(self, parameter):
        dist.all_reduce(self.gradient_of(parameter))
        parameter.grad /= dist.get_world_size()

    def finish_gradient_synchronization(self):
        for parameter in self.trained():
            self.average(parameter)


class RightHooks(Right):
    """One all-reduce per parameter, during backward, in the same order on all ranks."""

    def __init__(self, module):
        super().__init__(module)
        self.works = []
        self.ready = set()
        self.waiting = self.trained()[::-1]
        for parameter in self.trained():
            self.register(parameter)

    def register(self, parameter):
        parameter.register_post_accumulate_grad_hook(self.is_ready)

    def is_ready(self, parameter):
        self.ready.add(parameter)
        while self.waiting and self.waiting[0] in self.ready:
            self.launch(self.waiting.pop(0))

    def launch(self, parameter):
        gradient = self.gradient_of(parameter)
        gradient /= dist.get_world_size()
        self.works.append(dist.all_reduce(gradient, async_op=True))

    def finish_gradient_synchronization(self):
        while self.waiting:
            self.launch(self.waiting.pop(0))
        for work in self.works:
            work.wait()
        self.works.clear()
        self.ready.clear()
        self.waiting = self.trained()[::-1]


class SumForMean(Right):
    """Does not divide."""

    def average(self, parameter):
        dist.all_reduce(self.gradient_of(parameter))


class NoBroadcast(Right):
    """Every rank starts with its own weights and buffers."""

    def broadcast(self):
        pass


class ForgetsBuffers(Right):
    """Broadcasts parameters only."""

    def broadcast(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), src=0)


class HookBeforeGradient(RightHooks):
    """Its hook runs before .grad is there: what is averaged is that of the last step, or zeros."""

    def register(self, parameter):
        parameter.register_hook(lambda gradient: self.is_ready(parameter))

    def launch(self, parameter):
        super().launch(parameter)
        self.works[-1].wait()


class DoesNotWait(RightHooks):
    """Starts all-reduces, and goes on before they have ended."""

    def finish_gradient_synchronization(self):
        self.works.clear()
        super().finish_gradient_synchronization()


class OrderOfArrival(RightHooks):
    """Calls all-reduce in the order in which gradients arrive, which ranks may not share."""

    def is_ready(self, parameter):
        self.waiting = [other for other in self.waiting if other is not parameter]
        self.launch(parameter)


class LeavesLastOut(Right):
    """Off by one: the last parameter is never averaged."""

    def trained(self):
        return super().trained()[:-1]


class TiedTwice(SumForMean):
    """Divides once for every name; a tied weight has two."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                parameter.grad /= dist.get_world_size()


class SkipsUnused(Right):
    """Calls no all-reduce for a parameter without a gradient, which another rank may have."""

    def average(self, parameter):
        if parameter.grad is not None:
            super().average(parameter)


class FailsWhenFrozen(RightHooks):
    """Registers a hook on every parameter; torch refuses it on a frozen one."""

    def trained(self):
        return list(self.module.parameters())


class RoundsToFloat32(Right):
    """Averages in a buffer of the default dtype."""

    def average(self, parameter):
        buffer = self.gradient_of(parameter).float()
        dist.all_reduce(buffer)
        parameter.grad.copy_(buffer / dist.get_world_size())


class OverwritesAccumulated(Right):
    """Empties .grad before every forward; what an earlier backward has left there is lost."""

    def forward(self, *inputs):
        self.module.zero_grad()
        return super().forward(*inputs)


class SwapsGradients(Right):
    """Puts the gradients of two parameters of one shape back in the other order."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for one, other in combinations(self.trained(), 2):
            if one.shape == other.shape:
                one.grad, other.grad = other.grad, one.grad
                return


class RightShards(torch.optim.Optimizer):
    """A sharded optimizer: every rank steps each world_size-th parameter, and sends it."""

    def __init__(self, params, optimizer_cls, **options):
        self.every = []
        self.local = optimizer_cls([{"params": []}], **options)
        self.local.param_groups.clear()
        super().__init__(params, options)

    def is_own(self, number):
        return number % dist.get_world_size() == dist.get_rank()

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        numbered = enumerate(group["params"], len(self.every))
        own = [parameter for number, parameter in numbered if self.is_own(number)]
        self.local.add_param_group({**group, "params": own})
        self.every += group["params"]

    def step(self, closure=None):
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update({**group, "params": local["params"]})  # a scheduler may have changed them
        self.local.step()
        self.send()

    def send(self):
        for number, parameter in enumerate(self.every):
            dist.broadcast(parameter.detach(), src=number % dist.get_world_size())


class ForgetsOptions(RightShards):
    """The optimizer inside has its own defaults, whatever the learning rate is."""

    def __init__(self, params, optimizer_cls, **options):
        super().__init__(params, optimizer_cls)


class KeepsAllState(RightShards):
    """Every rank steps every parameter: right, and nothing is saved."""

    def is_own(self, number):
        return True


class SendsNothing(RightShards):
    """Every rank steps its own parameters, and the others never hear of it."""

    def send(self):
        pass


class SplitsNothing(Right):
    """A data-parallel wrapper that calls itself FSDP: every rank keeps everything."""

    def gather_full_params(self):
        return self.module.state_dict()
