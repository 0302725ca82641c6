"""`make check` in a course's repository: adapters, packages, layers of its own."""

import re

import pytest

from common.setup import ROOT

CHECK = ROOT / "tools" / "check" / "check.py"
MODEL = """
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self, d_in, d_out, device=None, dtype=None):
        super().__init__()
        weight = torch.randn(d_out, d_in, device=device, dtype=dtype) / d_in**0.5
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight.T
"""
DDP = """
from .averages import average
from .mistakes import ForgetsBuffers

class DDP(ForgetsBuffers):
    started = False

    def start(self):
        self.started = True

    def average(self, parameter):
        assert self.started, "a batch has not been started"
        average(self.gradient_of(parameter))
"""
AVERAGES = """
import torch.distributed as dist

def average(gradient):
    gradient /= dist.get_world_size()
    dist.all_reduce(gradient)
"""
FSDP = """
import torch
import torch.distributed as dist
from torch import nn
from a_course.model import Linear

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(context, shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.detach())
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous() / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()].clone()

class FSDP(nn.Module):
    \"""Splits the course's layers, and keeps float32.\"""
    def __init__(self, module):
        super().__init__()
        self.module, shards = module, {}
        for part in [part for part in module.modules() if isinstance(part, Linear)]:
            whole = part._parameters.pop("weight")
            if whole not in shards:
                mine = whole.detach().float().chunk(dist.get_world_size())[dist.get_rank()].clone()
                shards[whole] = nn.Parameter(mine, whole.requires_grad)
            part.shard = shards[whole]
            part.register_forward_pre_hook(self.before)

    def before(self, part, inputs):
        part.weight = Gather.apply(part.shard)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and "shard" not in name:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def full(self):
        full = dict(self.module.named_parameters())
        for name, part in self.module.named_modules():
            if hasattr(part, "shard"):
                full[f"{name}.weight"] = Gather.apply(part.shard)
        return full
"""
ADAPTERS = """
def get_ddp(module):
    from course_systems.ddp import DDP
    return DDP(module)

def ddp_on_after_backward(ddp_model, optimizer):
    assert optimizer.param_groups
    ddp_model.finish_gradient_synchronization()

def ddp_on_train_batch_start(ddp_model, optimizer):
    ddp_model.start()

def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    from course_systems.mistakes import RightShards
    return RightShards(params, optimizer_cls, **kwargs)

def get_ddp_bucketed(module):
    raise NotImplementedError

def get_fsdp(module, compute_dtype=None):
    from course_systems.fsdp import FSDP
    return FSDP(module)

def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish()

def fsdp_gather_full_params(fsdp_model):
    return fsdp_model.full()
"""
FILES = {
    "pyproject.toml": "",
    "tests/adapters.py": ADAPTERS,
    "a_course/__init__.py": "",
    "a_course/model.py": MODEL,
    "course_systems/__init__.py": "",
    "course_systems/averages.py": AVERAGES,
    "course_systems/ddp.py": DDP,
    "course_systems/mistakes.py": CHECK.with_name("mistakes.py").read_text(),
    "course_systems/fsdp.py": FSDP,
}


def lay_out(folder, files: dict) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_all_that_is_written_is_checked_and_what_is_not_is_listed(forked, tmp_path):
    lay_out(tmp_path, FILES)
    words = tmp_path / "tests/adapters.py", "--layers", "a_course.model"
    status, output = forked(None, CHECK, *words)
    _, *parts = re.split(r"\n\S+adapters\.py:(\w+), as \w+\n", output)
    failed = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        failed[name] = re.findall("^FAILED +(.*)", text, re.MULTILINE)
        assert ("not written yet" in text) == (name == "get_ddp_bucketed")
    in_bfloat16 = "compute_dtype=torch.bfloat16 computes in it, and keeps float32 weights and"
    assert status == 1 and failed == {
        "get_ddp": ["all ranks start with the buffers of rank 0"],
        "get_sharded_optimizer": [],
        "get_ddp_bucketed": [],
        "get_fsdp": [in_bfloat16],
    }, output


@pytest.mark.parametrize("right, status", [("gradient /=", 0), ("gradient *=", 1)])
def test_the_level_of_a_course(forked, tmp_path, right, status):
    lay_out(tmp_path, FILES)
    lay_out(tmp_path, {"course_systems/averages.py": AVERAGES.replace("gradient /=", right)})
    mine = f"{tmp_path}/tests/adapters.py:get_ddp"
    found, output = forked(None, CHECK, mine, "--level", "course")
    assert found == status, output
    assert ("has to hold: 5 of 5 passed" if status == 0 else "not the mean") in output, output
