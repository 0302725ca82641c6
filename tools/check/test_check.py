"""The checks on classes that are right and wrong, and the command.

The same checks on the lessons' classes: tools/test_wrappers.py, and the tests of 06.
"""

import importlib
import os
import signal
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn as dist_nn
from fsdp import FSDP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from users_class import users_class
from zero2 import ZeRO2

from common.setup import ROOT
from tools import testing
from tools.check import (
    checks_of_fsdp,
    checks_of_losses,
    checks_of_optimizers,
    checks_of_wrappers,
    checks_of_zero2,
    mistakes,
)
from tools.check.findings import judge, verdict_of
from tools.testing import failed, judged

CHECK = ROOT / "tools" / "check" / "check.py"
PARAMETERS = "starts_with_the_parameters_of_rank_0"
BUFFERS = "starts_with_the_buffers_of_rank_0"
STRIDES = "averages_what_is_not_contiguous"
WEIGHTS = "leaves_weights_to_the_optimizer"
MEAN = "trains_with_sgd"
TIED = "trains_tied_and_frozen_weights"
ADDS_UP = "accumulates_without_no_sync"
REST = "steps_sizes_that_ranks_cannot_divide"
PARTS = "keeps_a_part_of_gradients_and_state"
CLIPS = "clips_by_the_norm_of_all"
DTYPE = "computes_in_another_dtype"
SAVES = "goes_on_from_its_state_dict"
BRANCHES = "keeps_one_order_on_any_branch"


def fully_sharded(module, compute_dtype=None):
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)


class StepsFrozen(mistakes.RightShards):
    """Gives all parameters gradients, so that weight decay moves frozen ones."""

    def step(self, closure=None):
        for parameter in self.every:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().step(closure)


class KeepsFirstOptions(mistakes.RightShards):
    """Does not look at its groups again: a scheduler changes them in vain."""

    def step(self, closure=None):
        self.local.step()
        self.send()


class HasOneGroup(mistakes.RightShards):
    def add_param_group(self, group):
        super().add_param_group({"params": group["params"]})


class ZeroesItsOwn(mistakes.RightShards):
    def zero_grad(self, set_to_none=True):
        self.local.zero_grad(set_to_none)


class KeepsCopies(FSDP):
    """Splits all weights, and keeps whole ones, too, where parameters() does not show them."""

    def __init__(self, module):
        copies = [parameter.detach().clone() for parameter in module.parameters()]
        super().__init__(module)
        self.copies = copies


class ClipsByItsShards(FSDP):
    def clip_grad_norm_(self, max_norm):
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)


class SplitsTiedWeightsTwice(mistakes.SplitsNothing):
    """Gives each layer a parameter of its own, and so two for a weight that two layers share."""

    def __init__(self, module):
        for layer in module.modules():
            for name, weight in layer.named_parameters(recurse=False):
                setattr(layer, name, nn.Parameter(weight.detach().clone(), weight.requires_grad))
        super().__init__(module)


class LeavesTheRest(mistakes.Right):
    """Averages as many numbers as all ranks can divide."""

    def average(self, parameter):
        gradient, ranks = self.gradient_of(parameter).view(-1), dist.get_world_size()
        part = gradient[: len(gradient) // ranks * ranks]
        dist.all_reduce(part)
        part /= ranks


class IgnoresDtype(mistakes.SplitsNothing):
    def __init__(self, module, compute_dtype=None):
        super().__init__(module)


class NeverGathers(ZeRO2):
    def gather(self):
        pass


class KeepsWholeGradients(ZeRO2):
    """Slices that are views keep all of what they were cut from."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for shard in self.shards:
            whole = shard.new_zeros(dist.get_world_size(), *shard.shape)
            shard.grad = whole[0].copy_(shard.grad)


@pytest.mark.parametrize(
    "module, mine, expected, means",
    [
        (checks_of_wrappers, mistakes.Right, None, ""),
        (checks_of_wrappers, mistakes.SumForMean, MEAN, "summed, not averaged"),
        (checks_of_wrappers, mistakes.NoBroadcast, PARAMETERS, "broadcast the parameters"),
        (checks_of_wrappers, mistakes.ForgetsBuffers, BUFFERS, "broadcast the buffers"),
        (checks_of_wrappers, mistakes.HookBeforeGradient, MEAN, "never reduced"),
        (checks_of_wrappers, mistakes.DoesNotWait, WEIGHTS, "not waited for"),
        (checks_of_wrappers, mistakes.BarrierForWait, WEIGHTS, "not waited for"),
        (checks_of_wrappers, mistakes.WaitsForTheLast, WEIGHTS, "not waited for"),
        (checks_of_wrappers, mistakes.DividesInFlight, "can_be_used", "see mistakes.py"),
        (checks_of_wrappers, mistakes.AveragesWeights, WEIGHTS, "weights, not gradients"),
        (checks_of_wrappers, mistakes.OrderOfArrival, BRANCHES, "call in different orders"),
        (checks_of_wrappers, mistakes.LeavesLastOut, MEAN, "never reduced"),
        (checks_of_wrappers, mistakes.TiedTwice, TIED, "divided twice"),
        (checks_of_wrappers, mistakes.FailsWhenFrozen, TIED, "see mistakes.py"),
        (checks_of_wrappers, mistakes.RoundsToFloat32, MEAN, "rounded to float32"),
        (checks_of_wrappers, mistakes.AveragesACopy, STRIDES, "a copy is reduced"),
        (checks_of_wrappers, mistakes.OverwritesAccumulated, ADDS_UP, "overwritten"),
        (checks_of_wrappers, mistakes.SwapsGradients, MEAN, "another order than they were taken"),
        (checks_of_zero2, NeverGathers, MEAN, "never gathered"),
        (checks_of_zero2, KeepsWholeGradients, PARTS, "slices of 1/N"),
        (checks_of_fsdp, ClipsByItsShards, CLIPS, "a rank's part"),
        (checks_of_fsdp, KeepsCopies, "keeps_a_part_of_the_weights", "not freed"),
        (checks_of_fsdp, SplitsTiedWeightsTwice, TIED, "a tied weight"),
        (checks_of_fsdp, LeavesTheRest, "trains_sizes_that_ranks_cannot_divide", ""),
        (checks_of_fsdp, IgnoresDtype, DTYPE, "not cast"),
        (checks_of_fsdp, mistakes.RoundsMaster, DTYPE, "already cast"),
        (checks_of_optimizers, mistakes.ForgetsOptions, "steps_like_adamw", "learning rate"),
        (checks_of_optimizers, mistakes.KeepsAllState, "shares_the_state_out", "steps all"),
        (checks_of_optimizers, StepsFrozen, "steps_like_adamw", "other gradients"),
        (checks_of_optimizers, KeepsFirstOptions, "keeps_groups_apart", "learning rate"),
        (checks_of_optimizers, HasOneGroup, "keeps_groups_apart", "other options"),
        (checks_of_optimizers, ZeroesItsOwn, "steps_like_adamw", "only the parameters"),
        (checks_of_optimizers, mistakes.SendsNothing, "steps_like_adamw", "do not reach"),
        (checks_of_optimizers, mistakes.SumsInStep, "says_who_averages", "summed, not averaged"),
        (checks_of_optimizers, mistakes.LosesTheRest, REST, "do not reach all ranks"),
        (checks_of_optimizers, mistakes.ForgetsState, SAVES, "moments begin at zero"),
        (checks_of_optimizers, mistakes.RightShards, None, ""),
        (checks_of_optimizers, ZeroRedundancyOptimizer, None, ""),
        (checks_of_fsdp, fully_sharded, None, ""),
    ],
)
def test_a_mistake_fails_the_check_that_sees_it(late_ranks, module, mine, expected, means):
    """What is right passes; a wrong wrapper passes all before it, too. SkipsUnused: the command."""
    names = [check.__name__ for check in module.HAS_TO_HOLD]
    last = names.index(expected) if expected else len(names) - 1
    first = 0 if module is checks_of_wrappers or not expected else last
    verdicts = judged(late_ranks, mine, module.HAS_TO_HOLD[first : last + 1])
    assert failed(verdicts) == {expected} - {None}, verdicts
    assert not expected or means in verdicts[expected].means, verdicts


def test_who_averages_in_16_bits_is_warned(late_ranks):
    check = checks_of_fsdp.computes_in_another_dtype
    [verdict] = judged(late_ranks, fully_sharded, [check]).values()
    assert verdict.verdict == "warning" and "averaged in" in verdict.seen, verdict


class Butterfly(mistakes.Right):
    """An all-reduce of its own, which is right for 2, 4, 8 … ranks."""

    def average(self, parameter):
        total, distance = self.gradient_of(parameter).contiguous(), 1
        rank, ranks = dist.get_rank(), dist.get_world_size()
        while distance < ranks:
            received = torch.empty_like(total)
            sent = dist.isend(total.clone(), (rank + distance) % ranks)
            dist.recv(received, (rank - distance) % ranks)
            sent.wait()
            total = total + received
            distance *= 2
        parameter.grad.copy_(total / ranks)


class ForgetsInNoSync(mistakes.Right):
    @contextmanager
    def no_sync(self):
        yield
        self.module.zero_grad()


class TakesTheSmallestDtype(mistakes.Right):
    def average(self, parameter):
        smallest = min((each.dtype for each in self.trained()), key=lambda dtype: dtype.itemsize)
        small = (self.gradient_of(parameter) / dist.get_world_size()).to(smallest)
        dist.all_reduce(small)
        parameter.grad.copy_(small)


class FirstBucketAlone(mistakes.Right):
    """Averages what fits into one bucket, of a size that has no usual name."""

    def __init__(self, module, capacity=25):
        super().__init__(module)
        self.size = capacity * 2**20

    def trained(self):
        bucket, size = [], 0
        for parameter in super().trained():
            size += parameter.nbytes
            if size <= self.size:
                bucket.append(parameter)
        return bucket


class FinishesAsFlush(mistakes.Right):
    finish_gradient_synchronization = None

    def reduce_gradients(self, bucket):
        raise AssertionError("it is not the finish")

    def flush(self):
        super().finish_gradient_synchronization()


@pytest.mark.parametrize(
    "mine, ranks, name, verdict, means",
    [
        (FinishesAsFlush, 2, MEAN, "failed", "nobody calls its finish"),
        (ForgetsInNoSync, 2, "accumulates_with_no_sync", "failed", "overwritten"),
        (TakesTheSmallestDtype, 2, "trains_several_dtypes", "failed", "rounded to float32"),
        (FirstBucketAlone, 2, BRANCHES, "failed", "never reduced"),
        (Butterfly, 2, MEAN, "passed", ""),
        (Butterfly, 3, MEAN, "failed", ""),
    ],
)
def test_what_courses_do_otherwise(late_ranks, mine, ranks, name, verdict, means):
    """What is right on two ranks only is seen on three."""
    [found] = judged(late_ranks, mine, [getattr(checks_of_wrappers, name)], ranks).values()
    assert found.verdict == verdict and means in found.means, found


def floats(n):
    return [torch.randn(n, 5) for _ in range(3)]


cross_entropy = nn.functional.cross_entropy
weights = torch.arange(1.0, 11.0)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, one, other, _):
        return cross_entropy(one @ other.T * self.temperature, torch.arange(len(one)))


def divided_by_all(outputs, targets, scale=2):
    """The weighted mean over the samples of all ranks."""
    of_samples = weights[targets]
    total = of_samples.sum()
    dist.all_reduce(total)
    losses = cross_entropy(outputs, targets, reduction="none")
    return scale * (losses * of_samples).sum() / total


def spread_of_all(outputs, targets):
    parts = dist_nn.all_gather(outputs)
    return torch.cat(parts).std()


LOSSES = [
    ("", cross_entropy, checks_of_losses.batch),
    ("", lambda o, t: divided_by_all(o, t, dist.get_world_size()), checks_of_losses.batch),
    ("", spread_of_all, checks_of_losses.batch),
    ("SUMMED", lambda o, t: divided_by_all(o, t, 1), checks_of_losses.batch),
    ("SUMMED", lambda o, t: cross_entropy(o, t, reduction="sum"), checks_of_losses.batch),
    ("UNEVEN", lambda o, t: cross_entropy(o, t, weight=weights), checks_of_losses.batch),
    ("UNEVEN", lambda o, t, m: ((o - t).square() * (m > 0)).sum() / (m > 0).sum(), floats),
    ("MEETS", lambda a, b, _: nn.functional.mse_loss(a, b).sqrt(), floats),
    ("MEETS", Contrast(), floats),
]


def judge_loss(number: int, store: str):
    """On a rank, which is alone afterwards, and so meets the others again."""
    _, *mine = LOSSES[number]
    answer = judge(checks_of_losses.is_the_mean_of_its_shares, mine)
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    return answer


@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_losses(late_ranks, tmp_path, number):
    """Also those that call other ranks themselves. Of one across samples parameters are named."""
    means, loss, _ = LOSSES[number]
    of_ranks = late_ranks(4).run(judge_loss, number, str(tmp_path / "store"))
    verdict = verdict_of(dict(enumerate(of_ranks)))
    assert verdict.verdict == ("failed" if means else "passed"), verdict
    assert verdict.means.startswith(getattr(checks_of_losses, means, "")), verdict
    assert ("temperature" in verdict.means) == isinstance(loss, Contrast)


PLAIN_FILE = """
import torch
from common import ANSWER

class Mine(torch.nn.Module):
    def __init__(self, module, bucket_bytes=25 * 2**20):
        super().__init__()
        self.size = bucket_bytes

    def sync_gradients(self):
        return ANSWER
"""


def test_one_loader_for_check_and_stages(monkeypatch, tmp_path):
    """Stems that Python and we have; names of finish and size. Packages: test_course.py."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "random.py").write_text(PLAIN_FILE)
    (tmp_path / "common.py").write_text("ANSWER = 'synchronized'")
    made = users_class(f"{tmp_path}/random.py:Mine", 0.5)(None)
    assert made.size == 2**19
    assert made.finish_gradient_synchronization() == "synchronized"
    assert hasattr(importlib.import_module("random"), "randbytes")  # Python's


ODD = f"""
import os, sys, time, warnings; RANK = int(os.environ["RANK"])
import torch
import torch.distributed as dist
sys.path.insert(0, {str(CHECK.parent)!r})
from mistakes import *

class Odd(SkipsUnused):
    def finish_gradient_synchronization(self):
        CODE
        super().finish_gradient_synchronization()

class Beside(Right):
    finish_gradient_synchronization = None

def average_gradients(model):
    assert RANK == dist.get_rank() and os.environ["MASTER_PORT"]
    Right.finish_gradient_synchronization(model)

def pair(one, other):
    return (one - other).square().mean()

def batch(n):
    return torch.randn(n, 3), torch.randn(n, 3)
"""
COMPUTES = "while dist.get_rank() == 1:" + 6 * "\n            time.sleep(0.05)"


@pytest.mark.parametrize(
    "name, code, status, said",
    [
        ("SendsNothing", "", 1, ["FAILED"]),
        ("pair --kind loss", "", 0, ["2 of 2 passed"]),
        ("Beside", "", 0, ["10 of 10 passed, 1 not tried"]),
        ("Odd", "assert dist.get_rank() != 1, 'no'", 1, ["rank 1: AssertionError: no"]),
        ("Odd", "os._exit(3)", 1, ["it ended with status 3"]),
        ("Odd", "while dist.get_rank() == 1: pass", 1, ["rank 1: hangs at odd.py:10"]),
        pytest.param("Odd", COMPUTES, 1, ["still computes after"], marks=pytest.mark.full),
        ("Odd", "warnings.warn('renamed'); print('mine')", 0, ["mine", "10 of 10", "warning"]),
    ],
)
def test_the_command(forked, tmp_path, name, code, status, said):
    """Classes that are wrong, fail, end or hang, which names rank and line.

    One that prints passes; what it fails beyond does not count. A finish may be a function.
    """
    (tmp_path / "odd.py").write_text(ODD.replace("CODE", code or "pass"))
    words = f"{tmp_path}/odd.py:{name} --seconds 3".split()
    found, output = forked(None, CHECK, *words)
    assert found == status and "renamed" not in output, output
    assert all(each in output for each in said), output


@pytest.mark.parametrize(
    "text, words, said",
    [
        ("X = 3", "odd.py:X", "odd.py"),
        ("def X(module, size): pass", "odd.py:X", "'size'"),
        ("", "missing.py:X", "missing.py"),
        ("def X(module): pass", "odd.py:X --layers missing", "'missing'"),
        ("def X(o, t): return o.sum() * 0 / 0", "odd.py:X --kind loss", "finite"),
    ],
)
def test_what_cannot_be_used_is_one_line(forked, tmp_path, text, words, said):
    (tmp_path / "odd.py").write_text(text)
    status, output = forked(None, CHECK, *f"{tmp_path}/{words}".split())
    last = output.splitlines()[-1]
    assert status == 2 and last.startswith("check.py: error: argument MINE: "), output
    assert said in last and "Traceback" not in output, output


@pytest.mark.full
def test_ctrl_c_leaves_nothing(script, tmp_path):
    (tmp_path / "odd.py").write_text(ODD.replace("CODE", "while True: pass"))
    run = script([sys.executable, CHECK, f"{tmp_path}/odd.py:Odd"])
    testing.wait_for_line(run, f"{tmp_path}/odd.py:Odd, as wrapper")
    os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    status, output = run.wait(45)  # fails if a process is left
    assert status != 0, output
