"""Every script on a GPU: with one for each rank over nccl, else over gloo, which can share one."""

import json
import sys

import pytest
import torch

from tools.testing import QUICK, ROOT, torchrun

pytestmark = pytest.mark.cuda
LADDER = ["02_naive_ddp/naive_ddp", "03_flat_ddp/flat_ddp", "04_overlap_ddp/overlap_ddp"]
LADDER += ["05_bucketed/bucketed", "05_bucketed/predict/predict"]
SHORT = dict.fromkeys([*LADDER, "05_bucketed/bucket_sweep/bucket_sweep"], QUICK) | {
    "06_sharded_optimizer/sharded_optimizer": ["--steps", "1"],
    "06_sharded_optimizer/fsdp/fsdp": ["--steps", "1"],
    "07_resnet_ddp/resnet_ddp": "--epochs 1 --steps-per-epoch 3 --results .".split(),
    "07_resnet_ddp/sweep/sweep": "--model squeezenet1_1 --image-size 32 --steps 3".split(),
    "07_resnet_ddp/compile_ddp/compile_ddp": ["--model", "toy"],
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SHORT)
def test_by_torchrun(script, tmp_path, name, world_size):
    words = [*SHORT[name], "--device", "cuda"]
    if "--results" not in words:
        words += ["--json", "run.json"]
    path = ROOT / f"{name}.py"
    command = torchrun(world_size, path, *words)
    status, output = script(command, cwd=tmp_path).wait(300)
    assert status == 0 and "FAILED" not in output, output
    [file] = tmp_path.glob("*.json")
    gpu_per_rank = torch.cuda.device_count() >= world_size
    assert json.loads(file.read_text())["backend"] == ("nccl" if gpu_per_rank else "gloo")


@pytest.mark.parametrize(
    "name, words, expected",
    [
        ("01_allreduce/allreduce", "--nproc 1 --backends gloo,nccl --sizes-mb 1 --no-plot", "nccl"),
        ("08_ddp_rpc/ddp_rpc", "--device cuda --steps 20", "verify: passed"),
    ],
)
def test_by_itself(script, name, words, expected):
    status, output = script([sys.executable, ROOT / f"{name}.py", *words.split()]).wait(300)
    assert status == 0 and expected in output, output
