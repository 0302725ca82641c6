"""05/send_less: what each row promises, the clock, and the script from outside."""

from pathlib import Path
from unittest.mock import patch

import pytest
import send_less
import torch
import torch.distributed as dist
from bucketed import BucketedDDP
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tools import testing

SCRIPT = Path(__file__).with_name("send_less.py")


def small(seed: int = 0) -> nn.Module:
    """A model whose inputs are 6 numbers, and whose 7 outputs are logits; float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7)).double()


def batch_of(step: int) -> tuple:
    """This rank's batch, another one on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(7, (5,), generator=generator)


def flat_gradient(model: nn.Module, step: int) -> torch.Tensor:
    """The gradient after a backward, as the wrapper leaves it."""
    model.zero_grad()
    send_less.loss_of(model, batch_of(step)).backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def flat_weights(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def of_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def check_bfloat16():
    torchs = DistributedDataParallel(small())
    torchs.register_comm_hook(None, bf16_compress_hook)
    ours, exact = send_less.RoundedDDP(small()), BucketedDDP(small())
    for step in range(3):
        found, mean = flat_gradient(ours, step), flat_gradient(exact, step)
        assert not torch.equal(found, mean)
        torch.testing.assert_close(found, mean, rtol=0, atol=2**-7 * mean.abs().max().item())
        torch.testing.assert_close(found, flat_gradient(torchs, step))
        assert all(torch.equal(other, found) for other in of_all_ranks(found))


def check_diloco():
    """Against the paper's algorithm, written out with the weights of all ranks."""
    model = send_less.DiLoCo(small(dist.get_rank()), lr=0.7, momentum=0.9)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
    shared = flat_weights(small())
    velocity = torch.zeros_like(shared)
    for turn in range(3):
        send_less.train(model.module, optimizer, [batch_of(4 * turn + i) for i in range(4)])
        local = of_all_ranks(flat_weights(model.module))
        assert not torch.equal(*local)
        change = shared - sum(local) / len(local)
        velocity = 0.9 * velocity + change
        shared = shared - 0.7 * (change + 0.9 * velocity)
        model.average()
        averaged = of_all_ranks(flat_weights(model.module))
        assert torch.equal(*averaged)
        torch.testing.assert_close(averaged[0], shared)


def check_buffers_and_dtypes():
    """BatchNorm's statistics become their mean, its counter stays, and weights stay in bfloat16."""
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(6, 8).bfloat16(), nn.BatchNorm1d(8))
    model = send_less.DiLoCo(module)
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    linear, norm = module
    nn.init.constant_(norm.running_mean, rank)
    nn.init.constant_(norm.running_var, 2 + rank)
    norm.num_batches_tracked.fill_(rank)
    nn.init.constant_(linear.weight, rank)
    model.average()
    assert {name: tensor.dtype for name, tensor in module.state_dict().items()} == dtypes
    assert norm.running_mean.unique().tolist() == [0.5]
    assert norm.running_var.unique().tolist() == [2.5]
    assert norm.num_batches_tracked.item() == rank
    assert torch.equal(*of_all_ranks(linear.weight.detach()))


def check_what_rows_send():
    """The calls of a turn as counted, and the bytes of what is sent."""
    for row in send_less.ROWS.values():
        module = small().float()
        model = row.wrap(module)
        optimizer = torch.optim.SGD(module.parameters())
        inputs, targets = batch_of(0)
        turn = [(inputs.float(), targets)] * row.batches
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            send_less.train(model, optimizer, turn)
        assert all_reduce.call_count == row.calls
        sent = []
        if isinstance(model, BucketedDDP):
            sent = [getattr(bucket, "rounded", bucket.flat) for bucket in model.buckets]
        elif isinstance(model, send_less.DiLoCo):
            sent = [model.flat()]
        weights = len(flat_weights(module))
        assert [tensor.nbytes for tensor in sent] == [weights * row.bytes_of_a_weight] * len(sent)
        assert bool(sent) == (row.bytes_of_a_weight > 0)


CHECKS = [check_bfloat16, check_diloco, check_buffers_and_dtypes, check_what_rows_send]


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_ranks(ranks, check):
    ranks(2).run(check)


def test_held_out_text_is_held_out():
    text, held_out = (bytes(part.tolist()) for part in send_less.read_text())
    pieces = [held_out[at : at + 2000] for at in range(0, len(held_out) - 2000, 2000)]
    assert len(pieces) > 50 and not any(piece in text for piece in pieces)
    assert len(text) > 5 * len(held_out)


def check_clock():
    """Two calls on 4 ranks take 6 steps of two delays each, and 6/4 of a second's bytes."""
    found = {"calls": 2, "bytes": 12_500_000}
    seconds = send_less.seconds_of_a_batch(found, rate=12.5e6, delay=0.001)
    assert seconds == pytest.approx(0.06 + 0.024 + 1.5)


def test_clock(ranks):
    ranks(4).run(check_clock)


IN_SHORT = f"""
import sys
sys.path.append({str(SCRIPT.parent)!r})
import send_less
send_less.MODEL.update(d_model=64, d_ff=128, layers=1)
send_less.main()
"""
PARTS = {"alone": 0, "every step": 1, "bfloat16": 1 / 2, "local SGD": 1 / 20, "DiLoCo": 1 / 50}


def test_run(forked, tmp_path):
    """Every row has trained, with each seed; what it sends is said as part of all gradients."""
    (tmp_path / "short.py").write_text(IN_SHORT)
    words = "--seconds 2 --seeds 2 --json json --plot png".split()
    status, output = forked(2, tmp_path / "short.py", *words, cwd=tmp_path)
    assert status == 0, output
    testing.assert_png(tmp_path / "png")
    races = testing.read_json(tmp_path / "json", "05_bucketed/send_less")["races"]
    for race in races:
        every_step = race["every step"]["bytes"]
        assert every_step > 0
        parts = {name: found["bytes"] / every_step for name, found in race.items()}
        assert parts == pytest.approx(PARTS)
        assert all(found["losses"][-1] < 5.5 for found in race.values())  # ln 256 is 5.55
    assert races[0]["alone"]["losses"] != races[1]["alone"]["losses"]
