"""What FSDP has to do: train as one process does, while a rank keeps only its part of the weights.

Whole weights are read with gather_full_params(), or from torch's DTensors. A class without either
is judged by the outputs of its forward alone.
"""

from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from common.check.checks_of_wrappers import (
    adam,
    backward_of_two_forwards,
    backward_once,
    backward_twice,
    check_equal_ranks,
    check_weights,
    evaluate_and_backward,
    finish,
)
from common.check.facts import communication_of_fsdp
from common.check.findings import (
    Failed,
    Net,
    NotTried,
    check_gradients,
    gradients_of_ranks,
    is_close,
    new,
)
from common.memory import held_bytes

LR = 0.1
FORWARD = "the forward computes with other weights: which are gathered, and in which order?"
INPUTS = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6)


class Plain(Net):
    """Weights that are split, and biases and a norm that may stay whole; odd lengths."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 7)
        self.first = nn.Linear(7, 9)
        self.norm = nn.LayerNorm(9)
        self.second = nn.Linear(9, 9, bias=False)
        self.last = nn.Linear(9, 6, bias=False)

    def forward(self, x):
        x = self.embedding((3 * x).abs().long().clamp(max=5))
        return self.last(self.second(self.norm(self.first(x).tanh())).tanh())


class Tied(Plain):
    """Its last weight is its first one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 7)
        self.last = nn.Linear(7, 6, bias=False)
        self.last.weight = self.embedding.weight


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


class UsedTwice(Plain):
    def forward(self, x):
        x = self.embedding((3 * x).abs().long().clamp(max=5))
        x = self.second(self.norm(self.first(x).tanh())).tanh()
        return self.last(self.second(x))


class UsedByNobody(Plain):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(9, 9)


class Large(nn.Sequential):
    def __init__(self):
        super().__init__(*[nn.Linear(64, 64, bias=False) for _ in range(4)])


def shard(mine, build, seed: int = 0) -> nn.Module:
    inner = new(build, seed)
    inner.rank = dist.get_rank()
    return mine(inner)


def whole_parameters(model) -> dict[str, torch.Tensor] | None:
    """All weights, whole, by their names in the module; a call of all ranks. None: nobody knows."""
    if hasattr(model, "gather_full_params"):
        return {name: each.detach().clone() for name, each in model.gather_full_params().items()}
    parameters = dict(model.named_parameters())
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return None
    return {
        name: parameter.detach().full_tensor().clone() for name, parameter in parameters.items()
    }


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def follow(mine, build, backward=backward_once, parts=1, make_optimizer=plain_sgd, steps=3):
    """Train it on shares of batches and a twin in this process on all of them: the same?"""
    twin = new(build)
    model = shard(mine, build)
    optimizer = make_optimizer([each for each in model.parameters() if each.requires_grad])
    twin_optimizer = make_optimizer(twin.parameters())
    before = whole_parameters(model)
    for step in range(steps):
        backward(model, step)
        gradients = gradients_of_ranks(twin, step, parts, dist.get_world_size())
        optimizer.step()
        twin_optimizer.step()
        optimizer.zero_grad()
        after = whole_parameters(model)
        if after and make_optimizer is plain_sgd:  # its step says what the gradients were
            trained = gradients[0][0]
            moved = {name: (before[name] - after[name]) / LR for name in trained}
            check_gradients(moved, gradients, dist.get_rank())
        before = after
    if after:
        check_weights(after, dict(twin.named_parameters()), steps, make_optimizer is adam)
    check_outputs(model, twin, steps)


def check_outputs(model, twin, steps: int) -> None:
    """Failed, unless a forward gives what the module that is not split gives."""
    with torch.no_grad():
        twin.rank = dist.get_rank()
        found, expected = model(INPUTS), twin(INPUTS)
    if not is_close(found, expected):
        distance = ((found - expected).norm() / expected.norm()).item()
        seen = f"after {steps} steps the output is not that of the whole module: by {distance:.0e}"
        raise Failed(seen, FORWARD if steps == 0 else "the weights are not those of one process")


def computes_what_the_module_computes(mine):
    """a forward gives what the module gives that is not split"""
    check_outputs(shard(mine, Plain), new(Plain), 0)


def keeps_a_part_of_the_parameters(mine):
    """between steps a rank keeps its part of the weights, and not the whole"""
    model = shard(mine, Large)
    x = torch.ones(2, 64, dtype=torch.float64)
    for _ in range(2):
        model(x).sum().backward()
        finish(model)
    parameters = list(model.parameters())
    whole = sum(parameter.nbytes for parameter in new(Large).parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for kind, tensors in (("parameters", parameters), ("gradients", gradients)):
        share = held_bytes(tensors) / whole
        if share > 1.1 / dist.get_world_size():
            seen = f"of the {kind} a rank keeps {100 * share:.0f} %"
            raise Failed(seen, f"the {kind} are not split: a rank should own 1/N of them")


def gathers_full_parameters(mine):
    """gather_full_params() returns all parameters, whole, under the module's own names"""
    model = shard(mine, Plain)
    found = whole_parameters(model)
    if found is None:
        raise NotTried("there is no gather_full_params()")
    for name, expected in new(Plain).named_parameters():
        if name not in found:
            raise Failed(f"{name} is not among {', '.join(found)}", "the names are the wrapper's")
        if found[name].shape != expected.shape or not torch.equal(found[name], expected):
            raise Failed(f"{name} has other values or another shape", "parts put together wrongly")


def trains_with_sgd(mine):
    """SGD: weights and outputs are those of one process with the whole batch"""
    follow(mine, Plain, steps=4)


def trains_with_adam(mine):
    """Adam: weights and outputs are those of one process with the whole batch"""
    follow(mine, Plain, make_optimizer=adam, steps=4)


def ranks_stay_equal(mine):
    """all ranks compute the same outputs, and gather the same weights, to the last bit"""
    model = shard(mine, Plain)
    optimizer = plain_sgd(model.parameters())
    for step in range(3):
        backward_once(model, step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = model(INPUTS)
    whole = list((whole_parameters(model) or {}).values())
    means = "what stays whole (biases, norms) did not get the same gradients on all ranks"
    check_equal_ranks([output, *whole], "outputs and weights", means)


def trains_tied_weights(mine):
    """tied weights: one parameter in two places"""
    follow(mine, Tied)


def leaves_frozen_parameters_alone(mine):
    """frozen parameters (requires_grad=False) stay as they are, and the others train"""
    follow(mine, Frozen)


def trains_a_module_that_is_used_twice(mine):
    """a module that is used twice in a forward"""
    follow(mine, UsedTwice)


def accumulates(mine):
    """accumulation, a finish after each backward: the mean of the sums"""
    follow(mine, Plain, backward=backward_twice, parts=2)


def trains_after_two_forwards(mine):
    """two forwards before a backward"""
    follow(mine, Plain, backward=backward_of_two_forwards, parts=2)


def evaluates_in_between(mine):
    """evaluation (eval() and no_grad()) between the steps"""
    follow(mine, Plain, backward=evaluate_and_backward)


def computes_in_another_dtype(mine):
    """compute_dtype=torch.bfloat16 computes in it, and keeps float32 weights and gradients"""
    if "compute_dtype" not in signature(mine).parameters:
        raise NotTried("there is no argument compute_dtype")
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(2)])
    x = torch.randn(8, 64)
    with torch.no_grad():
        exact = layers(x)
        expected = layers.bfloat16()(x.bfloat16()).float()
    layers.float()
    torch.manual_seed(0)
    model = mine(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(2)]), torch.bfloat16)
    output = model(x).float()
    output.square().mean().backward()
    finish(model)
    rounding = (exact - expected).norm()
    distance = ((output - expected).norm() / rounding).item()
    if not distance < 0.5:  # exact ones are 1 away
        seen = f"the output is {distance:.1f} times as far from bfloat16's as float32's is"
        raise Failed(seen, "the weights or the inputs are not cast before the forward")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtypes |= {parameter.grad.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        raise Failed(f"weights and gradients have {dtypes}", "the optimizer loses small updates")


def starts_with_the_parameters_of_rank_0(mine):
    """all ranks start with the parameters of rank 0"""
    model = shard(mine, Plain, seed=dist.get_rank())
    with torch.no_grad():
        found, expected = model(INPUTS), new(Plain)(INPUTS)
    if not is_close(found, expected):
        means = "every rank splits weights of its own: broadcast rank 0's first"
        raise Failed("the output is not that of rank 0's weights", means)


def skips_what_nobody_uses(mine):
    """a parameter that no rank uses"""
    follow(mine, UsedByNobody)


HAS_TO_HOLD = [
    computes_what_the_module_computes,
    keeps_a_part_of_the_parameters,
    gathers_full_parameters,
    trains_with_sgd,
    trains_with_adam,
    ranks_stay_equal,
    trains_tied_weights,
    leaves_frozen_parameters_alone,
    trains_a_module_that_is_used_twice,
    accumulates,
    trains_after_two_forwards,
    evaluates_in_between,
    computes_in_another_dtype,
]
BEYOND = [starts_with_the_parameters_of_rank_0, skips_what_nobody_uses]
FACTS = [communication_of_fsdp]
