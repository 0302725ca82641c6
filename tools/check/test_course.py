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
        self.W = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.W.T
"""
DDP = """
from .mistakes import ForgetsBuffers

class DDP(ForgetsBuffers):
    started = False

    def start(self):
        self.started = True

    def average(self, parameter):
        assert self.started, "a batch has not been started"
        super().average(parameter)
"""
ADAPTERS = """
def get_ddp(module):
    from a_course.model import Linear
    from course_systems.ddp import DDP
    assert type(module.first) is type(module.last) is Linear
    return DDP(module)

def ddp_on_after_backward(ddp_model, optimizer):
    assert optimizer.param_groups
    ddp_model.finish_gradient_synchronization()

def ddp_on_train_batch_start(ddp_model, optimizer):
    ddp_model.start()

def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    from course_systems.mistakes import RightShards
    return RightShards(params, optimizer_cls, **kwargs)

def get_fsdp(module):
    from course_systems.fsdp import FSDP
    return FSDP(module)

def get_ddp_bucketed(module):
    raise NotImplementedError
"""
FSDP = """
import torch
import torch.distributed as dist
from a_course.model import Linear
from .mistakes import Right


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(context, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        ranks = dist.get_world_size()
        gradient = gradient.contiguous() / ranks
        dist.all_reduce(gradient)
        return gradient.chunk(ranks)[dist.get_rank()]


def fill(layer, inputs):
    layer.W = Whole.apply(layer.part)


def free(layer, *_):
    del layer.W


class FSDP(Right):
    def __init__(self, module):
        super().__init__(module)
        parts = {}
        for layer in [each for each in module.modules() if isinstance(each, Linear)]:
            weight = layer._parameters.pop("W")
            own = weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
            layer.part = parts.setdefault(weight, torch.nn.Parameter(own, weight.requires_grad))
            layer.register_forward_pre_hook(fill)
            layer.register_forward_hook(free)

    def trained(self):
        named = self.module.named_parameters()
        return [each for name, each in named if each.requires_grad and not name.endswith("part")]

    def gather_full_params(self):
        full = dict(self.module.named_parameters())
        for name, layer in self.module.named_modules():
            if isinstance(layer, Linear):
                full[f"{name}.W"] = Whole.apply(layer.part)
        return full
"""
FILES = {
    "pyproject.toml": "",
    "tests/adapters.py": ADAPTERS,
    "a_course/__init__.py": "",
    "a_course/model.py": MODEL,
    "course_systems/__init__.py": "",
    "course_systems/ddp.py": DDP,
    "course_systems/fsdp.py": FSDP,
    "course_systems/mistakes.py": CHECK.with_name("mistakes.py").read_text(),
}


@pytest.fixture
def adapters(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "tests/adapters.py"


def test_all_that_is_written_is_checked_and_what_is_not_is_listed(forked, adapters):
    """What fails beyond the level of a course does not count."""
    words = "--level", "course", "--layers", "a_course.model", "--nproc", 2
    status, output = forked(None, CHECK, adapters, *words)
    _, *parts = re.split(r"\n\S+adapters\.py:(\w+), as .*\n", output)
    failed = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        failed[name] = len(re.findall("^FAILED", text, re.MULTILINE))
        assert ("not written yet" in text) == (name == "get_ddp_bucketed")
    assert status == 0 and failed.pop("get_ddp") == 1 and "5 of 5 passed" in output, output
    assert failed == {"get_sharded_optimizer": 0, "get_fsdp": 0, "get_ddp_bucketed": 0}


def test_own_layers_that_nobody_names(forked, adapters):
    """An FSDP that splits only them is not tried, and is told what to say; it does not pass."""
    status, output = forked(None, CHECK, f"{adapters}:get_fsdp")
    assert status == 1 and "6 of 7 passed" in output, output
    assert re.search(r"^not tried .*\n.*\n? .*LAYERS=", output, re.MULTILINE), output
    assert "FAILED" not in output.partition("Beyond")[0], output
