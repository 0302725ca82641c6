"""What stages 02 to 05 promise of their wrappers, on real ranks of gloo.

What they share with any wrapper are the checks of `make check`. The rest is ours alone: a function
that takes a wrapper is a promise, and runs on every rank.
"""

import contextlib
import copy
import itertools
import pickle
import sys
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from common.check.checks_of_wrappers import BEYOND, HAS_TO_HOLD, averages_what_one_rank_uses
from common.testing.harness import ROOT, failed, judged

for stage in ("02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"):
    sys.path.insert(0, str(ROOT / stage))

from bucketed import BucketedDDP  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from naive_ddp import NaiveDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402

WRAPPERS = [NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP]
OF_HOOKS = [OverlapDDP, BucketedDDP]  # they communicate during backward


def name_of(value) -> str | None:
    return getattr(value, "__name__", None)


class Branches(nn.Module):
    """Even ranks go through left, then right, odd ones the other way; some layers are not used."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.only_rank_0 = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, rank):
        if rank % 2 == 0:
            x = self.right(self.left(x))
        else:
            x = self.left(self.right(x))
        if rank == 0:
            x = self.only_rank_0(x)
        return self.scale * x


def accumulates_like_one_process(wrapper, micro_batches, set_to_none):
    """Three steps over all ranks give the gradients and weights of one process with all batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tolerance = 1e-12

    def new_model(seed):
        torch.manual_seed(seed)
        return Branches().double()

    def loss(model, step, micro_batch, rank):
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
        rows = 3 * torch.randn(8, 6, generator=generator, dtype=torch.float64)
        return model(rows, rank).square().mean()

    twin = new_model(seed=0)
    inner = new_model(seed=rank)  # rank 0's weights, the twin's, must win
    model = wrapper(inner)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, twin)]
    for step in range(3):
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss(model, step, micro_batch, rank).backward()
            for other in range(world_size):
                (loss(twin, step, micro_batch, other) / world_size).backward()
        model.finish_gradient_synchronization()
        for (name, mine), expected in zip(inner.named_parameters(), twin.parameters(), strict=True):
            # Fused optimizers read both front to back, whatever the strides.
            assert mine.grad.stride() == mine.stride(), name
            gradient = torch.zeros_like(mine) if expected.grad is None else expected.grad
            torch.testing.assert_close(mine.grad, gradient, rtol=0, atol=tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    for mine, expected in zip(inner.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)
        replicas = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(replicas, mine.detach())
        assert all(torch.equal(replica, replicas[0]) for replica in replicas)


def broadcasts_parameters_and_buffers(wrapper):
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    module.to(memory_format=torch.channels_last)
    module[1].running_mean.fill_(7 + dist.get_rank())
    module[1].num_batches_tracked.fill_(7 + dist.get_rank())
    module.register_buffer("strided", torch.randn(6, 6)[:, ::2])
    module.weight = nn.Parameter(torch.randn(6, 6)[:, :3])  # not dense in memory
    wrapper(module)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3)
    assert torch.equal(module[0].weight, conv.weight)
    assert torch.equal(module[0].bias, conv.bias)
    assert torch.equal(module.strided, torch.randn(6, 6)[:, ::2])
    assert torch.equal(module.weight, torch.randn(6, 6)[:, :3])
    assert module[1].running_mean.tolist() == [7, 7, 7]
    assert module[1].num_batches_tracked.item() == 7


def refuses_sparse_gradients(wrapper):
    model = wrapper(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(RuntimeError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
        model.finish_gradient_synchronization()


def refuses_what_cannot_be_wrapped(wrapper):
    """One clear ValueError on every rank, also where a single rank has the problem."""
    rank = dist.get_rank()
    net = nn.Linear(3, 1)
    transposed = nn.Linear(4, 4, bias=False)
    if rank == 0:
        transposed.weight = nn.Parameter(torch.ones(4, 4).t())
    one_layer_more = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank)))
    for module, message in [
        (wrapper(copy.deepcopy(net)), "wrapped only once"),
        (nn.Sequential(wrapper(copy.deepcopy(net))), "wrapped only once"),
        (DistributedDataParallel(copy.deepcopy(net)), "wrapped only once"),
        (copy.deepcopy(net).requires_grad_(False), "no parameter requires a gradient"),
        (nn.LazyLinear(3), "run one forward before you wrap it"),
        (nn.Linear(4, 3 - rank), r"rank 0 has weight \(3, 4\).* rank 1 has weight \(2, 4\)"),
        (one_layer_more, "rank 0 has nothing, rank 1 has 1.weight"),
        (
            nn.Linear(2, 2).requires_grad_(rank == 0),
            "requires_grad=True, rank 1 has .*requires_grad=False",
        ),
        (transposed, r"strides=\(1, 4\).*strides=\(4, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrapper(module)
    group = dist.new_group([0])
    if rank == 0:
        wrapper(net, process_group=group)
    else:
        with pytest.raises(ValueError, match="not a member of process_group"):
            wrapper(net, process_group=group)
    dist.barrier()  # all ranks got here: nobody waits for a collective that another did not enter


def averages_before_it_sums(wrapper):
    """Two ranks with a float16 gradient of 40,000 each: the mean exists, the sum does not."""
    net = nn.Linear(4, 1, bias=False).half()
    model = wrapper(net)
    output = model(torch.full((1, 4), 200.0).half())
    (output * torch.tensor(200.0).half()).sum().backward()
    model.finish_gradient_synchronization()
    assert net.weight.grad.tolist() == [[40_000.0] * 4]


def refuses_create_graph(wrapper):
    model = wrapper(nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match="create_graph=True.*torch.autograd.grad"):
        model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
        model.finish_gradient_synchronization()


def leaves_hooks_of_the_user_alone(wrapper):
    """A hook on rank 0 alone neither stops the ranks nor is it lost."""
    net = small_net().double()
    seen = []
    if dist.get_rank() == 0:
        net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    model = wrapper(net)
    train_both(model, torch_ddp_of(net))
    assert len(seen) == 3 * (dist.get_rank() == 0)


def communicates_nothing_within_no_sync(wrapper):
    """Nested contexts end one by one, and a finish within them does nothing."""
    rank = dist.get_rank()
    net = nn.Linear(1, 1, bias=False)
    model = wrapper(net)
    x = torch.full((1, 1), 1.0 + rank)
    with model.no_sync():
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        assert net.weight.grad.item() == 2 * (1 + rank)
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    assert net.weight.grad.item() == 3 * 1.5


def may_be_wrapped_again(wrapper):
    """Two wrappers of one module, used in turn, and a copy of the module: each trains rightly."""
    net = small_net().double()
    models = [wrapper(net), wrapper(net), wrapper(copy.deepcopy(net))]
    for model in models:
        train_both(model, torch_ddp_of(model.module))
    assert list(models[0].state_dict()) == list(torch_ddp_of(net).state_dict())
    pickle.dumps(net.state_dict())


def trains_adversaries(wrapper):
    """A generator's loss passes through the wrapped discriminator, whose finish nobody calls."""
    ours = gradients_of_a_generator(wrapper)
    expected = gradients_of_a_generator(DistributedDataParallel)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def gradients_of_a_generator(wrap):
    torch.manual_seed(0)
    generator = wrap(nn.Linear(6, 6).double())
    discriminator = wrap(nn.Linear(6, 1).double())
    x = torch.full((2, 6), 1.0 + dist.get_rank(), dtype=torch.float64)

    def update(model, loss):
        loss.backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    for _ in range(3):
        discriminator.zero_grad()
        update(discriminator, discriminator(x).square().mean())
        generator.zero_grad()
        update(generator, discriminator(generator(x)).square().mean())
    return [parameter.grad for parameter in generator.parameters()]


def is_an_ordinary_module_without_its_wrapper(wrapper):
    """A backward through .module on rank 0 alone, or after the wrapper is gone, sends nothing."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    model = wrapper(net)
    model(torch.ones(1, 6)).sum().backward()
    model.finish_gradient_synchronization()
    for _ in range(2):
        if dist.get_rank() == 0:
            net(torch.ones(1, 6)).sum().backward()
        summed = torch.tensor([10.0 * (1 + dist.get_rank())])
        dist.all_reduce(summed)
        assert summed.item() == 30
        model = None


def is_freed(wrapper):
    """Many wrappers, trained and dropped, some in the middle of a step, leave no object behind."""
    net = nn.Linear(64, 64)
    alive = []
    for number in range(50):
        other = nn.Linear(64, 64)
        for module in (net, other):
            model = wrapper(module)
            model(torch.ones(1, 64)).sum().backward()
            if number % 2:
                model.finish_gradient_synchronization()
            alive += [weakref.ref(model), weakref.ref(other)]
        del model, module, other
    assert not any(reference() for reference in alive)


def may_be_wrapped_again_in_the_middle_of_a_step(wrapper):
    """What is dropped between a forward and its finish touches no gradient any more."""
    net = small_net().double()
    model = wrapper(net)
    model(torch.ones(2, 6, dtype=torch.float64))
    model = wrapper(net)
    train_both(model, torch_ddp_of(net))


def notices_a_forgotten_finish(wrapper):
    model, x = wrapper(nn.Linear(3, 1)), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\) after every"):
        model(x)
    model.finish_gradient_synchronization()
    model(x)
    optimizer.step()  # after a forward that nobody follows with a backward
    model(x)


def notices_gradients_that_change_on_their_way(wrapper):
    """Clipped or zeroed between backward() and the finish; the next step is clean."""

    def clip(net):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    def zero(net):
        net.zero_grad(set_to_none=False)

    for change in (clip, zero):
        torch.manual_seed(0)
        net = small_net().double()
        model = wrapper(net)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        change(net)
        with pytest.raises(RuntimeError, match="gradients changed on their way"):
            model.finish_gradient_synchronization()
        model.zero_grad()
        train_both(model, torch_ddp_of(net))


def refuses_a_second_backward(wrapper):
    model, x = wrapper(nn.Linear(3, 1)), torch.ones(2, 3)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward.. ran twice: finish in between.*no_sync"):
        loss.backward()
    with pytest.raises(RuntimeError, match="gradients changed on their way"):  # they grew
        model.finish_gradient_synchronization()
    model(x)


def drops_a_step_with_zero_grad(wrapper):
    """zero_grad() before the finish or after it, layers unused or not: the next step is clean."""
    torch.manual_seed(0)
    net = small_net().double()
    model = wrapper(net)
    used = net.forward
    for forward in (used, lambda x: net[0](x)):
        net.forward = forward
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        model.zero_grad()
        model.finish_gradient_synchronization()
        model.zero_grad()
    del net.forward
    train_both(model, torch_ddp_of(net))


def trains_with_all_frozen_for_a_while(wrapper):
    """A discriminator that is frozen in the generator's step, as pix2pix does it."""
    net = nn.Linear(6, 1).double()
    model = wrapper(net)
    x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
    net.requires_grad_(False)
    model(x).sum().backward()
    assert net.weight.grad is None and x.grad is not None
    net.requires_grad_(True)
    model(x * (1 + dist.get_rank())).sum().backward()
    model.finish_gradient_synchronization()
    assert net.weight.grad.tolist() == [[3.0] * 6]  # two rows, on average of 1.5 each


def refuses_parameters_frozen_or_replaced_later(wrapper):
    def swap(net):
        net[0].requires_grad_(True)
        net[1].requires_grad_(False)

    def replace(net):
        net[1] = nn.Linear(6, 6)

    def assign(net):
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)

    def thaw(net):
        net[0].requires_grad_(True)

    for change in (swap, replace, assign, thaw):
        net = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6))
        model = wrapper(net)
        change(net)
        with pytest.raises(RuntimeError, match="frozen, .*replaced, .*: wrap the module again"):
            model(torch.ones(2, 6))
        wrapper(net)(torch.ones(2, 6)).sum().backward()


def refuses_other_memory_and_copies(wrapper):
    """Wrap last, and wrap a copy of the module: a wrapper's order and buckets belong to it."""

    def cast(model):
        return model.double()

    def turn(model):
        return model.to(memory_format=torch.channels_last)

    def pickled(model):
        return pickle.loads(pickle.dumps(model))

    for change in (cast, turn, pickled, copy.deepcopy):
        changed = change(wrapper(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))))
        inputs = torch.ones(1, 3, 8, 8, dtype=next(changed.parameters()).dtype)
        with torch.no_grad():
            changed(inputs)  # such as the averaged weights of an EMA
        with pytest.raises(RuntimeError, match="copied, moved or cast: wrap the module again"):
            changed(inputs)
        wrapper(changed.module)(inputs).sum().backward()


def goes_on_after_a_refused_gradient(wrapper):
    """One step with create_graph=True, which is given up; the next ones are clean."""
    torch.manual_seed(0)
    net = small_net().double()
    model = wrapper(net)
    loss = model(torch.ones(2, 6, dtype=torch.float64)).square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        model.finish_gradient_synchronization()
    model.zero_grad()
    model.finish_gradient_synchronization()
    model.zero_grad()
    train_both(model, torch_ddp_of(net))


class Fails(nn.Module):
    """Its backward raises when told to, between the gradients of its two layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.fail = False

    def forward(self, x, rank=0):
        x = self.first(x)
        if self.fail:
            x.register_hook(lambda _: (_ for _ in ()).throw(ArithmeticError("on purpose")))
        return self.second(x)


def goes_on_after_an_exception_in_backward(wrapper):
    """A step is given up on one rank or on all: finish and zero_grad, and the next one is clean."""
    for failing in ([1], [0, 1]):
        torch.manual_seed(0)
        model = wrapper(Fails().double())
        model.module.fail = dist.get_rank() in failing
        try:
            model(torch.ones(2, 6).double()).sum().backward()
        except ArithmeticError:
            with pytest.raises(RuntimeError, match="call finish_gradient_synchronization"):
                model(torch.ones(2, 6).double())
        model.finish_gradient_synchronization()
        model.zero_grad()
        model.module.fail = False
        train_both(model, torch_ddp_of(model.module))


def torch_ddp_of(module, **options):
    return DistributedDataParallel(copy.deepcopy(module), **options)


def small_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def compiled():
    return torch.compile(small_net(), backend="aot_eager")


def rows():
    return torch.randn(4, 6, dtype=torch.float64)


def train_both(
    model,
    ddp,
    inputs=rows,
    evaluates=False,  # before each step
    clips=False,  # gradients, after the finish
    keeps_zeros=False,  # zero_grad(set_to_none=False)
    autocast=False,
):
    """Three steps with the wrapper and with torch DDP give the same float64 gradients."""
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (model, ddp)]
    for step in range(3):
        for net in (model, ddp):
            torch.manual_seed(100 * step + dist.get_rank())  # of the inputs and of dropout
            x = inputs()
            if evaluates:
                with torch.no_grad():
                    net.eval()(x)
                net.train()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = net(x)
            # GoogLeNet returns those of its auxiliary heads, too; an LSTM its state.
            outputs = output if isinstance(output, tuple) else (output,)
            tensors = [part for part in outputs if isinstance(part, torch.Tensor)]
            sum(tensor.double().square().mean() for tensor in tensors).backward()
            if net is model:
                model.finish_gradient_synchronization()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        for mine, expected in zip(model.parameters(), ddp.parameters(), strict=True):
            gradient = torch.zeros_like(mine) if expected.grad is None else expected.grad
            torch.testing.assert_close(mine.grad, gradient, rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            if not autocast:  # there the last bit of a weight may decide the rounding to bfloat16
                optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps_zeros)


def equals_torch_ddp(wrapper, build, inputs=rows, find_unused=False, **options):
    torch.manual_seed(dist.get_rank())
    net = build().double()
    model = wrapper(net)
    ddp = torch_ddp_of(net, find_unused_parameters=find_unused)
    train_both(model, ddp, inputs, **options)


class Alternating(nn.Module):
    """Uses its two branches in turn."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.branches[self.calls % 2](x)


images = partial(torch.randn, 2, 3, 64, 64, dtype=torch.float64)
small_images = partial(torch.randn, 2, 3, 32, 32, dtype=torch.float64)
models = torchvision.models
googlenet = partial(models.googlenet, aux_logits=True, init_weights=False)
REAL_MODELS = {  # how to build it, and its inputs
    "resnet18": (models.resnet18, images),
    "mobilenet": (models.mobilenet_v3_small, images),
    "googlenet": (googlenet, images),
    "vit": (partial(models.vit_b_16, image_size=32), small_images),
    "lstm": (partial(nn.LSTM, 6, 8, num_layers=2, batch_first=True), rows),
}
UNUSUAL_USE = [  # of all four wrappers
    refuses_what_cannot_be_wrapped,
    refuses_sparse_gradients,
    refuses_create_graph,
    averages_before_it_sums,
    leaves_hooks_of_the_user_alone,
    communicates_nothing_within_no_sync,
    may_be_wrapped_again,
    trains_adversaries,
    is_an_ordinary_module_without_its_wrapper,
    is_freed,
    may_be_wrapped_again_in_the_middle_of_a_step,
    drops_a_step_with_zero_grad,
    trains_with_all_frozen_for_a_while,
]
UNUSUAL_USE_OF_HOOKS = [  # of the two that communicate during backward
    notices_a_forgotten_finish,
    notices_gradients_that_change_on_their_way,
    refuses_a_second_backward,
    refuses_parameters_frozen_or_replaced_later,
    refuses_other_memory_and_copies,
    goes_on_after_a_refused_gradient,
    goes_on_after_an_exception_in_backward,
]
CASES = [*itertools.product(UNUSUAL_USE, WRAPPERS)]
CASES += itertools.product(UNUSUAL_USE_OF_HOOKS, OF_HOOKS)
of_each = pytest.mark.parametrize("wrapper", WRAPPERS, ids=name_of)
of_hooks = pytest.mark.parametrize("wrapper", OF_HOOKS, ids=name_of)
on_ranks = pytest.mark.parametrize("world_size", [1, 2, 3])


@on_ranks
@of_each
def test_what_has_to_hold_holds_and_what_is_beyond_too_but_for_buffers(ranks, world_size, wrapper):
    """Every check of `make check`. Buffers drift apart, as differences.md says."""
    verdicts = judged(ranks, wrapper, [*HAS_TO_HOLD, *BEYOND], world_size)
    assert failed(verdicts) == (set() if world_size == 1 else {"keeps_buffers_equal"})


def test_what_has_to_hold_holds_for_torch_ddp(ranks):
    """Of a parameter that is not used it fails by default; what one rank uses: test_check.py."""
    beyond = [check for check in BEYOND if check is not averages_what_one_rank_uses]
    verdicts = judged(ranks, DistributedDataParallel, [*HAS_TO_HOLD, *beyond])
    assert failed(verdicts) == {"skips_what_nobody_uses"}


@on_ranks
@of_each
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_accumulates_gradients(ranks, world_size, wrapper, micro_batches, set_to_none):
    ranks(world_size).run(accumulates_like_one_process, wrapper, micro_batches, set_to_none)


@on_ranks
@of_each
def test_broadcasts_parameters_and_buffers(ranks, world_size, wrapper):
    ranks(world_size).run(broadcasts_parameters_and_buffers, wrapper)


@pytest.mark.parametrize("promise, wrapper", CASES, ids=name_of)
def test_unusual_use(ranks, promise, wrapper):
    ranks(2).run(promise, wrapper)


@of_hooks
@pytest.mark.parametrize(
    "build, options",
    [
        (small_net, {"autocast": True}),
        (small_net, {"clips": True, "keeps_zeros": True, "evaluates": True}),
        (Checkpointed, {}),
        (compiled, {}),
        (Alternating, {"find_unused": True}),
    ],
)
def test_equals_torch_ddp(ranks, wrapper, build, options):
    ranks(2).run(partial(equals_torch_ddp, **options), wrapper, build)


@pytest.mark.full
@of_hooks
@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models(ranks, wrapper, name):
    ranks(2).run(equals_torch_ddp, wrapper, *REAL_MODELS[name], timeout=300)
