"""compile_ddp.py: gradients, shards of FSDP, graphs, memory, real runs, bad input."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from common import setup
from tools.testing import OVER, read_json

SCRIPT = Path(__file__).resolve().with_name("compile_ddp.py")
import compile_ddp
import compile_models
from compile_ddp import Configuration

CPU = torch.device("cpu")
TOY = ["--model", "toy", "--steps", 2, "--device", "cpu"]


def compared(model, configuration):
    """On a rank, what a small model in float64 shows, and how many parameters eager mode has."""
    args = argparse.Namespace(model=model, batch_size=None)
    compile_models.TOY_WIDTHS["cpu"] = 400
    compile_models.D_MODEL = 64
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    try:
        expected = compile_ddp.reference(args, CPU)
        _, found = compile_ddp.first_steps(args, CPU, configuration, expected)
    finally:
        torch.set_default_dtype(torch.float32)
    # The ranks' inputs, and so their gradients, are different.
    assert not torch.equal(expected["bare"][-1], expected["ddp"][-1])
    return found, sum(gradient.numel() for gradient in expected["bare"][1:])


BLOCKS = Configuration("fsdp", None, wrap=True, checkpoint=True)
CASES = [  # and the least and the most graphs: compiled in fact, and split where buckets end
    ("toy", Configuration("bare", "aot_eager"), 1, 1),
    ("toy", Configuration("ddp", "aot_eager"), 2, 9),
    ("toy", Configuration("ddp", "aot_eager", split=False), 1, 1),
    ("toy", Configuration("fsdp", "aot_eager"), 1, 9),
    ("toy", BLOCKS._replace(backend="aot_eager"), 1, 99),
    ("lm", Configuration("ddp"), 0, 0),
    ("lm", BLOCKS, 0, 0),
]


@pytest.mark.parametrize("model, configuration, least, most", CASES)
def test_outputs_and_gradients_equal_eager_single_device(ranks, model, configuration, least, most):
    results = ranks(2).run(compared, model, configuration)
    total = results[0][1]
    for found, _ in results:
        assert found["deviation"] < 1e-12 and least <= found["graphs"] <= most
    of_ranks = [found["parameters"] for found, _ in results]
    if configuration.how == "fsdp":
        assert sum(of_ranks) == total, "each rank holds its share"
        assert of_ranks[0] == of_ranks[1] or model == "toy", "which cannot be halved"
    else:
        assert of_ranks == [total] * 2


@pytest.mark.parametrize("factor", [2.0, 0.5, float("nan")])
def test_wrong_gradients_are_seen_also_of_a_tensor_that_is_small(factor):
    large, small = torch.tensor([1.0, -2.0]), torch.tensor([1e-3])
    assert compile_ddp.difference([large.clone(), small.clone()], [large, small]) == 0
    assert not compile_ddp.difference([large, factor * small], [large, small]) <= 1e-2


NAMES = ["bare eager", "bare dynamo only", "ddp eager", "ddp dynamo only"]
NAMES += ["ddp dynamo only whole graph", "fsdp eager", "fsdp eager wrap", "fsdp dynamo only wrap"]


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "only, names", [("--ddp", NAMES[3:4]), pytest.param("", NAMES, marks=FULL)]
)
def test_run_on_a_slow_network(forked, tmp_path, only, names):
    words = f"{only} --warmup 0 --dynamo eager --json json".split()
    status, output = forked(2, OVER, "1gbit,5ms", SCRIPT, *TOY, *words, cwd=tmp_path)
    assert status == 0, output
    result = read_json(tmp_path / "json", "07_resnet_ddp/compile_ddp")
    assert [one["name"] for one in result["configurations"]] == names
    for one in result["configurations"]:
        assert [len(times) for times in one["forward_backward_seconds"]] == [2, 2]
        assert one["first_call_seconds"] > 0 and one["peak_bytes"] > 4 * one["parameters"] > 0
        if one["name"].startswith("ddp"):  # 8.7 MB and four messages
            assert min(one["forward_backward_seconds"][0]) > 0.08


def test_trace_and_printed_graph_of_one_process_without_torchrun(forked, tmp_path):
    words = "--ddp --compile print --trace trace.json".split()
    status, output = forked(None, SCRIPT, *TOY, *words, cwd=tmp_path)
    assert status == 0 and "graph 1:" in output and "linear" in output, output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Forward") >= 2 and names.count("Backward") >= 2


def test_upstreams_flags_are_understood():
    parser = setup.Parser("")
    compile_ddp.add_arguments(parser)
    line = "--toy_model --batch_size=8 --fsdp --fsdp_wrap --dynamo eager --repeat 2"
    args = parser.parse_args(line.split())
    assert (args.model, args.batch_size, args.steps) == ("toy", 8, 2)
    assert compile_ddp.configurations_of(args) == [Configuration("fsdp", "eager", wrap=True)]
