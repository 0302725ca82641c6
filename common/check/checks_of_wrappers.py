"""What a wrapper has to do, and what is beyond: torch's DDP does not do that by default either."""

import copy
import itertools
import time

import torch
import torch.distributed as dist
from torch import nn

from common.check.facts import communication, memory, overlap
from common.check.findings import (
    Failed,
    Net,
    NotTried,
    check_gradients,
    gradients_of_ranks,
    is_close,
    loss_of,
    new,
)
from common.setup import with_bucket_size

CALLS = itertools.count()  # of a check, the same on all ranks
ADAM_HIDES = "gradients with a constant factor, which Adam hides almost wholly: see SGD's check"
NOT_THE_SAME = "the ranks did not step by the same gradients, or from the same weights"
STEPS_DIFFER = "the gradients are right: the wrapper writes to weights, or changes .grad's strides"
OTHER_GRADIENTS = "other gradients than those of one process: see SGD's check"


class Plain(Net):
    """Layers that have a shape in common, and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.second(self.first(x).tanh()).tanh()
        return self.scale * self.last(self.third(x).tanh())


class Tied(Net):
    """Its last weight is its first one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        tokens = (3 * x).abs().long().clamp(max=5)
        return self.head(self.hidden(self.embedding(tokens)))


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5).requires_grad_(False)
        self.last = nn.Linear(5, 4)

    def forward(self, x):
        return self.last(self.first(x))


class UsedByNobody(Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        return self.last(self.first(x))


class UsedByRank0(UsedByNobody):
    def forward(self, x):
        x = self.first(x)
        return self.last(self.never(x) if self.rank == 0 else x)


class Branches(Net):
    """Even ranks go through left, then right; odd ones the other way."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)

    def forward(self, x):
        if self.rank % 2 == 0:
            return self.right(self.left(x).tanh())
        return self.left(self.right(x).tanh())


class UsedTwice(Net):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        return self.last(self.layer(self.layer(x).tanh()))


class SeveralDtypes(Net):
    keeps_dtypes = True

    def __init__(self):
        super().__init__()
        dtypes = 2 * [torch.float32, torch.float64]
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.double()


class ChannelsLast(Net):
    """The elements of its weights lie in another order in memory than contiguous ones."""

    def __init__(self):
        super().__init__()
        layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3))
        self.layers = layers.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layers(x.repeat(1, 32)[:, :147].view(-1, 3, 7, 7))


class Normalized(Net):
    """It has buffers, which a forward changes: those of BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.first(x))


def wrap(mine, module: nn.Module) -> nn.Module:
    """The user's wrapper of it; with buckets so small that our models fill several."""
    module.rank = dist.get_rank()
    return with_bucket_size(mine, 0.0005)(module)


def finish(model) -> None:
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


def named_parameters(model, inner: nn.Module) -> dict[str, nn.Parameter]:
    """What an optimizer gets, by the names that the module had before it was wrapped."""
    names = [name for name, _ in inner.named_parameters()]
    parameters = list(model.parameters())
    if len(parameters) != len(names):
        seen = f"parameters() of the wrapper has {len(parameters)} of {len(names)} parameters"
        raise Failed(seen, "the wrapper does not register the module: self.module = module")
    return dict(zip(names, parameters, strict=True))


def backward_once(model, step):
    loss_of(model, step, 0, dist.get_rank()).backward()
    finish(model)


def backward_twice(model, step):
    """Two micro-batches, a finish after each."""
    for part in range(2):
        loss_of(model, step, part, dist.get_rank()).backward()
        finish(model)


def backward_twice_before_finish(model, step):
    if not hasattr(model, "finish_gradient_synchronization"):
        raise NotTried("there is no finish_gradient_synchronization()")
    for part in range(2):
        loss_of(model, step, part, dist.get_rank()).backward()
    finish(model)


def backward_without_sync(model, step):
    if not hasattr(model, "no_sync"):
        raise NotTried("there is no no_sync()")
    with model.no_sync():
        loss_of(model, step, 0, dist.get_rank()).backward()
    loss_of(model, step, 1, dist.get_rank()).backward()
    finish(model)


def backward_of_two_forwards(model, step):
    first = loss_of(model, step, 0, dist.get_rank())
    (first + loss_of(model, step, 1, dist.get_rank())).backward()
    finish(model)


def evaluate_and_backward(model, step):
    model.eval()
    with torch.no_grad():
        loss_of(model, step, 7, dist.get_rank())
    model.train()
    backward_once(model, step)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def standing_still(parameters):
    """Where float32 weights would differ in their last bit, and all other gradients with them."""
    return torch.optim.SGD(parameters, lr=0.0)


def fused_sgd(parameters):
    """It reads gradients and parameters front to back, however their elements are ordered."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def follow_one_process(
    mine, build, steps=3, backward=backward_once, parts=1, make_optimizer=sgd, set_to_none=True
):
    """Train it on shares of batches and a twin in this process on all of them: the same?"""
    twin = new(build)
    inner = new(build)
    trained = [name for name, parameter in inner.named_parameters() if parameter.requires_grad]
    model = wrap(mine, inner)
    parameters = named_parameters(model, twin)
    optimizer = make_optimizer(model.parameters())
    twin_optimizer = make_optimizer(twin.parameters())
    for step in range(steps):
        backward(model, step)
        gradients = gradients_of_ranks(twin, step, parts, dist.get_world_size())
        if make_optimizer is not adam:  # which is to show by itself how little it shows
            found = {name: parameters[name].grad for name in trained}
            check_gradients(found, gradients, dist.get_rank())
        optimizer.step()
        twin_optimizer.step()
        optimizer.zero_grad(set_to_none)
    check_weights(parameters, dict(twin.named_parameters()), steps, make_optimizer is adam)


def check_weights(found: dict, expected: dict, steps: int, by_adam: bool) -> None:
    """Failed, unless all weights are those of one process."""
    distances = {}
    for name, weight in expected.items():
        if not is_close(found[name], weight):
            distances[name] = ((found[name] - weight).norm() / weight.norm()).item()
    if distances:
        worst = max(distances, key=distances.get)
        some = f"{len(distances)} of {len(expected)} weights are not those of one process"
        seen = f"after {steps} steps {some}, {worst} by {distances[worst]:.0e} of it"
        means = STEPS_DIFFER
        if by_adam:
            means = ADAM_HIDES if distances[worst] < 1e-3 else OTHER_GRADIENTS
        raise Failed(seen, means)


def starts_with_the_parameters_of_rank_0(mine):
    """all ranks start with the parameters of rank 0"""
    inner = new(Plain, seed=dist.get_rank())
    found = named_parameters(wrap(mine, inner), inner)
    check_start(found, dict(new(Plain).named_parameters()), "parameters")


def starts_with_the_buffers_of_rank_0(mine):
    """all ranks start with the buffers of rank 0"""
    inner = new(Normalized)
    expected = new(Normalized)
    inner.norm.running_mean.fill_(7 + dist.get_rank())
    expected.norm.running_mean.fill_(7)
    inner.norm.num_batches_tracked.fill_(7 + dist.get_rank())
    expected.norm.num_batches_tracked.fill_(7)
    buffers = [buffer for _, buffer in wrap(mine, inner).named_buffers()]
    found = dict(zip(dict(expected.named_buffers()), buffers, strict=True))
    check_start(found, dict(expected.named_buffers()), "buffers")


def check_start(found: dict, expected: dict, kind: str) -> None:
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    if different:
        seen = f"{len(different)} of {len(expected)} {kind} are not those of rank 0: {different[0]}"
        raise Failed(seen, f"the constructor does not broadcast the {kind} from rank 0")


def gradients_are_the_mean(mine):
    """after one backward the gradients are the mean over the samples of all ranks"""
    follow_one_process(mine, Plain, steps=1)


def waits_for_the_other_ranks(mine):
    """gradients are read only when they have arrived: a rank waits for the others"""
    model = wrap(mine, new(Plain))
    store = dist.distributed_c10d._get_default_store()
    ended = f"rank 0 has ended step {next(CALLS)}"
    if dist.get_rank() == 0:
        backward_once(model, 0)
        store.set(ended, "")
        return
    # Rank 0 needs our gradients to end its step. So if all is right we look in vain.
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        if store.check([ended]):
            seen = "rank 0 ended its step before this rank had begun its backward"
            raise Failed(seen, "an asynchronous all-reduce is not waited for: work.wait()")
        time.sleep(0.01)
    backward_once(model, 0)


def trains_with_sgd(mine):
    """SGD: after four steps the weights are those of one process with the whole batch"""
    follow_one_process(mine, Plain, steps=4)


def trains_with_adam(mine):
    """Adam: after four steps the weights are those of one process with the whole batch"""
    follow_one_process(mine, Plain, steps=4, make_optimizer=adam)


def ranks_stay_equal(mine):
    """after four steps all ranks have the same weights, to the last bit"""
    model = wrap(mine, new(Plain))
    optimizer = sgd(model.parameters())
    for step in range(4):
        backward_once(model, step)
        optimizer.step()
        optimizer.zero_grad()
    check_equal_ranks(list(model.parameters()), "parameters", NOT_THE_SAME)


def check_equal_ranks(mine: list[torch.Tensor], kind: str, means: str) -> None:
    """Failed, on all ranks, unless all hold the same values."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [tensor.detach() for tensor in mine])
    for rank, theirs in enumerate(of_ranks):
        pairs = zip(of_ranks[0], theirs, strict=True)
        apart = [(one - other).abs().max() for one, other in pairs if not torch.equal(one, other)]
        if apart:
            seen = f"{len(apart)} of {len(mine)} {kind} differ from those of rank 0"
            raise Failed(f"{seen} on rank {rank}, by up to {max(apart):.0e}", means)


def reduces_tied_weights_once(mine):
    """tied weights: one parameter in two places is averaged once"""
    follow_one_process(mine, Tied)


def leaves_frozen_parameters_alone(mine):
    """frozen parameters (requires_grad=False) stay as they are, and the others train"""
    follow_one_process(mine, Frozen)


def trains_a_module_that_is_used_twice(mine):
    """a module that is used twice in a forward"""
    follow_one_process(mine, UsedTwice)


def trains_several_dtypes(mine):
    """parameters of several dtypes"""
    follow_one_process(mine, SeveralDtypes, make_optimizer=standing_still)


def trains_channels_last(mine):
    """parameters in another memory format (channels_last), and a fused optimizer"""
    follow_one_process(mine, ChannelsLast, make_optimizer=fused_sgd)


def keeps_one_order_on_any_branch(mine):
    """ranks on different branches: gradients are ready in another order"""
    follow_one_process(mine, Branches)


def accumulates_with_no_sync(mine):
    """accumulation with no_sync(): the mean of the sums"""
    follow_one_process(mine, Plain, backward=backward_without_sync, parts=2)


def accumulates_without_no_sync(mine):
    """accumulation without no_sync(), a finish after each backward: the mean of the sums"""
    follow_one_process(mine, Plain, backward=backward_twice, parts=2)


def trains_after_two_forwards(mine):
    """two forwards before a backward"""
    follow_one_process(mine, Plain, backward=backward_of_two_forwards, parts=2)


def evaluates_in_between(mine):
    """evaluation (eval() and no_grad()) between the steps"""
    follow_one_process(mine, Plain, backward=evaluate_and_backward)


def zeroes_in_place(mine):
    """zero_grad(set_to_none=False): gradients stay, as zeros"""
    follow_one_process(mine, Plain, set_to_none=False)


def accumulates_before_one_finish(mine):
    """two backward() before one finish: the mean of the sums"""
    follow_one_process(mine, Plain, backward=backward_twice_before_finish, parts=2)


def skips_what_nobody_uses(mine):
    """a parameter that no rank uses"""
    follow_one_process(mine, UsedByNobody)


def averages_what_one_rank_uses(mine):
    """a parameter that only one rank uses counts as zero on the others"""
    follow_one_process(mine, UsedByRank0)


def keeps_buffers_equal(mine):
    """all ranks evaluate with the same buffers, such as BatchNorm's statistics"""
    model = wrap(mine, new(Normalized))
    for step in range(3):
        backward_once(model, step)
    model.eval()
    with torch.no_grad():
        loss_of(model, 3, 0, dist.get_rank())
    means = "each rank has the statistics of its own share: broadcast them before you evaluate"
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")]
    check_equal_ranks(buffers, "buffers", means)


def without_finish(mine):
    """when finish_gradient_synchronization() is forgotten"""
    model = wrap(mine, new(Plain))
    if not hasattr(model, "finish_gradient_synchronization"):
        return ["there is none that could be forgotten"]
    optimizer = sgd(model.parameters())
    for step in range(3):
        try:
            loss_of(model, step, 0, dist.get_rank()).backward()
        except RuntimeError as error:
            return [f"an error in step {step + 1}: {str(error).splitlines()[0]}"]
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(list(model.parameters()))
    try:
        check_equal_ranks(before, "parameters", "")
    except Failed as failure:
        return [f"silence, and {failure.seen}"]
    return ["silence, and the ranks stay equal"]


HAS_TO_HOLD = [
    starts_with_the_parameters_of_rank_0,
    starts_with_the_buffers_of_rank_0,
    waits_for_the_other_ranks,
    gradients_are_the_mean,
    trains_with_sgd,
    trains_with_adam,
    ranks_stay_equal,
    reduces_tied_weights_once,
    leaves_frozen_parameters_alone,
    trains_a_module_that_is_used_twice,
    trains_several_dtypes,
    trains_channels_last,
    keeps_one_order_on_any_branch,
    accumulates_with_no_sync,
    accumulates_without_no_sync,
    trains_after_two_forwards,
    evaluates_in_between,
    zeroes_in_place,
]
BEYOND = [
    accumulates_before_one_finish,
    skips_what_nobody_uses,
    averages_what_one_rank_uses,
    keeps_buffers_equal,
]
FACTS = [communication, overlap, memory, without_finish]
