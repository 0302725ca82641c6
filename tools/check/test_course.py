"""`make check` in a course's repository: adapters, packages, layers of its own."""

import os
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

class Embedding(nn.Module):
    def __init__(self, rows, d_model, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, d_model, device=device, dtype=dtype))

    def forward(self, tokens):
        return self.weight[tokens]
"""
DDP = """
from .averages import average
from .mistakes import ForgetsBuffers

class DDP(ForgetsBuffers):
    def average(self, parameter):
        average(self.gradient_of(parameter))

class DDPBucketed(DDP):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module)
        self.started = False

    def start(self):
        self.started = True

    def finish_gradient_synchronization(self):
        assert self.started, "a batch has not been started"
        self.started = False
        super().finish_gradient_synchronization()
"""
HELPER = """
import torch.distributed as dist

def average(gradient):
    gradient /= dist.get_world_size()
    dist.all_reduce(gradient)
"""
FSDP = """
import torch
import torch.distributed as dist
from torch import nn
from a_course.model import Embedding, Linear

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(context, shard, dtype):
        context.dtype = shard.dtype
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.detach().contiguous())
        return torch.cat(parts).to(dtype or shard.dtype)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.to(context.dtype).contiguous() / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()].clone(), None

class FSDP(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.dtype = module, compute_dtype
        seen = {}
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
        for part in module.modules():
            if isinstance(part, (Linear, Embedding)):
                whole = part._parameters.pop("weight")
                assert len(whole) % dist.get_world_size() == 0, "rows must be divisible"
                if whole not in seen:
                    mine = whole.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
                    seen[whole] = nn.Parameter(mine.to(MASTER), whole.requires_grad)
                part.shard = seen[whole]
                part.register_forward_pre_hook(self.before)
                part.register_forward_hook(lambda part, *_: delattr(part, "weight"))

    def before(self, part, inputs):
        part.weight = Gather.apply(part.shard, self.dtype)
        return tuple(x.to(part.weight.dtype) if x.is_floating_point() else x for x in inputs)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and "shard" not in name and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def full(self):
        state = self.module.state_dict()
        full = {name: state[name] for name in state if not name.endswith("shard")}
        for name, part in self.module.named_modules():
            if hasattr(part, "shard"):
                full[f"{name}.weight".lstrip(".")] = Gather.apply(part.shard, None).detach()
        return full
"""
ADAPTERS = """
from __future__ import annotations
import common  # a helper of the course with a name of ours
assert common.average

def get_ddp_individual_parameters(module):
    from course_systems.ddp import DDP
    return DDP(module)

def ddp_individual_parameters_on_after_backward(ddp_model, optimizer):
    ddp_model.finish_gradient_synchronization()

def get_ddp_bucketed(module, bucket_size_mb):
    from course_systems.ddp import DDPBucketed
    return DDPBucketed(module, bucket_size_mb)

def ddp_bucketed_on_after_backward(ddp_model, optimizer):
    assert optimizer.param_groups
    ddp_model.finish_gradient_synchronization()

def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    ddp_model.start()

def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    from course_systems.mistakes import RightShards
    return RightShards(params, optimizer_cls, **kwargs)

def get_ddp(module):
    raise NotImplementedError

def get_fsdp(module, compute_dtype=None):
    from course_systems.fsdp import FSDP
    return FSDP(module, compute_dtype)

def fsdp_on_after_backward(fsdp_model, optimizer):
    fsdp_model.finish()

def fsdp_gather_full_params(fsdp_model):
    return fsdp_model.full()
"""
FILES = {
    "pyproject.toml": "",
    "tests/__init__.py": "",
    "tests/adapters.py": ADAPTERS,
    "a_course/__init__.py": "",
    "a_course/model.py": MODEL,
    "course_systems/__init__.py": "",
    "course_systems/averages.py": "from common import average",
    "common.py": HELPER,
    "course_systems/ddp.py": DDP,
    "course_systems/mistakes.py": CHECK.with_name("mistakes.py").read_text(),
    "course_systems/fsdp.py": FSDP.replace("MASTER", "whole.dtype"),
}
WRONG = {
    "common.py": ("gradient /=", "gradient *=", "4 times the mean"),
    "course_systems/mistakes.py": ("self.local.step()", "pass", "has not changed at all"),
    "course_systems/fsdp.py": (") / dist.get_world_size()", ")", "2 times the mean"),
}


def lay_out(folder, files: dict) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def check(forked, *words) -> tuple[int, str]:
    return forked(None, CHECK, *words, timeout=200)


def test_all_that_is_written_is_checked_and_what_is_not_is_listed(forked, tmp_path):
    lay_out(tmp_path, FILES)
    status, output = check(forked, tmp_path / "tests/adapters.py")
    assert status == 1 and "models of the layers of a_course.model" in output, output
    _, *parts = re.split(r"\n\S+adapters\.py:(\w+), as \w+\n", output)
    failed = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        failed[name] = re.findall("^FAILED +(.*)", text.partition("\nBeyond")[0], re.MULTILINE)
        assert ("not written yet" in text) == (name == "get_ddp")
    for name in ("get_ddp_individual_parameters", "get_ddp_bucketed"):
        assert failed.pop(name) == ["all ranks start with the buffers of rank 0"], output
    assert failed == {"get_sharded_optimizer": [], "get_fsdp": [], "get_ddp": []}, output


def test_the_level_of_a_course(forked, tmp_path):
    lay_out(tmp_path, FILES)
    mine = f"{tmp_path}/tests/adapters.py:get_ddp_individual_parameters"
    status, output = check(forked, mine, "--level", "course")
    assert status == 0 and "What a course's tests ask: 8 of 8 passed" in output, output
    assert "What data parallelism means: 9 of 10 passed" in output


@pytest.mark.parametrize("file", WRONG)
def test_wrong_ones_are_named(forked, tmp_path, file):
    right, wrong, seen = WRONG[file]
    assert right in FILES[file]
    lay_out(tmp_path, {**FILES, file: FILES[file].replace(right, wrong)})
    name = {"common": "get_ddp_individual_parameters", "mistakes": "get_sharded_optimizer"}
    name = name.get(os.path.basename(file)[:-3], "get_fsdp")
    status, output = check(forked, f"{tmp_path}/tests/adapters.py:{name}")
    assert status == 1 and seen in " ".join(output.split()), output


def test_masters_in_float32_are_judged_in_float32(forked, tmp_path):
    lay_out(tmp_path, {**FILES, "course_systems/fsdp.py": FSDP.replace("MASTER", "torch.float32")})
    status, output = check(forked, f"{tmp_path}/tests/adapters.py:get_fsdp")
    assert status == 0 and "judged in float32" in output, output


FUNCTION = """
import torch
import torch.distributed as dist

def average_gradients(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""


@pytest.mark.parametrize("wrong, status", [("", 0), ("parameter.grad /= dist.get_world_size()", 1)])
def test_a_function_that_averages(forked, tmp_path, wrong, status):
    (tmp_path / "hw5.py").write_text(FUNCTION.replace(wrong, "pass") if wrong else FUNCTION)
    mine = f"{tmp_path}/hw5.py:average_gradients"
    found, output = check(forked, mine, "--kind", "function")
    assert found == status and ("2 times the mean" in output) == (status == 1), output
    if not wrong:
        found, output = check(forked, mine)
        assert found == 2 and "KIND=function" in output.splitlines()[-1], output


def test_layers_that_are_not_there_are_one_line(forked, tmp_path):
    lay_out(tmp_path, FILES)
    mine = f"{tmp_path}/tests/adapters.py:get_fsdp"
    for layers in ("no_such", "a_course"):
        status, output = check(forked, mine, "--layers", layers)
        last = output.splitlines()[-1]
        assert status == 2 and "error: argument" in last and layers in last, output
