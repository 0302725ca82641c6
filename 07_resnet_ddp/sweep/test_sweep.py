"""sweep.py: the plan, a real sweep, the JSON, a model of one's own, topologies, flags."""

import inspect
import os
import socket
from pathlib import Path

import pytest
import sweep
import torch

from common import setup
from tools.testing import OVER, Forked, read_json

FOLDER = Path(__file__).resolve().parent

TINY = ["--model", "squeezenet1_1", "--batch-size", 2, "--image-size", 32]
RANKS = ["--rank", "0"], []  # the other has it of the environment
TINY += ["--warmup", 1, "--steps", 3, "--device", "cpu"]


def test_plan():
    assert sweep.plan(4, 2) == [
        ("no ddp", [0], False),
        ("1M/1G", [0], True),
        ("1M/2G", [0, 1], True),
        ("2M/2G", [0, 1, 2, 3], True),
    ]
    assert [label for label, _, _ in sweep.plan(3, 1)] == ["no ddp", "1M/1G", "2M/1G", "3M/1G"]


class Tiny:
    """A benchmark of one's own: a Linear of two classes, and its name."""

    model = "tiny"

    def __init__(self, device, distributed_backend, bucket_size):
        assert distributed_backend == "gloo" and bucket_size == 25
        self.device = device
        self.batch_size = 4

    def create_model(self):
        return torch.nn.Linear(3, 2).to(self.device)

    def generate_inputs(self):
        return [torch.rand(self.batch_size, 3)]

    def generate_target(self):
        return torch.zeros(self.batch_size, dtype=torch.long)


def measured(output):
    """The subsets in the table of an output."""
    lines = [line.split() for line in output.splitlines() if line.count("/s") == 4]
    return [words[1] for words in lines if words[0].isdigit()]


def test_two_models_on_a_slow_network(forked, tmp_path):
    words = "--model shufflenet_v2_x0_5 --json json".split()
    status, output = forked(
        2, OVER, "1gbit,100ms", FOLDER / "sweep.py", *TINY, *words, cwd=tmp_path
    )
    assert status == 0 and measured(output) == 2 * ["no", "1M/1G", "1M/2G"], output
    report = read_json(tmp_path / "json", "07_resnet_ddp/sweep")
    for benchmark, name in zip(report["benchmark_results"], TINY[1:2] + words[1:2], strict=True):
        # First without DDP; samples of all ranks together, without warm-up.
        found = [(entry["ranks"], len(entry["measurements"])) for entry in benchmark["result"]]
        assert benchmark["model"] == name and found == [([0], 3), ([0], 3), ([0, 1], 6)]
    *_, both = (min(entry["measurements"]) for entry in benchmark["result"])
    assert both > 0.4  # four delays, longer than a step takes here


def test_what_a_step_sends_and_computes():
    """Of a Linear of 3 to 2: eight floats; on 4 examples 4 * 3 * 2 products and sums, thrice."""
    cost = sweep.cost_of(Tiny("cpu", "gloo", 25))
    assert cost["megabytes"] * 1e6 == pytest.approx(8 * 4)
    assert cost["gflop"] * 1e9 == pytest.approx(3 * 2 * 4 * 3 * 2)
    assert cost["megabytes_per_gflop"] == pytest.approx(1e3 * 32 / 144)


def test_a_model_of_ones_own_without_torchrun(tmp_path):
    """By upstream's flags, each rank by itself, rank 1 by RANK; with the class's batch size."""
    source = inspect.getsource(Tiny)
    (tmp_path / "mine.py").write_text(f"import torch\n\n\n{source}")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = f"--world-size 2 --master-addr localhost --master-port {port} --json json".split()
    words += ["--model", "mine.py:Tiny", "--steps", "2", "--device", "cpu"]
    script = FOLDER / "sweep.py"
    ranks = [Forked(None, script, *rank, *words, cwd=tmp_path, RANK=1) for rank in RANKS]
    (status, output), other = (rank.wait() for rank in ranks)
    assert status == 0 and other == (0, ""), (output, other)
    assert measured(output) == ["no", "1M/1G", "1M/2G"], output
    [benchmark] = read_json(tmp_path / "json", "07_resnet_ddp/sweep")["benchmark_results"]
    assert benchmark["model"] == "tiny" and benchmark["batch_size"] == 4
    assert [len(entry["measurements"]) for entry in benchmark["result"]] == [2, 2, 4]


def test_hosts_with_different_topologies_are_not_compared(forked, tmp_path):
    """By a nvidia-smi that is a script, and says which rank has called it."""
    file = tmp_path / "nvidia-smi"
    file.write_text('#!/bin/sh\necho "$@: GPU0 of $RANK"\n')
    file.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    status, output = forked(2, FOLDER / "sweep.py", *TINY, PATH=path)
    assert status == 2 and "topo -m" in output and "rank 1's host" in output, output
    assert not measured(output), output


def test_upstreams_flags_are_understood(monkeypatch):
    parser = setup.Parser("")
    sweep.add_arguments(parser)
    line = "--bucket-size=9 --distributed-backend gloo --model resnet50 --json x "
    line += "--rank 9 --world-size=16 --master-addr HOST --master-port 29500"
    args = parser.parse_args(line.split())
    assert (args.bucket_size_mb, args.backend, args.model) == (9, "gloo", ["resnet50"])
    sweep.be_started_as_upstream(args)
    names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    assert [os.environ[name] for name in names] == ["9", "16", "HOST", "29500"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    sweep.be_started_as_upstream(args)
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "8")
