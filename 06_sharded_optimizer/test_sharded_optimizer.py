"""What ShardedOptimizer promises beyond tools/check, on real ranks, and the script.

The checks themselves on two ranks: tools/check/test_exercises.py.
"""

import io
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_optimizer import ShardedOptimizer
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from zero2 import ZeRO2

from common.ladder import LanguageModel
from common.timing import gather
from tools import testing

SCRIPT = Path(__file__).with_name("sharded_optimizer.py")
ADAM = torch.optim.Adam
SHAPES = (30, 20), (40,), (7, 5, 3), (), (600,), (1,)


def parameters(*shapes):
    """The same parameters on every rank; one of two dimensions is transposed in memory."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [nn.Parameter(value.T if value.ndim == 2 else value) for value in values]


def grouped(owned):
    return [{"params": owned[:2], "lr": 0.03, "weight_decay": 0.1}, {"params": owned[2:]}]


def optimizers_of(cls, mine, plain, **options):
    """A sharded one and an unsharded one."""
    return ShardedOptimizer(mine, cls, **options), cls(plain, **options)


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
    values = [parameter.detach().clone() for parameter in mine]
    for all_values in zip(*gather(values), strict=True):
        assert all(torch.equal(value, all_values[0]) for value in all_values), "ranks differ"
    assert [value.stride() for value in mine] == [value.stride() for value in expected]
    torch.testing.assert_close(list(mine), list(expected), rtol=0, atol=1e-12)


def assert_same_state(mine, expected):
    """The same state_dict: keys, hyper-parameters, and tensors to 1e-12."""
    assert mine["param_groups"] == expected["param_groups"]
    assert list(mine["state"]) == list(expected["state"])
    torch.testing.assert_close(mine["state"], expected["state"], rtol=0, atol=1e-12)


OPTIONS = {  # of classes of torch.optim, for all their state
    "ASGD": {"lr": 0.1, "t0": 2, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
# LBFGS is refused; Muon's row is in docs/test_optimizers.py; gradients are not sparse here.
NO_CLASS = {"Optimizer", "LBFGS", "Muon", "SparseAdam"}
CLASSES = [name for name in torch.optim.__all__ if name[0].isupper() and name not in NO_CLASS]


def equals_unsharded(name, options):
    """Parameters on all ranks; state_dict() on rank 0, elsewhere its groups alone."""
    optimizer_cls = getattr(torch.optim, name)
    mine = parameters(*SHAPES)
    plain = parameters(*SHAPES)
    sharded, unsharded = optimizers_of(optimizer_cls, grouped(mine), grouped(plain), **options)
    for steps in ([], range(4), range(4, 7)):  # Adagrad's state is there before the first step
        for optimizer, owned in ((sharded, mine), (unsharded, plain)):
            train(optimizer, owned[:-1], steps)  # the last one is not used
        assert_equal(mine, plain)
        state = sharded.state_dict()
        expected = unsharded.state_dict()
        if dist.get_rank() > 0:
            expected["state"] = {}
        assert_same_state(state, expected)
        for optimizer in (sharded, unsharded):
            optimizer.param_groups[0]["lr"] = 0.2


def test_every_class_of_torch(ranks):
    for name in CLASSES:
        ranks(3).run(equals_unsharded, name, OPTIONS.get(name, {}))


def shares_the_state_out_evenly():
    """Also where parameters are of unequal size."""
    world_size = dist.get_world_size()
    model = LanguageModel(64, 256, 6, 4, 500)
    optimizer = ShardedOptimizer(model.parameters(), ADAM)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert max(optimizer.loads) <= 1.05 / world_size * whole
    with CommDebugMode() as counter:
        optimizer.step()
    assert counter.get_total_counts() == world_size  # for 40 parameters


def follows_its_groups():
    """Rates that a scheduler sets after loading, and those of a group that was added after it."""
    mine = parameters(*SHAPES)
    plain = parameters(*SHAPES)
    sharded, unsharded = optimizers_of(ADAM, mine[:4], plain[:4], lr=0.1)
    for optimizer, owned in ((sharded, mine), (unsharded, plain)):
        train(optimizer, owned, [0])
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.2
        train(optimizer, owned, [1])
        optimizer.add_param_group({"params": owned[4:], "lr": 0.3})
        for group in optimizer.param_groups:
            group["lr"] /= 2
        train(optimizer, owned, [2])
    assert_equal(mine, plain)


def says_what_is_wrong():
    with pytest.raises(ValueError):
        ShardedOptimizer(parameters((3,)), torch.optim.LBFGS)
    model = nn.Linear(3, 4).double()
    optimizer = ShardedOptimizer(model.parameters(), ADAM)
    shards = ZeRO2(nn.Linear(3, 4)).shards
    with pytest.raises(ValueError, match="split already"):
        optimizer.add_param_group({"params": shards})
    model.float()
    with pytest.raises(RuntimeError):
        optimizer.step()


def continue_training(saved, steps):
    """Load on rank 0 what another world size saved; train on; weights and state as bytes."""
    mine = parameters(*SHAPES)
    # The right learning rate travels with the state.
    options = OPTIONS["AdamW"] | ({"lr": 9.0} if saved else {})
    optimizer = ShardedOptimizer(grouped(mine), torch.optim.AdamW, **options)
    if saved:
        weights, state = torch.load(io.BytesIO(saved))
        for parameter, weight in zip(mine, weights, strict=True):
            parameter.detach().copy_(weight)
        optimizer.load_state_dict(state if dist.get_rank() == 0 else None)
        assert {optimizer.owners[each] for each in optimizer.state} <= {optimizer.rank}
    train(optimizer, mine, steps)
    file = io.BytesIO()
    torch.save(([parameter.detach() for parameter in mine], optimizer.state_dict()), file)
    return file.getvalue()


def test_state_dict_goes_from_2_to_3_to_1_ranks(ranks):
    saved = None
    plain = parameters(*SHAPES)
    unsharded = torch.optim.AdamW(grouped(plain), **OPTIONS["AdamW"])
    for world_size, steps in ((2, range(0, 3)), (3, range(3, 6)), (1, range(6, 8))):
        saved = ranks(world_size).run(continue_training, saved, steps)[0]
        train(unsharded, plain, steps)
        weights, state = torch.load(io.BytesIO(saved))
        torch.testing.assert_close(weights, [p.detach() for p in plain], rtol=0, atol=1e-12)
        assert_same_state(state, unsharded.state_dict())


def works_in_a_group_of_two_ranks():
    group = dist.new_group([2, 1])
    mine, plain = parameters(*SHAPES), parameters(*SHAPES)
    if dist.get_rank() > 0:
        optimizer = ShardedOptimizer(mine, ADAM, process_group=group)
        train(optimizer, mine, range(3))
        train(ADAM(plain), plain, range(3))
        torch.testing.assert_close(mine, plain, rtol=0, atol=0)
        saved = len(mine) if dist.get_rank(group) == 0 else 0
        assert len(optimizer.state_dict()["state"]) == saved
    dist.barrier()


PROMISES = [
    shares_the_state_out_evenly,
    follows_its_groups,
    says_what_is_wrong,
    works_in_a_group_of_two_ranks,
]


@pytest.mark.parametrize("promise", PROMISES)
def test_promise(ranks, promise):
    ranks(3).run(promise)


def test_script(forked, tmp_path):
    """On a small MNIST, with a class of mistakes.py: it verifies, measures and writes files."""
    testing.write_mnist(tmp_path / "data", 700, 10)  # the last batch is not full
    mine = f"{testing.ROOT}/tools/check/mistakes.py:RightShards"
    words = [*testing.ONE_STEP, "--data", "data", "--mine", mine]
    words += "--json json --trace trace".split()
    status, output = forked(2, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    result = testing.read_json(tmp_path / "json", "06_sharded_optimizer")
    found = {name: one["max_abs_diff"] for name, one in result["verify"].items()}
    assert list(found) == ["ShardedOptimizer", "RightShards (mine)"]
    assert max(found.values()) <= 1e-10
    whole = 4 * result["model"]["parameters"]
    memory = {row["name"]: row for row in result["memory"]}
    for name, most in (("torch DDP", 2.001), ("ShardedOptimizer", 1.05)):
        state = [of_rank["state"] for of_rank in memory[name]["held_bytes"]]
        assert 2 * whole <= sum(state) and max(state) <= most * whole
    if sys.platform == "linux":
        sent = {name: row["sent_bytes"] / whole for name, row in memory.items()}
        assert 0.95 < sent["torch DDP"] < 1.2 and 1.4 < sent["ShardedOptimizer"] < 1.7, sent
    assert "RightShards (mine)" in output
    assert "traceEvents" in (tmp_path / "trace.rank0").read_text()
