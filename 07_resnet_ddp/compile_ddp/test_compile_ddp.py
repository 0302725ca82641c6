"""compile_ddp.py: gradients, shards of FSDP, graphs, memory, real runs, bad input."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from common import setup
from tools.testing import read_json, torchrun

SCRIPT = Path(__file__).resolve().with_name("compile_ddp.py")
import compile_ddp
import compile_models
from compile_ddp import Configuration

TOY = ["--model", "toy", "--steps", 2, "--device", "cpu"]


def prepared(model, configuration, batch_size=None):
    """All that is known of a configuration, in float64, on the rank that calls this."""
    args = argparse.Namespace(model=model, torchbench_model=None, batch_size=batch_size)
    args.verbose, args.graph = False, None
    compile_models.TOY_WIDTHS["cpu"] = 400
    compile_models.D_MODEL = 64
    device = torch.device("cpu")
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    try:
        expected = compile_ddp.reference(args, device)
        _, found = compile_ddp.prepare(args, device, configuration, expected)
    finally:
        torch.set_default_dtype(torch.float32)
    # The ranks' inputs, and so their gradients, are different.
    differ = not torch.equal(expected["bare"][-1], expected["ddp"][-1])
    total = sum(gradient.numel() for gradient in expected["bare"][1:])  # after the one output
    return {**found, "total": total, "inputs differ": differ}


BLOCKS = Configuration("fsdp", None, wrap=True, checkpoint=True)
CASES = [
    ("toy", Configuration("bare", "aot_eager")),
    ("toy", Configuration("ddp", "aot_eager")),
    ("toy", Configuration("fsdp", "aot_eager")),
    ("toy", BLOCKS._replace(backend="aot_eager")),
    ("lm", Configuration("ddp")),
    ("lm", BLOCKS),
]


@pytest.mark.parametrize("model, configuration", CASES)
def test_outputs_and_gradients_equal_eager_single_device(ranks, model, configuration):
    results = ranks(2).run(prepared, model, configuration)
    for found in results:
        assert found["inputs differ"] and found["deviation"] < 1e-12
        # Compiled in fact, and not passed over.
        assert (found["graphs"] > 0) == (configuration.backend is not None)
    held = [found["parameters"] for found in results]
    if configuration.how == "fsdp":
        assert sum(held) == results[0]["total"], "each rank holds its share"
        assert held[0] == held[1] or model == "toy", "which cannot be halved"
    else:
        assert held == [results[0]["total"]] * 2


def test_graph_is_split_at_buckets_unless_switched_off(ranks):
    for split in (True, False):
        configuration = Configuration("ddp", "eager", split=split)
        for found in ranks(2).run(prepared, "toy", configuration):
            assert (found["graphs"] > 1) == split


def peak(ranks, how):
    """Of rank 0, in parameters' bytes."""
    [found, _] = ranks(2).run(prepared, "lm", Configuration(how), 1)
    return found["peak_bytes"] / (8 * found["total"])


def test_memory(ranks):
    """Parameters, gradients and DDP's buckets; logits, the largest activations, are 0.43 of one."""
    bare = peak(ranks, "bare")
    assert 2 <= bare < 2 + 4 * 0.43
    assert peak(ranks, "ddp") == pytest.approx(bare + 1, abs=0.01)


@pytest.mark.parametrize("factor", [2.0, 0.5, float("nan")])
def test_wrong_gradients_are_seen_also_of_a_tensor_that_is_small(factor):
    large, small = torch.tensor([1.0, -2.0]), torch.tensor([1e-3])
    assert compile_ddp.difference([large.clone(), small.clone()], [large, small]) == 0
    assert not compile_ddp.difference([large, factor * small], [large, small]) <= 1e-2


NAMES = ["bare eager", "bare dynamo only", "ddp eager", "ddp dynamo only"]
NAMES += ["ddp dynamo only whole graph", "fsdp eager", "fsdp eager wrap", "fsdp dynamo only wrap"]


def test_all_configurations_on_a_slow_network(forked, tmp_path):
    words = [*TOY, "--warmup", 0, "--dynamo", "eager", "--json", tmp_path / "json"]
    status, output = forked(2, SCRIPT, *words, "--network", "1gbit,5ms")
    assert status == 0, output
    result = read_json(tmp_path / "json", "07_resnet_ddp/compile_ddp")
    found = {one["name"]: one for one in result["configurations"]}
    assert list(found) == NAMES
    for one in found.values():
        assert [len(times) for times in one["forward_backward_seconds"]] == [2, 2]
        assert one["first_call_seconds"] > 0 and one["peak_bytes"] > 4 * one["parameters"] > 0
    assert min(found["ddp eager"]["forward_backward_seconds"][0]) > 0.08  # 8.7 MB and four messages
    assert found["bare eager"]["parameters"] > found["fsdp eager"]["parameters"]


def test_trace_and_printed_graph_of_one_process_without_torchrun(forked, tmp_path):
    words = ["--ddp", "--compile", "print", "--trace", tmp_path / "trace.json", "--verbose"]
    status, output = forked(None, SCRIPT, *TOY, *words)
    assert "DistributedDataParallel(" in output and "torch/_dynamo/" in output  # its log
    assert status == 0 and "graph 1:" in output and "torch._C._nn.linear" in output, output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Forward") >= 2 and names.count("Backward") >= 2


def parsed(line):
    parser = setup.Parser("")
    compile_ddp.add_arguments(parser)
    return parser.parse_args(line.split())


def test_upstreams_flags_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "--toy_model --batch_size=8 --verbose --gpu_memory_stats --profile --repeat 2 "
    line += "--device cpu --trace_file t --torchviz v"
    args = parsed(line)
    assert (args.model, args.batch_size, args.steps) == ("toy", 8, 2)
    assert args.verbose and args.gpu_memory_stats and args.profile
    assert (args.trace.name, args.graph.name) == ("t", "v")
    for flags, name in {
        "--fsdp --fsdp_wrap --fsdp_checkpoint --dynamo eager": "fsdp dynamo only wrap checkpoint",
        "--ddp --dynamo inductor --dynamo_no_optimize_ddp": "ddp inductor whole graph",
    }.items():
        [configuration] = compile_ddp.configurations_of(parsed(flags))
        assert configuration.name == name


@pytest.mark.cuda
def test_on_a_gpu(script):
    words = [*TOY[:-1], "cuda", "--gpu-memory-stats"]
    status, output = script(torchrun(1, SCRIPT, *words)).wait(300)
    assert status == 0 and "memory summary" in output, output


@pytest.mark.parametrize(
    "words, named",
    [
        (["--torchbench-model", "hf_Bert"], "PYTHONPATH"),
        (["--dynamo", "gcc"], "--compile"),
        (["--bare", "--graph", "a.dot"], "pip install torchviz"),
    ],
)
def test_bad_values(refusal, monkeypatch, tmp_path, words, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torchviz", None)
    assert named in refusal(compile_ddp.main, SCRIPT, *words)
