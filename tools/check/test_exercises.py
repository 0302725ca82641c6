"""The exercises, as they are and filled with the stages' lines; what pages show whole is right."""

import copy
import importlib
import inspect
import re
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from users_class import import_file

from common.setup import ROOT
from tools.check.adapters import not_written
from tools.check.check import KINDS
from tools.check.findings import judge
from tools.check.models import layout_for
from tools.testing import failed, judged

EXERCISES = [
    ("02_naive_ddp", "NaiveDDP", "wrapper"),
    ("03_flat_ddp", "FlatDDP", "wrapper"),
    ("04_overlap_ddp", "OverlapDDP", "wrapper"),
    ("05_bucketed", "BucketedDDP", "wrapper"),
    ("06_sharded_optimizer", "ShardedOptimizer", "optimizer"),
]


def judge_filled(folder: str, name: str, checks: list) -> list[tuple]:
    """On a rank: the stage's class, with those of its methods that the exercise has."""
    stage = ROOT / folder
    sys.path[:0] = [str(stage), str(stage.parent)]
    lesson = getattr(importlib.import_module(stage.name.lstrip("0123456789_")), name)
    exercise = getattr(import_file(str(stage / "exercise.py")), name)
    missing = not_written(exercise)
    assert f"{name}.step" in missing or f"{name}.finish_gradient_synchronization" in missing
    methods = {key: each for key, each in vars(exercise).items() if inspect.isfunction(each)}
    for key, method in list(methods.items()):
        if key == "__init__" or method.__qualname__ in missing:
            del methods[key]
    filled = type(name, (lesson,), methods)
    return [judge(check, filled) for check in checks]


@pytest.mark.parametrize("folder, name, kind", EXERCISES)
def test_an_exercise_filled_with_the_lesson_holds(late_ranks, folder, name, kind):
    for answers in late_ranks(2).run(judge_filled, folder, name, KINDS[kind].HAS_TO_HOLD):
        assert {answer.verdict for answer in answers} == {"passed"}, answers


def unshard(self):
    self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
    parts = list(self.unsharded.data.view(dist.get_world_size(), -1))
    dist.all_gather(parts, self.local_shard.data)


def reshard(self):
    self.unsharded.untyped_storage().resize_(0)


def before_forward(self, layer, inputs):
    self.unshard()
    layer.__dict__["weight"] = self.unsharded


def after_forward(self, layer, inputs, output):
    del layer.__dict__["weight"]
    self.reshard()


def before_backward(self, gradient):
    self.unshard()


def gradient_is_there(self, unsharded):
    mean = torch.zeros_like(self.local_shard)
    dist.reduce_scatter(mean, list(unsharded.grad.view(dist.get_world_size(), -1)))
    mean /= dist.get_world_size()
    gradient = self.local_shard.grad
    self.local_shard.grad = mean if gradient is None else gradient + mean
    unsharded.grad = None
    self.reshard()


def finish_gradient_synchronization(self):
    shards = {weight.local_shard for weight in self.weights}
    for parameter in self.module.parameters():
        if parameter.requires_grad and parameter not in shards:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    for weight in self.weights:
        weight.reshard()


def gather_full_params(self):
    whole = {}
    for weight in self.weights:
        weight.unshard()
        whole[weight.local_shard] = weight.unsharded.detach().clone()
        weight.reshard()
    named = self.module.named_parameters(remove_duplicate=False)
    return {name: whole.get(parameter, parameter) for name, parameter in named}


STEPS = [  # methods of the exercise's ShardedWeight, and in the last step of its FSDP
    [unshard, reshard, before_forward, after_forward],
    [before_backward],
    [gradient_is_there],
]
OF_FSDP = [finish_gradient_synchronization, gather_full_params]


def filled(cls: type, functions: list) -> type:
    """A class with these methods, too."""
    return type(cls.__name__, (cls,), {each.__name__: each for each in functions})


def judge_steps(written: int) -> list:
    """On a rank: FSDP's exercise with so many steps written; with the last all has to hold."""
    exercise = import_file(str(ROOT / "06_sharded_optimizer" / "fsdp" / "exercise.py"))
    weight, mine, checks = exercise.ShardedWeight, exercise.FSDP, KINDS["fsdp"].STEPS
    assert not_written(mine) == [f"FSDP.{each.__name__}" for each in OF_FSDP]
    for step in STEPS[:written]:
        weight = filled(weight, step)
    if written == len(STEPS):
        mine, checks = filled(mine, OF_FSDP), checks + KINDS["fsdp"].HAS_TO_HOLD
    with patch.object(exercise, "ShardedWeight", weight):
        return [judge(check, mine, layout_for("", is_sharded=True)) for check in checks]


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_fsdps_exercise_has_steps_with_checks_that_pass_alone(late_ranks, written):
    for answers in late_ranks(2).run(judge_steps, written):
        passed = [answer.verdict == "passed" for answer in answers]
        assert passed[:3] == [True] * written + [False] * (3 - written), answers
        assert all("NotImplementedError" in answer.seen for answer in answers[written:3]), answers
        # It has no dtype and no clip_grad_norm_(), and refuses a rest.
        assert {answer.verdict for answer in answers[3:]} <= {"passed", "not tried"}, answers


def reduce_scatter(self):
    gradient = torch.zeros_like(self.flat)
    if self.weight.grad is not None:
        gradient[: self.weight.numel()] = self.weight.grad.flatten()
    self.weight.grad = None
    mean = torch.zeros_like(self.shard)
    dist.reduce_scatter(mean, list(gradient.view(dist.get_world_size(), -1)))
    mean /= dist.get_world_size()
    self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean


def all_gather(self):
    dist.all_gather(list(self.flat.view(dist.get_world_size(), -1)), self.slice.clone())


def gather_and_call(self, *inputs, **kwargs):
    for each in self.slices:
        each.all_gather()
    return self.module(*inputs, **kwargs)


def reduce_all(self):
    for each in self.slices:
        each.reduce_scatter()


def gather_all(self):
    for each in self.slices:
        each.all_gather()
    return dict(self.module.named_parameters())


def judge_written_zero2() -> list:
    """On a rank: ZeRO2's exercise, written."""
    exercise = import_file(str(ROOT / "06_sharded_optimizer" / "zero2" / "exercise.py"))
    of_zero2 = {"forward": gather_and_call, "finish_gradient_synchronization": reduce_all}
    mine = type("ZeRO2", (exercise.ZeRO2,), {**of_zero2, "gather_full_params": gather_all})
    with patch.object(exercise, "Slice", filled(exercise.Slice, [reduce_scatter, all_gather])):
        return [judge(check, mine) for check in KINDS["zero2"].HAS_TO_HOLD]


def test_zero2s_exercise_can_be_written(late_ranks):
    for answers in late_ranks(3).run(judge_written_zero2):
        assert {answer.verdict for answer in answers} <= {"passed", "not tried"}, answers


def shown(folder: str, line: str) -> dict:
    """The names of a page's block of code that has this line, executed."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / folder / "README.md").read_text(), re.DOTALL
    )
    [block] = [block for block in blocks if line in block]
    names = {"torch": torch, "dist": dist, "nn": nn}
    exec(block, names)
    return names


def small_sharded(params, optimizer_cls, **options):
    small = shown("06_sharded_optimizer", "class SmallSharded")["SmallShardedOptimizer"]
    return small(params, optimizer_cls, **options)


def test_the_small_class_of_06s_page_holds(late_ranks):
    assert not failed(judged(late_ranks, small_sharded, KINDS["optimizer"].HAS_TO_HOLD))


def train_sharded_linear() -> float:
    """How far the weight of FSDP's page is from training in one process, after three steps."""
    torch.manual_seed(0)
    twin = nn.Linear(6, 4, bias=False).double()
    linear = copy.deepcopy(twin)
    shown("06_sharded_optimizer/fsdp", "def shard(linear")["shard"](linear)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (linear, twin)]
    for _ in range(3):
        x = torch.randn(2, 3, 6, dtype=torch.float64)
        linear(x[dist.get_rank()]).square().mean().backward()
        twin(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return (linear.weight - twin.weight.view(2, -1)[dist.get_rank()]).abs().max().item()


def test_the_sharded_linear_of_fsdps_page_trains_as_one_process(ranks):
    assert max(ranks(2).run(train_sharded_linear)) < 1e-12
