"""`make check` in a course's repository: adapters, packages, layers of its own."""

import re

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
    "course_systems/averages.py": AVERAGES,
    "course_systems/ddp.py": DDP,
    "course_systems/fsdp.py": FSDP,
    "course_systems/mistakes.py": CHECK.with_name("mistakes.py").read_text(),
}


def lay_out(folder, files: dict) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_all_that_is_written_is_checked_and_what_is_not_is_listed(forked, tmp_path):
    lay_out(tmp_path, FILES)
    words = tmp_path / "tests/adapters.py", "--layers", "a_course.model"
    status, output = forked(None, CHECK, *words)
    _, *parts = re.split(r"\n\S+adapters\.py:(\w+), as .*\n", output)
    failed = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        failed[name] = re.findall("^FAILED +(.*)", text, re.MULTILINE)
        assert ("not written yet" in text) == (name == "get_ddp_bucketed")
    in_ddp = ["all ranks start with the buffers of rank 0"]
    assert status == 1, output
    assert failed.pop("get_ddp") == in_ddp
    assert failed == {"get_sharded_optimizer": [], "get_fsdp": [], "get_ddp_bucketed": []}


def test_own_layers_that_nobody_names(forked, tmp_path):
    """An FSDP that splits only them is not tried, and is told what to say; it does not pass."""
    lay_out(tmp_path, FILES)
    status, output = forked(None, CHECK, f"{tmp_path}/tests/adapters.py:get_fsdp")
    assert status == 1 and "has to hold: 6 of 7 passed" in output, output
    assert re.search(r"^not tried  between steps.*\n.*\n? .*LAYERS=", output, re.MULTILINE), output
    before_beyond = output.partition("Beyond")[0]
    assert "FAILED" not in before_beyond, output


def test_the_level_of_a_course(forked, tmp_path):
    """What fails beyond it does not count."""
    lay_out(tmp_path, FILES)
    mine = f"{tmp_path}/tests/adapters.py:get_ddp"
    status, output = forked(None, CHECK, mine, "--level", "course", "--layers", "a_course.model")
    assert status == 0 and "has to hold: 5 of 5 passed" in output, output
