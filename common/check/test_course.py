"""`make check` in a course's repository: adapters, packages, layers of its own."""

import json
import os

import pytest

from common.testing.harness import ROOT

CHECK = ROOT / "common" / "check" / "check.py"
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
import torch.distributed as dist
from torch import nn
from .averages import average

class DDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.works = []
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, parameter):
        self.works.append(average(parameter))

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        while self.works:
            self.works.pop().wait()

class DDPBucketed(DDP):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module)
        self.missing = 0

    def launch(self, parameter):
        self.missing -= 1

    def start(self):
        self.missing = sum(each.requires_grad for each in self.module.parameters())

    def finish(self):
        assert self.missing == 0, "a batch has not been started"
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                average(parameter).wait()
"""
HELPER = """
import torch.distributed as dist

def average(parameter):
    parameter.grad /= dist.get_world_size()
    return dist.all_reduce(parameter.grad, async_op=True)
"""
OPTIMIZER = """
import torch
import torch.distributed as dist

class Sharded(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **options):
        self.count, self.own, self.make = 0, None, lambda groups: optimizer_cls(groups, **options)
        super().__init__(params, options)

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        numbered = enumerate(group["params"], self.count)
        mine = [p for n, p in numbered if n % dist.get_world_size() == dist.get_rank()]
        self.count += len(group["params"])
        group = {**group, "params": mine}
        if self.own is None:
            self.own = self.make([group])
        else:
            self.own.add_param_group(group)

    def step(self, closure=None):
        for group, own in zip(self.param_groups, self.own.param_groups):
            own.update({**group, "params": own["params"]})
        self.own.step()
        everything = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in enumerate(everything):
            dist.broadcast(parameter.data, number % dist.get_world_size())
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
    ddp_model.finish()

def get_ddp_bucketed(module, bucket_size_mb):
    from course_systems.ddp import DDPBucketed
    return DDPBucketed(module, bucket_size_mb)

def ddp_bucketed_on_after_backward(ddp_model, optimizer):
    assert optimizer.param_groups
    ddp_model.finish()

def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):
    ddp_model.start()

def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    from course_systems.optimizer import Sharded
    return Sharded(params, optimizer_cls, **kwargs)

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
    "course_systems/optimizer.py": OPTIMIZER,
    "course_systems/fsdp.py": FSDP.replace("MASTER", "whole.dtype"),
}
WRONG = {
    "common.py": ("parameter.grad /=", "parameter.grad *=", "4 times the mean"),
    "course_systems/optimizer.py": ("self.own.step()", "pass", "has not changed at all"),
    "course_systems/fsdp.py": (") / dist.get_world_size()", ")", "2 times the mean"),
}


def lay_out(folder, files: dict) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def check(forked, folder, *words):
    json_file = folder / "check.json"
    status, output = forked(None, CHECK, *words, "--json", json_file, timeout=200)
    return status, output, json.loads(json_file.read_text()) if json_file.exists() else None


def test_all_that_is_written_is_checked_and_what_is_not_is_listed(forked, tmp_path):
    lay_out(tmp_path, FILES)
    status, output, result = check(forked, tmp_path, tmp_path / "tests/adapters.py")
    assert result["not_written"] == ["get_ddp"]
    failed = {}
    for each in result["checks"]:
        found = failed.setdefault(each["mine"].rpartition(":")[2], set())
        if each["verdict"] == "failed" and each["group"] in ("course", "data parallelism"):
            found.add(each["check"])
    missed = {"starts_with_the_buffers_of_rank_0", "keeps_one_order_on_any_branch"}
    assert failed.pop("get_ddp_individual_parameters") == missed, output
    assert failed.pop("get_ddp_bucketed") == {"starts_with_the_buffers_of_rank_0"}, output
    assert failed == {"get_sharded_optimizer": set(), "get_fsdp": set()}, output
    found = {each["check"]: each["verdict"] for each in result["checks"]}
    assert found["agrees_on_any_branch"] == "failed", output  # it gathers in order of use
    assert found["splits_uneven_sizes"] == "failed", output  # which decides nothing
    assert "models of the layers of a_course.model" in output
    assert status == 1


def test_the_level_of_a_course(forked, tmp_path):
    lay_out(tmp_path, FILES)
    mine = f"{tmp_path}/tests/adapters.py:get_ddp_individual_parameters"
    status, output, _ = check(forked, tmp_path, mine, "--level", "course")
    assert status == 0 and "What a course's tests ask: 8 of 8 passed" in output, output
    assert "What data parallelism means: 7 of 9 passed; not: all ranks start with the" in output


@pytest.mark.parametrize("file", WRONG)
def test_wrong_ones_are_named(forked, tmp_path, file):
    """With the element that differs, and how, in the JSON."""
    right, wrong, seen = WRONG[file]
    assert right in FILES[file]
    lay_out(tmp_path, {**FILES, file: FILES[file].replace(right, wrong)})
    name = {"common": "get_ddp_individual_parameters", "optimizer": "get_sharded_optimizer"}
    name = name.get(os.path.basename(file)[:-3], "get_fsdp")
    status, output, result = check(forked, tmp_path, f"{tmp_path}/tests/adapters.py:{name}")
    assert status == 1 and seen in " ".join(output.split()), output
    evidence = [each for one in result["checks"] for each in one["evidence"]]
    assert evidence and {"parameter", "rank", "seen", "expected", "ratio"} == set(evidence[0])


def test_masters_in_float32_are_judged_in_float32(forked, tmp_path):
    lay_out(tmp_path, {**FILES, "course_systems/fsdp.py": FSDP.replace("MASTER", "torch.float32")})
    status, output, _ = check(forked, tmp_path, f"{tmp_path}/tests/adapters.py:get_fsdp")
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
    found, output, _ = check(forked, tmp_path, mine, "--kind", "function")
    assert found == status and ("2 times the mean" in output) == (status == 1), output
    if not wrong:
        found, output, _ = check(forked, tmp_path, mine)
        assert found == 2 and "KIND=function" in output.splitlines()[-1], output


def test_layers_that_are_not_there_are_one_line(forked, tmp_path):
    lay_out(tmp_path, FILES)
    mine = f"{tmp_path}/tests/adapters.py:get_fsdp"
    for layers in ("no_such", "a_course"):
        status, output, _ = check(forked, tmp_path, mine, "--layers", layers)
        last = output.splitlines()[-1]
        assert status == 2 and "error: argument" in last and layers in last, output
