"""What stages 02 to 05 promise of their wrappers, on real ranks of gloo.

What they share with any wrapper are the checks of `make check`. The rest is ours alone: a function
that takes a wrapper is a promise, and runs on every rank.
"""

import copy
import itertools
import pickle
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tools.check.checks_of_wrappers import (
    BEYOND,
    HAS_TO_HOLD,
    averages_what_one_rank_uses,
    follow,
    follow_one_process,
)
from common.setup import with_bucket_size
from tools.harness import ROOT, failed, judged

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


def small_net():
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


def ones():
    return torch.ones(2, 6, dtype=torch.float64)


def backward_and_finish(model, x):
    model(x).sum().backward()
    model.finish_gradient_synchronization()


def broadcasts_whatever_the_strides(wrapper):
    """Parameters and buffers, in another memory format or not dense in memory."""
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    module.not_dense = nn.Parameter(torch.zeros(6, 6)[:, :3])
    module.register_buffer("strided", torch.zeros(6, 6)[:, ::2])
    for tensor in module.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + dist.get_rank())
    wrapper(module)
    for name, tensor in module.state_dict().items():
        assert (tensor == torch.arange(tensor.numel()).view(tensor.shape)).all(), name


def refuses_sparse_gradients(wrapper):
    model = wrapper(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(RuntimeError, match="sparse=False"):
        backward_and_finish(model, torch.tensor([1, 2]))


def refuses_what_cannot_be_wrapped(wrapper):
    """One clear ValueError on every rank, also where a single rank has the problem."""
    rank = dist.get_rank()
    net = nn.Linear(3, 1)
    one_layer_more = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank)))
    for module, message in [
        (wrapper(copy.deepcopy(net)), "wrapped only once"),
        (DistributedDataParallel(copy.deepcopy(net)), "wrapped only once"),
        (nn.Linear(4, 3 - rank), r"rank 0 has weight \(3, 4\).* rank 1 has weight \(2, 4\)"),
        (one_layer_more, "rank 0 has nothing, rank 1 has 1.weight"),
        (nn.Linear(2, 2).requires_grad_(rank == 0), "=True, rank 1 has .*requires_grad=False"),
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


def communicates_nothing_within_no_sync(wrapper):
    """Nested contexts end one by one, and a finish within them does nothing."""
    rank = dist.get_rank()
    net = nn.Linear(1, 1, bias=False)
    model = wrapper(net)
    x = torch.full((1, 1), 1.0 + rank)
    with model.no_sync():
        with model.no_sync():
            model(x).sum().backward()
        backward_and_finish(model, x)
        assert net.weight.grad.item() == 2 * (1 + rank)
    backward_and_finish(model, x)
    assert net.weight.grad.item() == 3 * 1.5


def may_be_wrapped_again(wrapper):
    """In the middle of a step, and by two that are used in turn, as cells of a notebook may do."""
    net = small_net()
    wrapper(net)(ones())
    for model in (wrapper(net), wrapper(net)):
        follow(model, copy.deepcopy(net))


def trains_adversaries(wrapper):
    """A generator's loss passes through the wrapped discriminator, which shall send nothing.

    It is within no_sync(), or frozen meanwhile.
    """
    generator, discriminator = wrapper(nn.Linear(6, 6)), wrapper(nn.Linear(6, 1))
    x = torch.full((2, 6), 1.0 + dist.get_rank())
    for frozen in (False, True, False):
        backward_and_finish(discriminator, x)
        assert discriminator.module.weight.grad.tolist() == [[3.0] * 6]  # two rows of 1.5
        discriminator.requires_grad_(not frozen)
        with nullcontext() if frozen else discriminator.no_sync():
            discriminator(generator(x)).sum().backward()
        discriminator.requires_grad_(True)
        generator.finish_gradient_synchronization()
        expected = 3 * discriminator.module.weight.T.expand(6, 6)
        torch.testing.assert_close(generator.module.weight.grad, expected)
        discriminator.zero_grad()
        generator.zero_grad()


def is_an_ordinary_module_without_its_wrapper(wrapper):
    """A backward through .module on rank 0 alone, or after the wrapper is gone, sends nothing."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    model = wrapper(net)
    backward_and_finish(model, torch.ones(1, 6))
    for _ in range(2):
        if dist.get_rank() == 0:
            net(torch.ones(1, 6)).sum().backward()
        summed = torch.tensor([10.0 * (1 + dist.get_rank())])
        dist.all_reduce(summed)
        assert summed.item() == 30
        model = None


def is_freed(wrapper):
    """A wrapper that is trained and dropped, also in the middle of a step."""
    net = nn.Linear(8, 8)
    for finishes in (True, False, True):
        model = wrapper(net)
        model(torch.ones(1, 8)).sum().backward()
        if finishes:
            model.finish_gradient_synchronization()
        alive = weakref.ref(model)
        del model
        assert alive() is None


def notices_a_forgotten_finish(wrapper):
    model, x = wrapper(nn.Linear(3, 1)), torch.ones(2, 3)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\) after every"):
        model(x)
    model.finish_gradient_synchronization()
    model(x)
    model(x)  # after a forward that nobody follows with a backward


def notices_gradients_that_change_on_their_way(wrapper):
    """Clipped between backward() and the finish; the next step is clean."""
    net = small_net()
    model = wrapper(net)
    model(ones()).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.001)
    with pytest.raises(RuntimeError, match="gradients changed on their way"):
        model.finish_gradient_synchronization()
    model.zero_grad()
    follow(model, copy.deepcopy(net))


def averages_conjugated_gradients(wrapper):
    """Only rank 0's gradient has the flag: what travels is the values, on both."""
    rank = dist.get_rank()
    net = nn.Linear(2, 2, bias=False, dtype=torch.complex128)
    model = wrapper(net)
    x = torch.eye(2, dtype=torch.complex128)
    model(x)
    weight = net.weight.mH if rank == 0 else net.weight
    (weight @ x).backward(torch.full_like(x, 1 + (rank + 1) * 1j))
    model.finish_gradient_synchronization()
    mean = ((1 - 1j) + (1 + 2j)) / 2  # 1 + 1j, conjugated, and 1 + 2j
    assert net.weight.grad.tolist() == [[mean] * 2] * 2


def refuses_a_second_backward(wrapper):
    model, x = wrapper(nn.Linear(3, 1)), torch.ones(2, 3)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match="backward.. or a re-entrant checkpoint ran twice: use no_sync"
    ):
        loss.backward()
    with pytest.raises(RuntimeError, match="gradients changed on their way"):  # they grew
        model.finish_gradient_synchronization()
    model(x)


def drops_a_step_with_zero_grad(wrapper):
    """zero_grad() before the finish and after it, layers unused or not: the next step is clean."""
    net = small_net()
    model = with_bucket_size(wrapper, 0.0001)(net)  # a bucket for each, so that some wait
    used = net.forward
    for forward in (used, lambda x: net[0](x)):
        net.forward = forward
        model(ones()).sum().backward()
        model.zero_grad()
        model.finish_gradient_synchronization()
        assert all(p.grad is None or not p.grad.any() for p in net.parameters())
        model.zero_grad()
    del net.forward
    follow(model, copy.deepcopy(net))


def averages_gradients_of_another_dtype(wrapper):
    """bfloat16 weights with float32 gradients, whose mean has more digits; rank 0 has one alone."""
    rank = dist.get_rank()
    net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)]).bfloat16()
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    model = wrapper(net)
    net.forward = lambda x: net[0](x) + (net[1](x) if rank == 1 else 0)
    backward_and_finish(model, torch.full((1, 4), 2.0 ** (-8 * rank)).bfloat16())
    for layer, mean in zip(net, (0.5 + 2**-9, 2**-9), strict=True):
        assert layer.weight.grad.dtype == torch.float32 and (layer.weight.grad == mean).all()


def refuses_parameters_frozen_or_replaced_later(wrapper):
    for change in ("freeze", "replace"):
        net = small_net()
        model = wrapper(net)
        if change == "freeze":
            net[0].requires_grad_(False)
        else:
            net[0] = nn.Linear(6, 8).double()
        model(ones()).sum().backward()
        with pytest.raises(RuntimeError, match="frozen or replaced: wrap the module again"):
            model.finish_gradient_synchronization()
        net.requires_grad_(True).zero_grad()
        model = wrapper(net)  # the old one is gone, and its hooks with it
        follow(model, copy.deepcopy(net))


def refuses_to_be_copied(wrapper):
    """A copy would have no hooks, and send nothing."""
    model = wrapper(nn.Linear(3, 3))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="copy or save model.module, and wrap that"):
            copied(model)
    backward_and_finish(wrapper(copy.deepcopy(model.module)), torch.ones(1, 3))


def fail(_):
    raise ArithmeticError("on purpose")


def goes_on_after_an_exception_in_backward(wrapper):
    """A rank gives a step up: finish and zero_grad, and the next one is clean."""
    net = small_net()
    model = wrapper(net)
    output = net[:2](ones())
    net.forward = net[2:].forward
    if dist.get_rank() == 1:
        output.register_hook(fail)
    try:
        model(output).sum().backward()
    except ArithmeticError:
        with pytest.raises(RuntimeError, match="call finish_gradient_synchronization"):
            model(output)
    model.finish_gradient_synchronization()
    model.zero_grad()
    del net.forward
    follow(model, copy.deepcopy(net))


def trains_with_activation_checkpoints(wrapper):
    net = small_net()
    model = wrapper(net)
    twin = copy.deepcopy(net)
    layers = net.forward
    net.forward = lambda x: checkpoint(layers, x, use_reentrant=False)
    follow(model, twin)


def trains_what_is_compiled(wrapper):
    """Its gradients are there at once."""
    follow_one_process(wrapper, lambda: torch.compile(small_net(), backend="aot_eager"))


UNUSUAL_USE = [  # of all four wrappers
    broadcasts_whatever_the_strides,
    refuses_what_cannot_be_wrapped,
    refuses_sparse_gradients,
    refuses_create_graph,
    averages_conjugated_gradients,
    averages_before_it_sums,
    communicates_nothing_within_no_sync,
    may_be_wrapped_again,
    trains_adversaries,
    is_an_ordinary_module_without_its_wrapper,
    is_freed,
    drops_a_step_with_zero_grad,
]
if hasattr(torch.Tensor, "grad_dtype"):  # in a newer torch
    UNUSUAL_USE.append(averages_gradients_of_another_dtype)
UNUSUAL_USE_OF_HOOKS = [  # of the two that communicate during backward
    notices_a_forgotten_finish,
    notices_gradients_that_change_on_their_way,
    refuses_a_second_backward,
    refuses_parameters_frozen_or_replaced_later,
    refuses_to_be_copied,
    goes_on_after_an_exception_in_backward,
    trains_with_activation_checkpoints,
    trains_what_is_compiled,
]
CASES = [*itertools.product(UNUSUAL_USE, WRAPPERS)]
CASES += itertools.product(UNUSUAL_USE_OF_HOOKS, OF_HOOKS)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=name_of)
def test_what_has_to_hold_holds_and_what_is_beyond_too_but_for_buffers(
    late_ranks, world_size, wrapper
):
    """Every check of `make check`. Buffers drift apart, as differences.md says."""
    verdicts = judged(late_ranks, wrapper, [*HAS_TO_HOLD, *BEYOND], world_size)
    missed = set() if world_size == 1 else {"keeps_buffers_equal"}
    if wrapper in OF_HOOKS:  # they say that a finish or no_sync() is missing
        missed.add("accumulates_before_one_finish")
    assert failed(verdicts) == missed


def test_what_has_to_hold_holds_for_torch_ddp(late_ranks):
    """Of a parameter that is not used it fails by default; what one rank uses: test_check.py."""
    beyond = [check for check in BEYOND if check is not averages_what_one_rank_uses]
    verdicts = judged(late_ranks, DistributedDataParallel, [*HAS_TO_HOLD, *beyond])
    assert failed(verdicts) == {"skips_what_nobody_uses"}


@pytest.mark.parametrize("promise, wrapper", CASES, ids=name_of)
def test_unusual_use(ranks, promise, wrapper):
    ranks(2).run(promise, wrapper)
