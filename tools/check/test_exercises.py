"""The exercises, as they are and filled with the stages' lines; what pages show whole is right."""

import copy
import importlib
import inspect
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from users_class import import_file

from common.setup import ROOT
from tools.check.adapters import not_written
from tools.check.check import KINDS
from tools.check.findings import judge
from tools.testing import failed, judged

EXERCISES = [
    ("02_naive_ddp", "NaiveDDP", "wrapper"),
    ("03_flat_ddp", "FlatDDP", "wrapper"),
    ("04_overlap_ddp", "OverlapDDP", "wrapper"),
    ("05_bucketed", "BucketedDDP", "wrapper"),
    ("06_sharded_optimizer", "ShardedOptimizer", "optimizer"),
    ("06_sharded_optimizer/fsdp", "FSDP", "fsdp"),
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
        assert not [answer for answer in answers if answer.verdict != "passed"], answers


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
