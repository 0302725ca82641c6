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

def get_ddp_bucketed(module):
    raise NotImplementedError
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
    in_ddp = ["all ranks start with the buffers of rank 0"]
    assert status == 1, output
    assert failed == {"get_ddp": in_ddp, "get_sharded_optimizer": [], "get_ddp_bucketed": []}


def test_the_level_of_a_course(forked, tmp_path):
    """What fails beyond it does not count."""
    lay_out(tmp_path, FILES)
    mine = f"{tmp_path}/tests/adapters.py:get_ddp"
    status, output = forked(None, CHECK, mine, "--level", "course", "--layers", "a_course.model")
    assert status == 0 and "has to hold: 5 of 5 passed" in output, output
