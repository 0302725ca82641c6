"""What ZeRO2 promises, on real ranks: the same weights as stage 05's, slice by slice.

The network that is late leaves NaN in weights and gradients that nobody has waited for.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bucketed import BucketedDDP
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero2 import ZeRO2

from tools import testing
from tools.check import checks_of_zero2

SCRIPT = Path(__file__).with_name("zero2.py")


def test_passes_its_checks(late_ranks):
    """Slices of three ranks begin and end within weights."""
    checks = [*checks_of_zero2.HAS_TO_HOLD, *checks_of_zero2.BEYOND]
    verdicts = testing.judged(late_ranks, ZeRO2, checks, 3)
    assert {verdict.verdict for verdict in verdicts.values()} == {"passed"}, verdicts


class Net(nn.Module):
    """Tied and unused weights, odd sizes, channels_last, attention, a checkpoint, a layer twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.attention = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 6)
        self.twice = nn.Linear(6, 6)
        self.never = nn.Linear(5, 3)
        self.sometimes = nn.Linear(6, 6)
        self.register_buffer("offset", torch.ones(()))

    def block(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, tokens, branch=False):
        x = self.twice(self.embedding(tokens) + self.offset)
        x = x + self.conv(x.unsqueeze(1)).mean(1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.sometimes(x) if branch else x
        x = checkpoint(self.block, x, use_reentrant=False)
        return self.head(self.twice(x))


def tokens_of(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(11, (2, 5), generator=generator)


def compute_gradients(model, step):
    tokens = tokens_of(step)
    output = model(tokens, branch=(step + dist.get_rank()) % 2 == 0)
    F.cross_entropy(output.flatten(0, 1), tokens.flatten()).backward()
    model.finish_gradient_synchronization()


def twins(bucket_size_mb=0.001, dtype=torch.float64, build=Net, group=None):
    """A module in ZeRO2, and the same in stage 05's wrapper; an AdamW for each.

    The weights of both lie in memory alike: a matrix product of other addresses is rounded
    otherwise.
    """
    torch.manual_seed(dist.get_rank())
    modules = [ZeRO2(build().to(dtype), bucket_size_mb, group).module for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    for weight in [weight for module in modules for weight in module.parameters()]:
        del weight.is_sharded  # they are no longer
    pairs = []
    for wrapper, module in zip((ZeRO2, BucketedDDP), modules, strict=True):
        model = wrapper(module, bucket_size_mb, group)
        pairs.append((model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    return pairs


def assert_same_weights(model, other, tolerance=0.0):
    """In each bit if there is no tolerance."""
    model.gather()
    found, expected = model.module.state_dict(), other.module.state_dict()
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=tolerance)


def evaluate(model):
    with torch.no_grad():
        return model(tokens_of(0))


def trains_as_stage_05(tolerance, bucket_size_mb, dtype):
    """An evaluation after a step, or between the finish and a step, sees the weights of then."""
    pairs = twins(bucket_size_mb, dtype)
    for step in range(20):
        seen = []
        for model, optimizer in pairs:
            compute_gradients(model, step)
            seen += [evaluate(model)] if step % 5 == 0 else []
            optimizer.step()
            seen += [evaluate(model)] if step % 5 == 1 else []
            optimizer.zero_grad(set_to_none=step % 5 != 2)
            seen += [evaluate(model), evaluate(model)] if step % 5 == 3 else []
        half = len(seen) // 2
        torch.testing.assert_close(seen[:half], seen[half:], rtol=0, atol=tolerance)
    model, _ = pairs[0]
    other, _ = pairs[1]
    assert_same_weights(model, other, tolerance)


BUCKETS = [(0, torch.float64), (0.001, torch.float32), (None, torch.float64)]


@pytest.mark.parametrize("bucket_size_mb, dtype", BUCKETS)
def test_trains_as_stage_05_in_each_bit(late_ranks, bucket_size_mb, dtype):
    late_ranks(2).run(trains_as_stage_05, 0.0, bucket_size_mb, dtype)


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks_train_as_stage_05_within_rounding(late_ranks, world_size):
    """gloo's all-reduce adds in another order."""
    late_ranks(world_size).run(trains_as_stage_05, 1e-12, 0.001, torch.float64)


def overlaps():
    """Each layer waits for its own bucket alone; a bucket's gradients leave when they are there."""
    model = ZeRO2(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)]), 0)
    optimizer = torch.optim.SGD(model.shards, lr=0.1)
    gathers = []
    launched = []

    def note_gathers(*_):
        """Note how many buckets nobody has waited for yet."""
        gathers.append(sum(len(bucket.gathering) for bucket in model.buckets))

    for layer in model.module:
        layer.register_forward_hook(note_gathers)
        layer.register_full_backward_hook(lambda *_: launched.append(6 - len(model.waiting)))
    for _ in range(2):
        gathers.clear()
        launched.clear()
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert len(model.reducing) == 3 and len(model.waiting) == 0
        assert all(layer.weight.grad is None for layer in model.module)
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    assert gathers == [5, 4, 3, 2, 1, 0]
    assert sorted(launched) == launched and launched[0] <= 1 and launched[-1] >= 5


def refuses_wrong_use():
    [(model, _), _] = twins()
    for parameters in (model.parameters(), model.module.parameters()):
        assert all(parameter.requires_grad for parameter in parameters)
    loss = model(tokens_of(0)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()
    model.finish_gradient_synchronization()
    model.zero_grad()
    compute_gradients(model, 0)
    with pytest.raises(RuntimeError, match="no_sync"):
        model.no_sync()
    with pytest.raises(ValueError, match="only once"):
        ZeRO2(nn.Sequential(model))
    for change in (lambda net: net.up.requires_grad_(False), lambda net: net.float()):
        [(model, _), _] = twins()
        model(tokens_of(0)).sum().backward()
        change(model.module)
        with pytest.raises(RuntimeError, match="wrap again"):
            model.finish_gradient_synchronization()


def shards_are_named_and_shaped_as_their_weights():
    """So a recipe that decays by names, or what has two dimensions, decays the same."""
    (model, _), (other, _) = twins()
    expected = {name: parameter.ndim for name, parameter in other.named_parameters()}
    assert {name: shard.ndim for name, shard in model.named_parameters()} == expected


def refuses_optimizers_that_would_train_nothing():
    """Of the module before it was wrapped or after, of a part of it, and of an outer one."""
    module = Net().requires_grad_(True)
    module.never.requires_grad_(False)
    before = torch.optim.AdamW(module.parameters())
    model = ZeRO2(module)
    outer = nn.ModuleList([model, nn.Linear(2, 2)])
    wrong = module, module.up, outer
    for optimizer in [before, *[torch.optim.AdamW(each.parameters()) for each in wrong]]:
        with pytest.raises(RuntimeError, match="model.parameters()"):
            optimizer.step()
    for parameters in (model.parameters(), model.shards):  # with and without the frozen ones
        torch.optim.AdamW(parameters).step()


def clips_in_16_bits():
    """A norm of some hundreds, whose square float16 does not have."""
    for dtype in (torch.float16, torch.bfloat16):
        model = ZeRO2(nn.Linear(64, 8, bias=False).to(dtype))
        for shard in model.shards:
            shard.grad = torch.full_like(shard, 16.0)
        norm = model.clip_grad_norm_(1.0)
        assert norm.item() == pytest.approx(16 * (64 * 8) ** 0.5, rel=1e-2)
        left = sum(shard.grad.float().square().sum() for shard in model.shards)
        dist.all_reduce(left)
        assert left.item() == pytest.approx(1.0, rel=2e-2)


PROMISES = [
    overlaps,
    clips_in_16_bits,
    shards_are_named_and_shaped_as_their_weights,
    refuses_optimizers_that_would_train_nothing,
    refuses_wrong_use,
]


@pytest.mark.parametrize("promise", PROMISES)
def test_promise(ranks, promise):
    ranks(2).run(promise)


def trains_in_a_group():
    """Ranks 0 and 2 together, rank 1 alone."""
    groups = [dist.new_group(members) for members in ([0, 2], [1])]
    group = groups[dist.get_rank() % 2]
    pairs = twins(
        0.0001, group=group, build=lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    )
    for step in range(4):
        for model, optimizer in pairs:
            model(torch.full((2, 3), step + dist.get_rank()).double()).sum().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(pairs[0][0], pairs[1][0])


def test_a_group_of_some_ranks(ranks):
    ranks(3).run(trains_in_a_group)


def test_script(forked, tmp_path):
    """It trains as one process does; a rank holds whole weights, and 1/N of what is thrice that.

    Beside that it has three pairs of buffers for the largest weight, which is an embedding.
    """
    testing.write_mnist(tmp_path / "data", 700, 10)  # the last batch is not full
    words = [*testing.ONE_STEP, "--no-baseline", "--bucket-size-mb", "0.05"]
    words += "--data data --json json --trace trace".split()
    status, output = forked(2, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    result = testing.read_json(tmp_path / "json", "06_sharded_optimizer/zero2")
    assert result["verify"]["ZeRO2"]["max_abs_diff"] <= 1e-10
    memory = {row["name"]: row["held_bytes"] for row in result["memory"]}
    held = 4 * (result["model"]["parameters"] * (1 + 3 / 2) + 6 * 64 * 1000)
    assert 0.95 * held < max(sum(of_rank.values()) for of_rank in memory["ZeRO2"]) < 1.1 * held
