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
from compile_ddp import Row

CPU = torch.device("cpu")
TOY = ["--model", "toy", "--steps", 2, "--device", "cpu"]


def compared(model, row):
    """On a rank, what a small model in float64 shows, and how many parameters eager mode has."""
    args = argparse.Namespace(model=model, batch_size=None, torchbench_model=None)
    args.verbose = args.torchviz = False
    compile_models.TOY_WIDTHS["cpu"] = 400
    compile_models.D_MODEL = 64
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    try:
        expected = compile_ddp.reference(args, CPU)
        _, found = compile_ddp.first_steps(args, CPU, row, expected)
    finally:
        torch.set_default_dtype(torch.float32)
    # The ranks' inputs, and so their gradients, are different.
    assert not torch.equal(expected["bare"][-1], expected["ddp"][-1])
    return found, sum(gradient.numel() for gradient in expected["bare"][1:])


BLOCKS = Row("fsdp", None, wrap=True, checkpoint=True)
CASES = [  # and the least and the most graphs: compiled in fact, and split where buckets end
    ("toy", Row("bare", "aot_eager"), 1, 1),
    ("toy", Row("ddp", "aot_eager"), 2, 9),
    ("toy", Row("ddp", "aot_eager", split=False), 1, 1),
    ("toy", Row("fsdp", "aot_eager"), 1, 9),
    ("toy", BLOCKS._replace(backend="aot_eager"), 1, 99),
    ("lm", Row("ddp"), 0, 0),
    ("lm", BLOCKS, 0, 0),
]


@pytest.mark.parametrize("model, row, least, most", CASES)
def test_outputs_and_gradients_equal_eager_single_device(ranks, model, row, least, most):
    results = ranks(2).run(compared, model, row)
    total = results[0][1]
    for found, _ in results:
        assert found["deviation"] < 1e-12 and least <= found["graphs"] <= most
    of_ranks = [found["parameters"] for found, _ in results]
    if row.how == "fsdp":
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
    status, output = forked(2, OVER, "1gbit,20ms", SCRIPT, *TOY, *words, cwd=tmp_path)
    assert status == 0, output
    result = read_json(tmp_path / "json", "07_resnet_ddp/compile_ddp")
    assert [one["name"] for one in result["rows"]] == names
    for one in result["rows"]:
        assert [len(times) for times in one["forward_backward_seconds"]] == [2, 2]
        assert one["first_call_seconds"] > 0 and one["peak_bytes"] > 4 * one["parameters"] > 0
        if one["name"].startswith("ddp"):  # 8.7 MB, and two calls of four messages
            assert min(one["forward_backward_seconds"][0]) > 0.2


def test_trace_and_printed_graph_of_one_process_without_torchrun(forked, tmp_path):
    words = "--ddp --compile print --trace trace.json".split()
    status, output = forked(None, SCRIPT, *TOY, *words, cwd=tmp_path)
    assert status == 0 and "graph 1:" in output and "linear" in output, output
    events = json.loads((tmp_path / "trace.json.rank0").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Forward") >= 2 and names.count("Backward") >= 2


BENCHMARK = """
import torch


class BertLayer(torch.nn.Linear):
    def forward(self, inputs):
        return super().forward(torch.nn.functional.dropout(inputs))


class Outputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(BertLayer(5, 4), BertLayer(4, 2))

    def forward(self, inputs):
        return {"logits": self.layers(inputs), "number": 1}


class Model:
    def __init__(self, test, device, batch_size):
        assert (test, device, batch_size) == ("train", "cpu", 3)
        self.inputs = torch.ones(batch_size, 5)

    def get_module(self):
        return Outputs(), (self.inputs,)
"""


@pytest.mark.parametrize("words", ["--ddp --compile eager", "--fsdp --fsdp_wrap"])
def test_a_model_of_torchbench(forked, tmp_path, monkeypatch, words):
    """Of a small package of its name: with outputs in a dictionary, and with dropout."""
    folder = tmp_path / "torchbenchmark" / "models"
    folder.mkdir(parents=True)
    (folder / "hf_Bert.py").write_text(BENCHMARK)
    words = f"--torchbench_model hf_Bert --batch_size 3 --steps 1 --verbose {words}".split()
    monkeypatch.syspath_prepend(tmp_path)
    status, output = forked(2, SCRIPT, *words, "--device", "cpu")
    assert status == 0 and "BertLayer" in output, output


def test_without_torchbench_or_torchviz_a_line_says_how_to_get_it(refusal):
    for words, how in ((["--torchbench-model", "hf_Bert"], "git clone"), (["--torchviz"], "pip")):
        said = refusal(compile_ddp.main, SCRIPT, *words, "--device", "cpu")
        assert said.startswith(f"argument {words[0]}: ") and how in said


def test_upstreams_flags_are_understood():
    parser = setup.Parser("")
    compile_ddp.add_arguments(parser)
    line = "--toy_model --batch_size=8 --fsdp --fsdp_wrap --dynamo eager --repeat 2 --verbose "
    line += "--profile --trace_file x --gpu_memory_stats --torchviz"
    args = parser.parse_args(line.split())
    assert (args.model, args.batch_size, args.steps) == ("toy", 8, 2)
    assert args.verbose and args.trace.name == "x" and args.torchviz
    assert compile_ddp.rows_of(args) == [Row("fsdp", "eager", wrap=True)]
