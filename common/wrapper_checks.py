"""What stages 02 to 05 promise of their wrappers. A check runs on every rank; `wrapper` is the class."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = (
            nn.Embedding(6, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 6, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, x, rank):
        return self.head(self.hidden(self.embedding(x.abs().long().clamp(max=5))))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 4)

    def forward(self, x, rank):
        return self.second(self.first(x))


class Branches(nn.Module):
    """Ranks take other ways: even ones through left then right, odd ones right then left; some layers not at all."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.only_rank_0 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.never, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))

    def forward(self, x, rank):
        x = self.right(self.left(x)) if rank % 2 == 0 else self.left(self.right(x))
        return self.scale * (self.only_rank_0(x) if rank == 0 else x)


class MixedTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(6, 6, dtype=dtype) for dtype in 2 * [torch.float32, torch.float64]
        )

    def forward(self, x, rank):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.double()


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x, rank):
        return self.convolutions(x.repeat(1, 32)[:, :147].view(-1, 3, 7, 7))


def trains_like_one_process(wrapper, build, micro_batches=1, set_to_none=True, options=None):
    """Three steps over all ranks give the gradients and weights of one process that sees all ranks' batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tolerance = (
        1e-6 if build is MixedTypes else 1e-12
    )  # where a float32 layer is on the way, and in float64

    def loss(model, step, micro_batch, rank):
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
        return (
            model(3 * torch.randn(8, 6, generator=generator, dtype=torch.float64), rank)
            .square()
            .mean()
        )

    torch.manual_seed(0)
    twin = build() if build is MixedTypes else build().double()
    torch.manual_seed(1 + rank)
    inner = build() if build is MixedTypes else build().double()
    inner.load_state_dict(twin.state_dict()) if rank == 0 else None
    model = wrapper(inner, **(options or {}))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin)]
    for step in range(3):
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with (
                contextlib.nullcontext()
                if last or not hasattr(model, "no_sync")
                else model.no_sync()
            ):
                loss(model, step, micro_batch, rank).backward()
            for other in range(world_size):
                (loss(twin, step, micro_batch, other) / world_size).backward()
        model.finish_gradient_synchronization()
        for (name, mine), expected in zip(inner.named_parameters(), twin.parameters(), strict=True):
            if mine.requires_grad:
                assert mine.grad.stride() == mine.stride(), (
                    "fused optimizers read both front to back, whatever the strides"
                )
                torch.testing.assert_close(
                    mine.grad,
                    torch.zeros_like(mine) if expected.grad is None else expected.grad,
                    rtol=0,
                    atol=tolerance,
                    msg=lambda text, name=name: f"{name}: {text}",
                )
            else:
                assert mine.grad is None
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
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(
        memory_format=torch.channels_last
    )
    module[1].running_mean.fill_(7 + dist.get_rank())
    module[1].num_batches_tracked.fill_(7 + dist.get_rank())
    module.register_buffer("strided", torch.randn(6, 6)[:, ::2])
    module.weight = nn.Parameter(torch.randn(6, 6)[:, :3])  # not dense in memory
    wrapper(module)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3)
    assert torch.equal(module[0].weight, conv.weight) and torch.equal(module[0].bias, conv.bias)
    assert torch.equal(module.strided, torch.randn(6, 6)[:, ::2]) and torch.equal(
        module.weight, torch.randn(6, 6)[:, :3]
    )
    assert (
        module[1].running_mean.tolist() == [7, 7, 7] and module[1].num_batches_tracked.item() == 7
    )


def names_the_difference_between_models(wrapper):
    rank = dist.get_rank()
    for build, difference in [
        (
            lambda: nn.Linear(4, 3 if rank == 0 else 2),
            r"rank 0 has weight \(3, 4\).* rank 1 has weight \(2, 4\)",
        ),
        (
            lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank))),
            "rank 0 has nothing, rank 1 has 1.weight",
        ),
        (
            lambda: nn.Linear(2, 2).requires_grad_(rank == 0),
            "requires_grad=True, rank 1 has .*requires_grad=False",
        ),
    ]:
        with pytest.raises(ValueError, match=difference):
            wrapper(build())
    dist.barrier()  # all ranks got here: nobody hangs in a collective that another rank did not enter


def refuses_sparse_gradients(wrapper):
    model = wrapper(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(RuntimeError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
        model.finish_gradient_synchronization()


def refuses_a_second_backward_or_forward_before_finish(wrapper):
    model, x = wrapper(nn.Linear(3, 1)), torch.ones(2, 3)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"finish_gradient_synchronization\(\) in between.*no_sync"
    ):
        loss.backward()
    with pytest.raises(
        RuntimeError, match=r"call finish_gradient_synchronization\(\) after backward"
    ):
        model(x)
    model.finish_gradient_synchronization()
    model(x)


def refuses_parameters_frozen_or_unfrozen_later(wrapper):
    for before in (True, False):
        model = wrapper(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).requires_grad_(before)))
        model.module[1].requires_grad_(not before)
        with pytest.raises(RuntimeError, match="frozen or unfrozen after wrapping.*deepcopy"):
            model(torch.ones(2, 3))
        wrapper(copy.deepcopy(model.module))(torch.ones(2, 3)).sum().backward()


def refuses_to_be_wrapped_or_copied(wrapper):
    model = wrapper(nn.Linear(3, 1))
    for again in (model, model.module):
        with pytest.raises(ValueError, match="wrap a module only once"):
            wrapper(again)
    with pytest.raises(RuntimeError, match=r"wrap copy.deepcopy\(model.module\)"):
        copy.deepcopy(model)
    other = wrapper(copy.deepcopy(model.module))
    assert list(model.state_dict()) == list(DistributedDataParallel(nn.Linear(3, 1)).state_dict())
    model.module.weight.data += 1
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.module.weight, model.module.weight)
    pickle.dumps(model.module.state_dict())


class Fails(nn.Module):
    """Its backward raises when told to, between the gradients of its two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fail = nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x, rank=0):
        x = self.first(x)
        if self.fail:
            x.register_hook(lambda _: (_ for _ in ()).throw(ArithmeticError("on purpose")))
        return self.second(x)


def goes_on_after_an_exception_in_backward(wrapper):
    """The step is given up on one rank or on all: finish and zero_grad, and the next one is clean."""
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
        equals_torch_ddp(
            None, None, models=(model, DistributedDataParallel(copy.deepcopy(model.module)))
        )


def small_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def checkpointed():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    return Checkpointed()


def compiled():
    return torch.compile(small_net(), backend="aot_eager")


def equals_torch_ddp(wrapper, build, inputs=None, variation="", models=None):
    """Three training steps with the wrapper and with torch DDP give the same gradients, in float64 to 1e-12."""
    rank = dist.get_rank()
    if models is None:
        torch.manual_seed(rank)
        inner = build().double()
        models = (
            wrapper(inner),
            DistributedDataParallel(
                copy.deepcopy(inner), find_unused_parameters="unused" in variation
            ),
        )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        for model in models:
            torch.manual_seed(100 * step + rank)  # of the inputs and of dropout
            x = inputs() if inputs else torch.randn(4, 6, dtype=torch.float64)
            if "eval" in variation:
                with torch.no_grad():
                    model.eval()(x)
                model.train()
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in variation):
                output = model(x)
                outputs = (
                    output if isinstance(output, tuple) else (output,)
                )  # GoogLeNet: with those of its auxiliary heads
                loss = sum(
                    one.double().square().mean() for one in outputs if isinstance(one, torch.Tensor)
                )
            loss.backward()
            if model is models[0]:
                model.finish_gradient_synchronization()
            if "clip" in variation:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for (name, mine), expected in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            torch.testing.assert_close(
                mine.grad,
                torch.zeros_like(mine) if expected.grad is None else expected.grad,
                rtol=1e-10,
                atol=1e-12,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        if (
            "autocast" not in variation
        ):  # there the last bit of a weight may decide the rounding to bfloat16
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none="keep" not in variation)
    return sum(parameter.numel() for parameter in models[0].parameters())


class Alternating(nn.Module):
    """Uses its two branches in turn."""

    def __init__(self):
        super().__init__()
        self.branches, self.calls = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), 0

    def forward(self, x):
        self.calls += 1
        return self.branches[self.calls % 2](x)


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


def images():
    return torch.randn(2, 3, 64, 64, dtype=torch.float64)


def small_images():
    return torch.randn(2, 3, 32, 32, dtype=torch.float64)


def tokens():
    return torch.randint(50, (2, 7))


def resnet18():
    return torchvision.models.resnet18()


def mobilenet():
    return torchvision.models.mobilenet_v3_small()


def googlenet():
    return torchvision.models.googlenet(aux_logits=True, init_weights=False)


def vit():
    return torchvision.models.vit_b_16(image_size=32)


def lstm():
    return nn.LSTM(6, 8, num_layers=2, batch_first=True)


WRONG_OR_UNUSUAL_USE = [
    refuses_parameters_frozen_or_unfrozen_later,
    refuses_to_be_wrapped_or_copied,
    goes_on_after_an_exception_in_backward,
    refuses_sparse_gradients,
    refuses_a_second_backward_or_forward_before_finish,
    names_the_difference_between_models,
]
VARIATIONS = [
    (small_net, None, "eval"),
    (small_net, None, "clip"),
    (small_net, None, "keep"),
    (small_net, None, "autocast"),
    (small_net, None, "clip keep eval"),
    (checkpointed, None, ""),
    (compiled, None, ""),
    (Alternating, None, "unused"),
    (TiedLanguageModel, tokens, ""),
]
REAL_MODELS = [
    (resnet18, images, ""),
    (mobilenet, images, ""),
    (googlenet, images, ""),
    (vit, small_images, ""),
    (lstm, None, ""),
]
