"""sweep.py: the plan, a real sweep, the JSON, bad input; sweep_diff.py."""

import argparse
import json
import sys
from pathlib import Path

import torch

from common import setup
from tools.testing import OVER, read_json

FOLDER = Path(__file__).resolve().parent
import sweep
import sweep_diff

TINY = ["--model", "squeezenet1_1", "--batch-size", 2, "--image-size", 32]
TINY += ["--warmup", 1, "--steps", 3, "--device", "cpu"]


def test_plan():
    assert sweep.plan(4, 2) == [
        ("no ddp", [0], False),
        ("1M/1G", [0], True),
        ("1M/2G", [0, 1], True),
        ("2M/2G", [0, 1, 2, 3], True),
    ]
    assert [label for label, _, _ in sweep.plan(3, 1)] == ["no ddp", "1M/1G", "2M/1G", "3M/1G"]


def first_weights(members, use_ddp):
    """measure_subset, with a first weight of each rank's model in place of the times."""
    sweep.train = lambda args, model, device: [next(model.parameters()).item()]
    sweep.new_model = lambda name, device: torch.nn.Linear(1, 1)
    args = argparse.Namespace(bucket_size_mb=25)
    return sweep.measure_subset(args, "", None, members, use_ddp, {"backend": "gloo"})


def test_only_a_subset_trains_and_with_ddp_its_models_are_one(ranks):
    for use_ddp in (True, False):
        for one, other in ranks(2).run(first_weights, [0, 1], use_ddp):
            assert (one == other) == use_ddp
    assert [len(found) for found in ranks(2).run(first_weights, [0], True)] == [1, 1]


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


def test_upstreams_flags_are_understood():
    parser = setup.Parser("")
    sweep.add_arguments(parser)
    line = "--bucket_size=9 --distributed_backend gloo --model resnet50"
    args = parser.parse_args(line.split())
    assert (args.bucket_size_mb, args.backend, args.model) == (9, "gloo", ["resnet50"])


def write(path, bucket_size, times):
    """A result file by hand; times: {number of ranks: seconds}."""
    entries = [{"ranks": [0], "measurements": [0.1] * 10}]
    for ranks, seconds in times.items():
        entries.append({"ranks": list(range(ranks)), "measurements": [seconds] * 10})
    result = dict.fromkeys(["pytorch_version", "cuda_version", "distributed_backend"])
    benchmark = {"model": "resnet18", "batch_size": 8, "result": entries}
    written = result | {"bucket_size": bucket_size, "benchmark_results": [benchmark]}
    path.write_text(json.dumps(written))
    return path


def test_diff(tmp_path, monkeypatch, capsys):
    """Equal, faster and slower; and what only one of them has."""
    baseline = write(tmp_path / "a", 25, {1: 0.1, 2: 0.2, 4: 1.0})
    other = write(tmp_path / "b", 9, {1: 0.05, 2: 0.25})
    monkeypatch.setattr(sys, "argv", ["sweep_diff.py", str(baseline), str(other)])
    sweep_diff.main()
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for row in (
        "bucket_size 25 9",
        "resnet18 8 no ddp 0.1000s 80.0/s +0.0% 0.1000s 80.0/s +0.0%",
        "resnet18 8 1 ranks 0.0500s 160.0/s +50.0% 0.0500s 160.0/s +50.0%",
        "resnet18 8 2 ranks 0.2500s 32.0/s -25.0% 0.2500s 32.0/s -25.0%",
        "only in the baseline: resnet18 8 4 ranks",
    ):
        assert row in rows, rows
