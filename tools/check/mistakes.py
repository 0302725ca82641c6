"""Small classes that are wrong, each in one way that people get wrong: see docs/wrong.md.

    make check MINE=tools/check/mistakes.py:SumForMean

Right and RightShards are right; a wrong one says in its docstring what it does instead.
"""

from itertools import combinations

import torch
import torch.distributed as dist
from torch import nn


class Right(nn.Module):
    """Averages each parameter's gradient after backward: the plainest wrapper."""

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
        """Return .grad, set to zeros if this rank has not used the parameter."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def average(self, parameter):
        dist.all_reduce(self.gradient_of(parameter))
        parameter.grad /= dist.get_world_size()

    def finish_gradient_synchronization(self):
        for parameter in self.trained():
            self.average(parameter)


class SumForMean(Right):
    """Does not divide."""

    def average(self, parameter):
        dist.all_reduce(self.gradient_of(parameter))


class NoBroadcast(Right):
    """Lets every rank start with its own weights and buffers."""

    def broadcast(self):
        pass


class ForgetsBuffers(Right):
    """Broadcasts parameters only."""

    def broadcast(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), src=0)


class HookBeforeGradient(Right):
    """Averages before .grad is there, and so that of the last step, or zeros."""

    def __init__(self, module):
        super().__init__(module)
        for parameter in self.trained():
            parameter.register_hook(lambda gradient, weight=parameter: self.average(weight))

    def finish_gradient_synchronization(self):
        pass


class DoesNotWait(Right):
    """Starts all-reduces, and goes on before they have ended."""

    def average(self, parameter):
        gradient = self.gradient_of(parameter)
        gradient /= dist.get_world_size()
        self.work = dist.all_reduce(gradient, async_op=True)


class BarrierForWait(DoesNotWait):
    """Takes a barrier for the end of all-reduces that it has started."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        dist.barrier()


class WaitsForTheLast(DoesNotWait):
    """Starts all-reduces, and waits for the last one alone."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.work.wait()


class DividesInFlight(Right):
    """Divides before it waits: what is divided may not have arrived."""

    def average(self, parameter):
        work = dist.all_reduce(self.gradient_of(parameter), async_op=True)
        parameter.grad /= dist.get_world_size()
        work.wait()


class AveragesWeights(Right):
    """Takes the parameter that its hook is given for the gradient."""

    def __init__(self, module):
        super().__init__(module)
        for parameter in self.trained():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        dist.all_reduce(parameter.detach())
        parameter.detach().div_(dist.get_world_size())

    def finish_gradient_synchronization(self):
        pass


class OrderOfArrival(DoesNotWait):
    """Calls all-reduce in the order in which gradients arrive, which ranks may not share."""

    def __init__(self, module):
        super().__init__(module)
        self.works = {}
        for parameter in self.trained():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        super().average(parameter)
        self.works[parameter] = self.work

    def finish_gradient_synchronization(self):
        for parameter in self.trained():
            if parameter not in self.works:
                self.average(parameter)
        for work in self.works.values():
            work.wait()
        self.works.clear()


class LeavesLastOut(Right):
    """Never averages the last parameter: off by one."""

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


class FailsWhenFrozen(Right):
    """Registers a hook on every parameter; torch refuses it on a frozen one."""

    def __init__(self, module):
        super().__init__(module)
        self.ready = set()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.ready.add)


class RoundsToFloat32(Right):
    """Averages in a buffer of the default dtype."""

    def average(self, parameter):
        buffer = self.gradient_of(parameter).float()
        dist.all_reduce(buffer)
        parameter.grad.copy_(buffer / dist.get_world_size())


class AveragesACopy(Right):
    """Averages .contiguous(), which is a copy if the weight is transposed or channels_last."""

    def average(self, parameter):
        dist.all_reduce(self.gradient_of(parameter).contiguous())
        parameter.grad /= dist.get_world_size()


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
    """Steps each world_size-th parameter, and sends it: a sharded optimizer."""

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
    """Leaves the optimizer inside its own defaults, whatever the learning rate is."""

    def __init__(self, params, optimizer_cls, **options):
        super().__init__(params, optimizer_cls)


class KeepsAllState(RightShards):
    """Steps every parameter on every rank: right, and nothing is saved."""

    def is_own(self, number):
        return True


class SendsNothing(RightShards):
    """Steps a rank's own parameters, and the others never hear of it."""

    def send(self):
        pass


class SumsInStep(RightShards):
    """Adds the ranks' gradients up in step(), and does not divide."""

    def step(self, closure=None):
        for parameter in self.every:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        super().step(closure)


class LosesTheRest(RightShards):
    """Sends as many numbers as all ranks can divide; the others keep the rest as it was."""

    def send(self):
        ranks = dist.get_world_size()
        for number, parameter in enumerate(self.every):
            sent = parameter.detach().view(-1)[: parameter.numel() // ranks * ranks]
            dist.broadcast(sent, src=number % ranks)


class ForgetsState(RightShards):
    """Saves the options alone."""

    def state_dict(self):
        return {**super().state_dict(), "state": {}}


class SplitsNothing(Right):
    """Calls itself FSDP, and keeps everything on every rank."""

    def gather_full_params(self):
        return self.module.state_dict()


class RoundsMaster(SplitsNothing):
    """Casts its weights for the forward, and back: float32 then holds what bfloat16 can."""

    def __init__(self, module, compute_dtype=torch.float32):
        super().__init__(module)
        self.dtype = compute_dtype

    def forward(self, *inputs):
        self.module.to(self.dtype)
        return super().forward(*inputs)

    def finish_gradient_synchronization(self):
        self.module.float()
        super().finish_gradient_synchronization()
