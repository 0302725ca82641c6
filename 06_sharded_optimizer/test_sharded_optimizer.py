"""ShardedOptimizer against the optimizers it shards, on real ranks, and both scripts."""

import collections
import copy
import io
import pickle
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from common.testing import harness
from common.testing.harness import masked, torchrun

sys.path.insert(0, str(Path(__file__).parent))
from sharded_optimizer import LanguageModel, ShardedOptimizer, main, state_bytes

SCRIPT = Path(__file__).with_name("sharded_optimizer.py")
ADAM, ADAMW, SGD, ADAGRAD = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
)
OPTIMIZERS = [
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "fused": True}),
    (ADAM, {"lr": 0.01, "amsgrad": True}),
    (ADAM, {"lr": torch.tensor(0.01)}),
    (ADAMW, {"lr": 0.01, "fused": True}),
    (ADAMW, {"lr": 0.01, "foreach": True}),
    (ADAGRAD, {"lr": 0.1, "initial_accumulator_value": 0.1}),
]


def parameters(*shapes, dtype=torch.float64):
    """The same parameters on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


SHAPES = (30, 20), (40,), (7, 5, 3), (), (600,), (1,)


def give_gradients(parameters, step):
    """Averaged gradients as DDP leaves them: the same on every rank, different in every step."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def train(optimizer, parameters, steps):
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


def assert_equal(mine, expected):
    """The same on all ranks to the last bit, and within 1e-12 of the unsharded optimizer's."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [parameter.detach().clone() for parameter in mine])
    for number, (one, other) in enumerate(zip(mine, expected, strict=True)):
        assert (
            one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
        ), number
        assert all(torch.equal(one, replicas[number]) for replicas in everyones), (
            f"ranks differ in parameter {number}"
        )
        assert (one - other).abs().max() <= 1e-12, (
            f"parameter {number}: {(one - other).abs().max()}"
        )


def groups_of(mine):
    return [{"params": mine[:2], "lr": 0.03, "weight_decay": 0.1}, {"params": mine[2:]}]


def equals_unsharded():
    for optimizer_cls, options in OPTIMIZERS:
        for grouped in (False, True):
            mine, plain = parameters(*SHAPES), parameters(*SHAPES)
            sharded = ShardedOptimizer(
                groups_of(mine) if grouped else mine, optimizer_cls, **options
            )
            unsharded = optimizer_cls(groups_of(plain) if grouped else plain, **options)
            train(sharded, mine, range(5))
            train(unsharded, plain, range(5))
            assert_equal(mine, plain)
            sharded.param_groups[0]["lr"] = unsharded.param_groups[0]["lr"] = 0.2
            train(sharded, mine, range(5, 8))
            train(unsharded, plain, range(5, 8))
            assert_equal(mine, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_the_unsharded_optimizer(ranks, world_size):
    ranks(world_size).run(equals_unsharded)


def follows_schedulers():
    schedulers = [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=12
        ),  # betas, too
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
    ]
    for make in schedulers:
        mine, plain = parameters(*SHAPES), parameters(*SHAPES)
        for optimizer, owned in (
            (ShardedOptimizer(groups_of(mine), ADAM), mine),
            (ADAM(groups_of(plain)), plain),
        ):
            scheduler = make(optimizer)
            for step in range(8):
                train(optimizer, owned, [step])
                scheduler.step()
        assert_equal(mine, plain)


def test_schedulers_take_effect(ranks):
    ranks(2).run(follows_schedulers)


def adds_groups():
    for optimizer_cls, options in OPTIMIZERS:
        mine, plain = parameters(*SHAPES), parameters(*SHAPES)
        sharded, unsharded = (
            ShardedOptimizer(mine[:3], optimizer_cls, **options),
            optimizer_cls(plain[:3], **options),
        )
        train(sharded, mine[:3], range(4))
        train(unsharded, plain[:3], range(4))
        before = {
            parameter: {key: torch.as_tensor(value).clone() for key, value in state.items()}
            for parameter, state in sharded.state.items()
        }
        owners = dict(sharded.owners)
        for optimizer, owned in ((sharded, mine), (unsharded, plain)):
            optimizer.add_param_group({"params": owned[3], "lr": 0.05})
            optimizer.add_param_group({"params": owned[4:]})
        assert all(sharded.owners[parameter] == owner for parameter, owner in owners.items())
        assert all(
            torch.equal(torch.as_tensor(sharded.state[parameter][key]), value)
            for parameter, state in before.items()
            for key, value in state.items()
        )
        if (
            optimizer_cls is ADAGRAD
        ):  # older versions of torch make its state in the constructor only
            for parameter in plain[3:]:
                unsharded.state[parameter] = ADAGRAD([parameter], **options).state[parameter]
        train(sharded, mine, range(4, 8))
        train(unsharded, plain, range(4, 8))
        assert_equal(mine, plain)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_groups_can_be_added_in_mid_training(ranks, world_size):
    ranks(world_size).run(adds_groups)


def steps_with_closure():
    mine, plain = parameters((4, 3), (2,)), parameters((4, 3), (2,))
    sharded, unsharded, calls = ShardedOptimizer(mine, ADAM, lr=0.1), ADAM(plain, lr=0.1), []

    def closure(optimizer, owned):
        calls.append(dist.get_rank())
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in owned)
        loss.backward()
        return loss

    for _ in range(3):
        loss = sharded.step(lambda: closure(sharded, mine))
        assert loss.item() == unsharded.step(lambda: closure(unsharded, plain)).item()
    assert len(calls) == 6
    assert sharded.step() is None
    unsharded.step()
    assert_equal(mine, plain)
    sharded.zero_grad()
    assert all(parameter.grad is None for parameter in mine)
    assert "lr: 0.1" in repr(sharded)


def test_closure_zero_grad_and_repr(ranks):
    ranks(3).run(steps_with_closure)  # three ranks, two parameters: one rank owns nothing


def trains_unusual_parameters():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 5)
        ).double()
        model.to(memory_format=torch.channels_last)
        model[3].weight = model[1].weight  # tied
        model[2].weight.requires_grad_(False)  # frozen
        model[1].bias.data = model[1].bias.data.float()
        model[2].bias.data = model[2].bias.data.bfloat16()  # three dtypes
        model.register_parameter("transposed", nn.Parameter(torch.randn(4, 6).double().t()))
        model.register_parameter("unused", nn.Parameter(torch.randn(5).double()))
        return model

    def gradients(model, step):
        give_gradients(model.parameters(), step)
        model.unused.grad = None
        if step < 2:
            model[0].weight.grad = None  # none in the first steps

    sharded_model, plain_model = build(), build()
    sharded, unsharded = (
        ShardedOptimizer(sharded_model.parameters(), ADAM),
        ADAM(plain_model.parameters()),
    )
    assert sharded_model[3].weight is sharded_model[1].weight
    frozen = sharded_model[2].weight.detach().clone()
    for step in range(5):
        for model, optimizer in ((sharded_model, sharded), (plain_model, unsharded)):
            gradients(model, step)
            optimizer.step()
    assert torch.equal(sharded_model[2].weight, frozen)
    assert_equal(list(sharded_model.parameters()), list(plain_model.parameters()))
    for model, optimizer in (
        (sharded_model, sharded),
        (plain_model, unsharded),
    ):  # thaw one that it has already
        model[2].weight.requires_grad_(True)
        gradients(model, 9)
        optimizer.step()
    assert not torch.equal(sharded_model[2].weight, frozen)
    assert_equal(list(sharded_model.parameters()), list(plain_model.parameters()))


@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_tied_mixed_dtypes_strides_and_no_gradient(ranks, world_size):
    ranks(world_size).run(trains_unusual_parameters)


def balances():
    world_size = dist.get_world_size()
    models = [
        LanguageModel(64, 256, 6, 4, 500),
        nn.Sequential(*(nn.Linear(50, 50) for _ in range(12))),
        nn.Sequential(nn.Linear(1000, 500), nn.Linear(2, 2)),
        nn.Linear(3, 3, bias=False),
    ]
    for model in models:
        optimizer = ShardedOptimizer(model.parameters(), ADAM)
        sizes = [parameter.nbytes for parameter in model.parameters()]
        assert sum(optimizer.loads) == sum(sizes)
        assert max(optimizer.loads) <= max(1.05 / world_size * sum(sizes), max(sizes))
        assert sum(flat.nbytes for _, flat in optimizer.flats) == sum(
            sizes
        )  # nothing is stored twice
        assert all(
            parameter.untyped_storage().nbytes() <= max(optimizer.loads)
            for parameter in model.parameters()
        )
        give_gradients(model.parameters(), 0)
        optimizer.step()
        zero = ZeroRedundancyOptimizer(model.parameters(), ADAM)
        zero.step()
        assert max(state_bytes(optimizer)) <= max(state_bytes(zero))
    half_frozen = parameters(*[(50,)] * 8)
    for parameter in half_frozen[::2]:
        parameter.requires_grad_(False)
    optimizer = ShardedOptimizer(half_frozen, ADAM)
    train(optimizer, half_frozen, [0])
    assert len(optimizer.state) in (4 // world_size, -(-4 // world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_is_shared_out_evenly(ranks, world_size):
    ranks(world_size).run(balances)


def other_shape(given):
    given[0] = parameters((3, 4))[0]


def one_more(given):
    given += parameters((5,))


def other_dtype(given):
    given[1] = nn.Parameter(given[1].detach().float())


def other_strides(given):
    given[0] = nn.Parameter(torch.randn(3, 4).double().t())


def one_frozen(given):
    given[0].requires_grad_(False)


def two_groups(given):
    given[:] = [{"params": given[:1]}, {"params": given[1:]}]


def nothing(given):
    given.clear()


def not_a_leaf(given):
    given[0] = given[0] * 2


def gets_an_error(change):
    """The last rank's parameters are changed: all ranks raise, and can go on."""
    given = parameters((4, 3), (2,))
    if dist.get_rank() == dist.get_world_size() - 1:
        change(given)
    start = time.monotonic()
    with pytest.raises(ValueError, match="ranks' parameters differ"):
        ShardedOptimizer(given, ADAM)
    assert time.monotonic() - start < 10
    dist.barrier()  # the process group is still in order


@pytest.mark.parametrize(
    "change",
    [
        other_shape,
        one_more,
        other_dtype,
        other_strides,
        one_frozen,
        two_groups,
        nothing,
        not_a_leaf,
    ],
)
def test_ranks_that_differ_get_an_error(ranks, change):
    ranks(3).run(gets_an_error, change)


def refuses_what_is_wrong():
    for wrong, error in (([], ValueError), ([1.0], TypeError), (torch.zeros(2), TypeError)):
        with pytest.raises(error):
            ShardedOptimizer(wrong, ADAM)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(parameters((3,)), ADAM, lr=-1)
    with pytest.raises(TypeError):
        ShardedOptimizer(parameters((3,)), ADAM, learning_rate=1)
    model = nn.Linear(2, 2)
    optimizer = ShardedOptimizer(model.parameters(), ADAM)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.weight]})
    model.double()
    give_gradients(model.parameters(), 0)
    with pytest.raises(RuntimeError, match="left its flat buffer"):
        optimizer.step()


def test_mistakes_are_said(ranks):
    ranks(2).run(refuses_what_is_wrong)


def train_and_edit(optimizer, owned, steps):
    for step in steps:
        if step == 2:
            optimizer.param_groups[0]["lr"] = 0.02  # must travel with the state
        train(
            optimizer, owned[:4] if step < 3 else owned, [step]
        )  # two get their first gradient in step 3


def continue_training(optimizer_cls, options, saved, steps):
    """Load what another world size saved, train on; (weights, state) of this rank as bytes."""
    mine = parameters(*SHAPES)
    optimizer = ShardedOptimizer(groups_of(mine), optimizer_cls, **options)
    if saved:
        weights, state = torch.load(io.BytesIO(saved))
        for parameter, weight in zip(mine, weights, strict=True):
            parameter.detach().copy_(weight)
        optimizer.load_state_dict(state)
    train_and_edit(optimizer, mine, steps)
    weights, state = [parameter.detach().clone() for parameter in mine], optimizer.state_dict()
    train(optimizer, mine, [99])  # must not change what was saved
    assert dist.get_rank() == 0 or state["state"] == {}
    file = io.BytesIO()
    torch.save((weights, state), file)
    return file.getvalue()


def assert_same_state(mine, expected):
    """The same state_dict: keys, hyper-parameters, and tensors to 1e-12."""
    assert mine["param_groups"] == expected["param_groups"]
    assert list(mine["state"]) == list(expected["state"])
    for index, state in expected["state"].items():
        assert mine["state"][index].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][index][key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "optimizer_cls, options", [one for one in OPTIMIZERS if not torch.is_tensor(one[1]["lr"])]
)
def test_state_dict_goes_from_2_to_3_to_1_ranks(ranks, optimizer_cls, options):
    saved, plain = None, parameters(*SHAPES)
    unsharded = optimizer_cls(groups_of(plain), **options)
    for world_size, steps in ((2, range(0, 3)), (3, range(3, 6)), (1, range(6, 8))):
        saved = ranks(world_size).run(continue_training, optimizer_cls, options, saved, steps)[0]
        train_and_edit(unsharded, plain, steps)
        weights, state = torch.load(io.BytesIO(saved))
        for number, (weight, parameter) in enumerate(zip(weights, plain, strict=True)):
            assert (weight - parameter).abs().max() <= 1e-12, (world_size, number)
        assert_same_state(state, unsharded.state_dict())
        loaded = optimizer_cls(
            groups_of(plain), lr=9.0
        )  # into the optimizer itself, without sharding
        loaded.load_state_dict(state)
        assert_same_state(loaded.state_dict(), unsharded.state_dict())


def loads_the_wrong_state():
    optimizer = ShardedOptimizer(parameters((3,), (2,)), ADAM)
    state = ShardedOptimizer(parameters((3,)), ADAM).state_dict()
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(state)


def test_a_state_dict_that_does_not_fit(ranks):
    ranks(2).run(loads_the_wrong_state)


def messages():
    mine = parameters(*[(10, 10)] * 40)
    optimizer = ShardedOptimizer(mine, ADAM)
    give_gradients(mine, 0)
    with torch.profiler.profile() as profiler:
        optimizer.step()
    return {
        event.key: event.count
        for event in profiler.key_averages()
        if event.key.startswith("c10d::")
    }


def test_few_messages(ranks):
    assert ranks(3).run(messages) == 3 * [{"c10d::broadcast_": 3}]  # for 40 parameters


# Every class of torch.optim, with options that make it keep all the state that it can keep. A class
# that is not here fails the test.
EVERY_CLASS = {
    "ASGD": {"lr": 0.1, "t0": 2, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adamax": {"lr": 0.01},
    "LBFGS": {},
    "Muon": {"lr": 0.1},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {"lr": 0.01},
}
CLASSES = [
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name != "Optimizer"
]


def equals_class_and_zero(name, options):
    optimizer_cls = getattr(torch.optim, name)
    shapes = ((30, 20), (7, 5), (4, 4), (10, 3), (2, 600)) if name == "Muon" else SHAPES
    if name == "SparseAdam":
        shapes = (30, 20), (7, 5, 3), (600,)

    def train_one(optimizer, owned, steps):
        for step in steps:
            give_gradients(owned, step)
            if name == "SparseAdam":
                for parameter in owned:
                    parameter.grad = parameter.grad.to_sparse()
            optimizer.step()

    mine, plain, zeros = parameters(*shapes), parameters(*shapes), parameters(*shapes)
    sharded = ShardedOptimizer(groups_of(mine), optimizer_cls, **options)
    unsharded = optimizer_cls(groups_of(plain), **options)
    zero = ZeroRedundancyOptimizer(groups_of(zeros), optimizer_cls, **options)
    state = sharded.state_dict()
    if dist.get_rank() == 0:
        assert_same_state(state, unsharded.state_dict())  # Adagrad's is there before the first step
    for steps in (range(4), range(4, 7)):
        train_one(sharded, mine, steps)
        train_one(unsharded, plain, steps)
        train_one(zero, zeros, steps)
        assert_equal(mine, plain)
        assert_equal(mine, zeros)
        state = sharded.state_dict()
        if dist.get_rank() == 0:
            assert_same_state(state, unsharded.state_dict())
        for optimizer in (sharded, unsharded, zero):
            optimizer.param_groups[0]["lr"] = 0.2


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"LBFGS"}))
def test_every_class_of_torch(ranks, name, world_size):
    ranks(world_size).run(equals_class_and_zero, name, EVERY_CLASS[name])


def refuses_what_the_class_refuses():
    with pytest.raises(ValueError, match="LBFGS looks at all parameters at once"):
        ShardedOptimizer(parameters((3, 3)), torch.optim.LBFGS)
    if "Muon" in CLASSES:  # torch 2.9
        with pytest.raises(ValueError, match="Muon only supports 2D"):
            ShardedOptimizer(parameters((3, 3), (2, 2), (4,)), torch.optim.Muon)
        muon = ShardedOptimizer(parameters((3, 3), (2, 2)), torch.optim.Muon)
        with pytest.raises(ValueError, match="Muon only supports 2D"):
            muon.add_param_group({"params": parameters((5,))})
        assert len(muon.param_groups) == 1
    dist.barrier()


def test_every_rank_refuses_what_the_class_refuses(ranks):
    ranks(3).run(refuses_what_the_class_refuses)


class CountingAdam(torch.optim.Optimizer):
    """It counts its steps in the group, and like apex's FusedAdam passes over an empty group."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", torch.zeros(())) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                correction = 1 - 0.9 ** group["step"].item()
                parameter.sub_(mean / correction, alpha=group["lr"])


class AlwaysCountingAdam(CountingAdam):
    """The same, but it counts in every group."""

    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                group["step"] = group.get("step", torch.zeros(())) + 1
        super().step()


def keeps_what_is_written_into_groups(optimizer_cls):
    def groups(owned):
        return [{"params": owned[:1], "lr": 0.2}, {"params": owned[1:3]}, {"params": owned[3:]}]

    shapes = (600,), (40,), (2,), (3, 3), (1,)
    mine, plain = parameters(*shapes), parameters(*shapes)
    sharded = ShardedOptimizer(groups(mine), optimizer_cls)
    unsharded = optimizer_cls(groups(plain))
    train(sharded, mine, range(3))
    train(unsharded, plain, range(3))
    assert_equal(mine, plain)
    for group in sharded.param_groups:
        owns = any(sharded.owners[parameter] == sharded.rank for parameter in group["params"])
        if owns or optimizer_cls is AlwaysCountingAdam:
            assert group["step"].item() == 3
    state = sharded.state_dict()
    if dist.get_rank() == 0:
        assert_same_state(state, unsharded.state_dict())
    resumed = parameters(*shapes)
    for parameter, trained in zip(resumed, mine, strict=True):
        parameter.detach().copy_(trained)
    resumed_optimizer = ShardedOptimizer(groups(resumed), optimizer_cls)
    resumed_optimizer.load_state_dict(state)
    for optimizer, owned in ((sharded, mine), (unsharded, plain), (resumed_optimizer, resumed)):
        train(optimizer, owned, range(3, 6))
    assert_equal(mine, plain)
    assert_equal(resumed, plain)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer_cls", [CountingAdam, AlwaysCountingAdam])
def test_what_an_optimizer_writes_into_its_groups(ranks, optimizer_cls, world_size):
    ranks(world_size).run(keeps_what_is_written_into_groups, optimizer_cls)


def takes_groups_out_and_in():
    for optimizer_cls, options in OPTIMIZERS:
        mine, plain = parameters(*SHAPES), parameters(*SHAPES)
        sharded = ShardedOptimizer(groups_of(mine), optimizer_cls, **options)
        unsharded = optimizer_cls(groups_of(plain), **options)
        for optimizer, owned in ((sharded, mine), (unsharded, plain)):
            train(optimizer, owned, range(3))
            group = optimizer.param_groups.pop(0)
            train(optimizer, owned, range(3, 6))
            optimizer.add_param_group(group)
            train(optimizer, owned, range(6, 9))
        assert_equal(mine, plain)


def takes_a_group_out_and_in_at_once():
    mine, plain = parameters(*SHAPES), parameters(*SHAPES)
    sharded = ShardedOptimizer(groups_of(mine), torch.optim.Adam)
    unsharded = torch.optim.Adam(groups_of(plain))
    for optimizer, owned in ((sharded, mine), (unsharded, plain)):
        train(optimizer, owned, range(3))
        optimizer.add_param_group(optimizer.param_groups.pop())
        train(optimizer, owned, range(3, 6))
    assert_equal(mine, plain)


def resets_its_state():
    """The usual idiom, in the middle of training."""
    mine, plain = parameters(*SHAPES), parameters(*SHAPES)
    sharded = ShardedOptimizer(mine, torch.optim.Adam)
    unsharded = torch.optim.Adam(plain)
    for optimizer, owned in ((sharded, mine), (unsharded, plain)):
        train(optimizer, owned, range(3))
        optimizer.state = collections.defaultdict(dict)
        train(optimizer, owned, range(3, 6))
    assert_equal(mine, plain)


@pytest.mark.parametrize("check", [takes_a_group_out_and_in_at_once, resets_its_state])
def test_the_user_edits_groups_and_state(ranks, check):
    ranks(3).run(check)


def test_groups_can_be_taken_out_and_in(ranks):
    ranks(3).run(takes_groups_out_and_in)


def rolls_back():
    mine, plain = parameters(*SHAPES), parameters(*SHAPES)
    mine[1].requires_grad_(False)
    plain[1].requires_grad_(False)
    sharded, unsharded = ShardedOptimizer(mine, ADAM), ADAM(plain)
    sharded.load_state_dict(sharded.state_dict())  # there is none yet
    train(sharded, mine[:4], range(3))  # some have no gradient yet
    train(unsharded, plain[:4], range(3))
    sharded.load_state_dict(sharded.state_dict())
    unsharded.load_state_dict(unsharded.state_dict())
    train(sharded, mine, range(3, 6))
    train(unsharded, plain, range(3, 6))
    assert_equal(mine, plain)
    saved, weights = sharded.state_dict(), [parameter.detach().clone() for parameter in mine]
    for _ in range(2):  # the second time all is as it was saved, too
        sharded.load_state_dict(saved)
        for parameter, other, weight in zip(mine, plain, weights, strict=True):
            parameter.detach().copy_(weight)
            other.detach().copy_(weight)
        again = ADAM(plain)
        again.load_state_dict(copy.deepcopy(unsharded.state_dict()))
        train(sharded, mine, range(6, 9))
        train(again, plain, range(6, 9))
        assert_equal(mine, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_load_state_dict_of_state_dict(ranks, world_size):
    ranks(world_size).run(rolls_back)


def loads_from_one_rank():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    mine, plain = parameters(*SHAPES), parameters(*SHAPES)
    sharded, unsharded = ShardedOptimizer(mine, ADAM), ADAM(plain)
    trained = parameters(*SHAPES)
    optimizer = ADAM(trained)
    train(optimizer, trained, range(3))
    whole = optimizer.state_dict()
    unsharded.load_state_dict(whole)
    of_rank = sharded.state_dict()
    for given in (whole if rank == last else None, whole if rank == 0 else of_rank):
        sharded.load_state_dict(given)
        own = [parameter for parameter in mine if sharded.owners[parameter] == rank]
        assert set(sharded.state) == set(own)
        assert all(state["step"] == 3 for state in sharded.state.values())
    train(sharded, mine, range(3))
    train(unsharded, plain, range(3))
    assert_equal(mine, plain)
    box = [sharded.state_dict()]
    dist.broadcast_object_list(box, src=last)
    for given in (box[0], None):
        with pytest.raises(ValueError, match="no whole state was given"):
            sharded.load_state_dict(given)
    assert all(state["step"] == 6 for state in sharded.state.values())


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_that_has_the_state_is_enough(ranks, world_size):
    ranks(world_size).run(loads_from_one_rank)


def differs_in_shape(mine):
    last = dist.get_rank() == dist.get_world_size() - 1
    return parameters((3,) if last else (4,))


def has_no_leaf(mine):
    last = dist.get_rank() == dist.get_world_size() - 1
    (parameter,) = parameters((4,))
    return [parameter * 2] if last else [parameter]


def is_in_another_group(mine):
    return [*parameters((4,)), mine[0]]


def forgets_a_refused_group(make):
    mine, plain = parameters(*SHAPES), parameters(*SHAPES)
    sharded, unsharded = ShardedOptimizer(mine[:3], ADAM), ADAM(plain[:3])
    train(sharded, mine[:3], range(2))
    train(unsharded, plain[:3], range(2))
    refused = {"params": make(mine)}
    with pytest.raises(ValueError):
        sharded.add_param_group(refused)
    assert len(sharded.param_groups) == len(sharded.local.param_groups) == 1
    assert len(sharded.owners) == len(sharded.views) == 3
    sharded.add_param_group({"params": mine[3:]})
    unsharded.add_param_group({"params": plain[3:]})
    train(sharded, mine, range(2, 4))
    train(unsharded, plain, range(2, 4))
    assert_equal(mine, plain)
    state = sharded.state_dict()
    if dist.get_rank() == 0:
        assert_same_state(state, unsharded.state_dict())


@pytest.mark.parametrize("make", [differs_in_shape, has_no_leaf, is_in_another_group])
def test_a_refused_group_leaves_nothing(ranks, make):
    ranks(3).run(forgets_a_refused_group, make)


def takes_parameters_back():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)).double()

    model, twin = build(), build()
    sharded = ShardedOptimizer(model.parameters(), ADAM)
    unsharded = ADAM(twin.parameters())
    for optimizer, trained in ((sharded, model), (unsharded, twin)):
        owned = list(trained.parameters())
        train(optimizer, owned, range(2))
        vector = nn.utils.parameters_to_vector(owned) * 2
        nn.utils.vector_to_parameters(vector.detach(), owned)
        train(optimizer, owned, range(2, 5))
    assert_equal(list(model.parameters()), list(twin.parameters()))
    for parameter, view in sharded.views.items():
        assert parameter.data_ptr() == view.data_ptr()
    for change in (
        lambda model: model.float(),
        lambda model: model.to(memory_format=torch.channels_last),
    ):
        model = nn.Sequential(nn.Conv2d(3, 4, 3)).double()
        optimizer = ShardedOptimizer(model.parameters(), ADAM)
        change(model)
        with pytest.raises(RuntimeError, match="left its flat buffer.*before constructing"):
            optimizer.step()


def test_parameters_that_were_given_other_memory(ranks):
    ranks(2).run(takes_parameters_back)


def refuses_a_rank_outside_the_group():
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="not in process_group"):
            ShardedOptimizer(parameters((3,)), ADAM, process_group=group)
    else:
        ShardedOptimizer(parameters((3,)), ADAM, process_group=group)
    dist.barrier()


def test_a_rank_outside_the_process_group(ranks):
    ranks(3).run(refuses_a_rank_outside_the_group)


def refuses_to_be_copied():
    optimizer = ShardedOptimizer(parameters((3,)), ADAM)
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(RuntimeError, match="save state_dict"):
            copied(optimizer)


def test_copy_and_pickle(ranks):
    ranks(2).run(refuses_to_be_copied)


def in_a_subgroup():
    group = dist.new_group([2, 1])
    if dist.get_rank() != 0:
        mine, plain = parameters(*SHAPES), parameters(*SHAPES)
        optimizer = ShardedOptimizer(mine, ADAM, process_group=group)
        train(optimizer, mine, range(3))
        train(ADAM(plain), plain, range(3))
        assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))
        assert len(optimizer.state) < len(mine)
        assert len(optimizer.state_dict()["state"]) == (
            len(mine) if dist.get_rank(group) == 0 else 0
        )
    dist.barrier()


def test_a_process_group_of_some_ranks(ranks):
    ranks(3).run(in_a_subgroup)


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu(script, world_size):
    command = torchrun(world_size, SCRIPT, "--device", "cuda", "--steps", 1)
    status, output = script(command).wait(300)
    assert status == 0, output
    assert "verify: passed" in output


QUICK = "--size nano --device cpu --batch-size 1 --context-length 8 --steps 1 --warmup 0".split()


def assert_prints(output, recorded, starts):
    """All lines of the recorded output that start so are there, whatever their numbers are."""
    shown = masked(recorded.read_text().replace("tiny model", "nano model"))
    expected = [line for line in shown if line.startswith(starts)]
    missing = [line for line in expected if line not in masked(output)]
    assert expected and not missing, f"{recorded.name} has lines that are not printed: {missing}"


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.full)])
def test_script(forked, tmp_path, small):
    """Whole, on a small MNIST or on the digits."""
    files = {"--json": "x.json", "--save": "save", "--trace": "trace"}
    words = [word for flag, name in files.items() for word in (flag, tmp_path / name)]
    if small:
        harness.write_mnist(tmp_path / "data", 700, 10)  # the last batch is not full
        words += ["--data", tmp_path / "data"]
    status, output = forked(2, SCRIPT, *QUICK, *words)
    assert status == 0, output
    recorded = SCRIPT.with_name("reference_output.txt")
    assert_prints(
        output,
        recorded,
        ("verify", "MB", "Sharded", "ms", "Percentiles", "training step;", "of the rank"),
    )
    result = harness.read_json(tmp_path / "x.json", "06_sharded_optimizer")
    assert result["world_size"] == 2 and result["verify"]["max_abs_diff"] == 0
    names = [one["name"] for one in result["candidates"]]
    assert names == ["AdamW", "ShardedOptimizer", "torch ZeRO", "torch ZeRO view"]
    most = [max(one["optimizer_state_bytes"]) for one in result["candidates"]]
    unsharded, sharded, *torchs = most
    assert unsharded >= 2 * 4 * result["model"]["parameters"]
    assert sharded <= 1.05 * unsharded / 2 and all(sharded <= one for one in torchs)
    model_bytes = 4 * result["model"]["parameters"]
    for name, moments in result["memory_bytes"].items():
        assert list(moments) == ["model built", "before the step", "after the step"]
        state = [of_rank[2] for of_rank in moments["after the step"]]
        if name == "AdamW":
            assert all(2 * model_bytes <= held < 2.001 * model_bytes for held in state)
        else:
            assert 2 * model_bytes <= sum(state) and max(state) <= 1.05 * model_bytes
        assert moments["model built"] == 2 * [[model_bytes, 0, 0]]
        for of_rank in moments["before the step"]:
            assert of_rank[:2] == [model_bytes, model_bytes]
    for one in result["candidates"]:
        for times in ("step_seconds", "optimizer_seconds"):
            assert [len(of_rank) for of_rank in one[times]] == [1, 1]
    assert len(torch.load(tmp_path / "save", weights_only=True)) == 6
    assert "traceEvents" in (tmp_path / "trace").read_text()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder, in which torch does not make the cache that an optimizer's import needs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.mark.full
@harness.needs_proc
@pytest.mark.parametrize("fault", harness.FAULTS)
@pytest.mark.parametrize("moment", harness.LADDER_MOMENTS)
def test_faults(script, moment, fault, temporary):
    command = torchrun(2, SCRIPT, *harness.LONG)
    harness.check_fault(script, command, moment, fault, temporary)


@pytest.mark.full
@harness.needs_proc
def test_stopped_rank(script):
    words = ["--no-verify", "--no-memory", *harness.LONG]
    harness.check_stopped_rank(script, SCRIPT, *words)


def test_wrong_input(monkeypatch, capsys):
    harness.check_wrong_input(main, SCRIPT, "--steps", "0", monkeypatch, capsys)


def test_not_started_by_torchrun(monkeypatch, capsys):
    harness.check_not_started_by_torchrun(main, SCRIPT, monkeypatch, capsys)


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)
