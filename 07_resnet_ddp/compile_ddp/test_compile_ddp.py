"""compile_ddp.py: gradients, shards of FSDP, graphs, memory, real runs, bad input."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common import setup
from common.recordings.record import output_of
from common.testing.harness import masked, read_json, torchrun

SCRIPT = Path(__file__).resolve().with_name("compile_ddp.py")
sys.path[:0] = [str(SCRIPT.parent), str(SCRIPT.parent.parent)]
import compile_ddp  # noqa: E402
import compile_models  # noqa: E402
from compile_ddp import Configuration  # noqa: E402
from upstream import as_ours  # noqa: E402

TOY = ["--model", "toy", "--steps", 2, "--device", "cpu"]


def prepared(model, configuration, batch_size=None):
    """All that is known of a configuration, in float64, on the rank that calls this."""
    args = argparse.Namespace(model=model, torchbench_model=None, batch_size=batch_size)
    compile_models.TOY_WIDTHS["cpu"] = 400
    compile_models.D_MODEL = 64
    device = torch.device("cpu")
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    try:
        expected = compile_ddp.reference(args, device)
        found = compile_ddp.prepare(args, device, configuration, expected)["found"]
    finally:
        torch.set_default_dtype(torch.float32)
    # The ranks' inputs, and so their gradients, are different.
    gradients, mean = expected["gradients"], expected["mean gradients"]
    differ = not torch.equal(gradients[0], mean[0])
    return {**found, "total": sum(g.numel() for g in gradients), "inputs differ": differ}


BLOCKS = Configuration("fsdp", None, wrap=True, checkpoint=True)
FULL = [
    ("toy", Configuration("bare", "aot_eager")),
    ("toy", Configuration("fsdp", "aot_eager")),
    ("lm", Configuration("ddp", "aot_eager")),
    ("lm", Configuration("fsdp", None, wrap=True)),
    ("lm", Configuration("fsdp", None, checkpoint=True)),
]
CASES = [
    ("toy", Configuration("bare")),
    ("toy", Configuration("ddp", "aot_eager")),
    ("toy", Configuration("fsdp")),
    ("toy", BLOCKS._replace(backend="aot_eager")),
    ("lm", Configuration("ddp")),
    ("lm", BLOCKS),
    *(pytest.param(*case, marks=pytest.mark.full) for case in FULL),
]


@pytest.mark.parametrize("model, configuration", CASES)
def test_outputs_and_gradients_equal_eager_single_device(ranks, model, configuration):
    results = ranks(2).run(prepared, model, configuration)
    for found in results:
        assert found["inputs differ"]
        assert max(found["output_difference"], found["gradient_difference"]) < 1e-12
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


def peak_and_parameters(ranks, model, batch_size, how, **options):
    """In bytes, of rank 0."""
    [found, _] = ranks(2).run(prepared, model, Configuration(how, **options), batch_size)
    return found["peak_bytes"], 8 * found["total"]


def test_memory(ranks):
    bare, parameters = peak_and_parameters(ranks, "lm", 1, "bare")
    ddp, _ = peak_and_parameters(ranks, "lm", 1, "ddp")
    logits = 8 * 64 * 10_000  # the largest activation: outputs, their squares, their gradients, …
    assert 2 * parameters <= bare < 2 * parameters + 4 * logits  # parameters and gradients
    assert 3 * parameters <= ddp < 3 * parameters + 4 * logits  # and buckets


@pytest.mark.full
def test_what_lowers_the_peak_of_fsdp(ranks):
    """Units of one block, where parameters take the memory; checkpoints, where activations do."""
    one_unit, parameters = peak_and_parameters(ranks, "toy", 1, "fsdp")
    # Both shards, of parameters and gradients; gathered: all of both, or those of a block or two.
    assert 2.9 * parameters < one_unit < 3.2 * parameters
    blocks, _ = peak_and_parameters(ranks, "toy", 1, "fsdp", wrap=True)
    assert blocks < one_unit - 0.5 * parameters
    # Of a block of the language model at least: q, k, v, what attention and the two halves of the
    # perceptron make, each of 4 × 64 tokens; the first block's is there in any case.
    activations = 3 * (3 + 1 + 4 + 4) * 4 * 64 * 64 * 8
    without, _ = peak_and_parameters(ranks, "lm", 4, "fsdp")
    with_checkpoints, _ = peak_and_parameters(ranks, "lm", 4, "fsdp", checkpoint=True)
    assert with_checkpoints < without - activations


@pytest.mark.parametrize("factor", [2.0, 0.5, 0.0, float("nan")])
def test_wrong_gradients_are_seen(factor):
    """Also of a tensor that is small beside another one."""
    large, small = torch.tensor([1.0, -2.0]), torch.tensor([1e-4])
    assert compile_ddp.difference([large.clone(), small.clone()], [large, small]) == 0
    assert not compile_ddp.difference([large, factor * small], [large, small]) <= 1e-2
    assert not compile_ddp.difference([factor * large, small], [large, small]) <= 1e-2


def test_blocks():
    lm = compile_models.LanguageModel(64)
    toy = compile_models.ToyModel(20)
    assert compile_ddp.blocks_of(lm) == list(lm.encoder.layers)
    assert compile_ddp.blocks_of(toy) == list(toy.layers[:-1])
    resnet = pytest.importorskip("torchvision").models.resnet18()
    assert [type(block).__name__ for block in compile_ddp.blocks_of(resnet)] == ["BasicBlock"] * 8


def problems(words):
    """What is said of a backend that fails on rank 1 alone with these words, and of none."""

    def fails(graph, inputs):
        if dist.get_rank() == 1:
            raise RuntimeError(words)
        return graph

    torch._dynamo.reset()
    device = torch.device("cpu")
    return compile_ddp.problem_of(fails, device), compile_ddp.problem_of(None, device)


def test_every_rank_knows_why_a_backend_does_not_work_on_one(ranks):
    found = ranks(2).run(problems, "\n  the reason\nmore")
    assert found == [("the reason (rank 1)", None)] * 2


@pytest.mark.full
def test_matrix(forked, tmp_path):
    words = [*TOY, "--dynamo", "eager", "--json", tmp_path / "json"]
    status, output = forked(2, SCRIPT, *words)
    assert status == 0 and "not measured" not in output, output
    recorded = masked(output_of(SCRIPT.with_name("reference_output.txt")))
    for line in masked(output):  # what the recorded output shows is what the script prints today
        assert line in recorded or line.startswith("toy") or "dynamo only" in line, line
    result = read_json(tmp_path / "json", "07_resnet_ddp/compile_ddp")
    assert result["left_out"] == {} and len(result["configurations"]) == 6
    for one in result["configurations"]:
        assert [len(times) for times in one["forward_backward_seconds"]] == [2, 2]
        assert one["first_call_seconds"] > 0 and one["peak_bytes"] > 4 * one["parameters"] > 0
        assert (one["graphs"] > 0) == ("dynamo" in one["name"])


def test_one_process_that_says_on_a_terminal_what_takes_long(forked):
    """Without torchrun; all cases of the options."""
    words = [*TOY, "--steps", 1, "--warmup", 0, "--dynamo", "eager", "--variants"]
    status, output, shown = forked.on_a_terminal(None, SCRIPT, *words)
    assert status == 0 and "gloo on cpu, 1 ranks" in output, shown
    assert "ddp dynamo only, 7 of 8" in shown and "fsdp eager, 3 of 8" in shown, shown
    assert "7 of 8" not in output


@pytest.mark.full
def test_without_a_compiler(script, tmp_path):
    command = torchrun(2, SCRIPT, *TOY, "--json", tmp_path / "json")
    status, output = script(command, env={"CXX": "/nowhere/g++"}).wait()
    assert status == 0, output
    result = json.loads((tmp_path / "json").read_text())
    names = [one["name"] for one in result["configurations"]]
    assert names == ["bare eager", "ddp eager", "fsdp eager"]
    assert list(result["left_out"]) == ["bare inductor", "ddp inductor", "fsdp inductor"]
    for name, reason in result["left_out"].items():
        assert "C++ compiler" in reason and f"{name}: not measured: {reason}\n" in output, output


def test_trace_and_printed_graph(forked, tmp_path):
    words = ["--ddp", "--compile", "print", "--trace", tmp_path / "trace.json", "--verbose"]
    status, output = forked(2, SCRIPT, *TOY, *words)
    assert "DistributedDataParallel(" in output and "torch/_dynamo/" in output  # its log
    assert status == 0 and "graph 1:" in output and "torch._C._nn.linear" in output, output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Forward") >= 2 and names.count("Backward") >= 2
    assert f"written: {tmp_path / 'trace.json'}\n" in output


def parsed(*words):
    parser = setup.Parser("")
    compile_ddp.add_arguments(parser)
    args = parser.parse_args(as_ours(words, compile_ddp.UPSTREAM))
    compile_ddp.check(args)
    return args


CONFIGURATIONS = {
    "": "bare eager, bare inductor, ddp eager, ddp inductor, fsdp eager, fsdp inductor",
    "--compile eager --fsdp-wrap --no-optimize-ddp": "bare eager, bare dynamo only, "
    "ddp eager whole graph, ddp dynamo only whole graph, fsdp eager wrap, fsdp dynamo only wrap",
    "--bare": "bare eager",
    "--variants": "bare eager, ddp eager, fsdp eager, fsdp eager wrap, fsdp eager checkpoint, "
    "fsdp eager wrap checkpoint, ddp inductor, ddp inductor whole graph",
}


@pytest.mark.parametrize("words", CONFIGURATIONS)
def test_configurations(words):
    """All by default; others; one; the variants."""
    names = [one.name for one in compile_ddp.configurations_of(parsed(*words.split()))]
    assert ", ".join(names) == CONFIGURATIONS[words]


@pytest.mark.parametrize("spelt", [str, lambda line: line.replace("_", "-")])
def test_upstreams_command_lines_are_understood(tmp_path, monkeypatch, spelt):
    """Those of benchmarks/dynamo/distributed.py, spelt as there and with dashes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torchviz.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    line = "--toy_model --ddp --dynamo inductor --dynamo_no_optimize_ddp --batch_size=8 --verbose "
    line += "--gpu_memory_stats --torchviz --profile --repeat 2 --trace_file "
    args = parsed(*spelt(line).split(), "a_b.json")
    assert (args.model, args.batch_size, args.steps, args.verbose) == ("toy", 8, 2, True)
    assert (args.trace, args.graph) == (Path("a_b.json"), Path("torchviz.dot"))
    inductor = Configuration("ddp", "inductor", split=False)
    assert compile_ddp.configurations_of(args) == [inductor]
    args = parsed(*spelt("--dynamo cudagraphs --fsdp --fsdp_wrap --fsdp_checkpoint").split())
    assert compile_ddp.configurations_of(args) == [Configuration("fsdp", "cudagraphs", True, True)]
    assert parsed("--profile", "--ddp").trace == Path("profile.json")


def cuda_graphs_after_sharding():
    torch._inductor.config.triton.cudagraphs = True
    compile_ddp.distribute(compile_models.ToyModel(20), Configuration("fsdp"))
    return torch._inductor.config.triton.cudagraphs


def test_under_fsdp_inductor_makes_no_cuda_graphs(ranks):
    assert ranks(1).run(cuda_graphs_after_sharding) == [False]


def test_graph_with_what_is_saved_drawn_where_graphviz_is(forked, tmp_path):
    pytest.importorskip("torchviz")
    dot = tmp_path / "dot"
    dot.write_text('#!/bin/sh\nfor last; do :; done\ncp "$last" "$last.pdf"\n')  # draws nothing
    dot.chmod(0o755)
    words = [*TOY, "--fsdp", "--graph", tmp_path / "graph.dot"]
    status, output = forked(2, SCRIPT, *words, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert status == 0, output
    graph = (tmp_path / "graph.dot").read_text()
    assert graph.startswith("digraph") and "[saved tensor]" in graph, graph[:1000]
    assert (tmp_path / "graph.dot.pdf").read_text() == graph


@pytest.mark.cuda
def test_on_a_gpu(script):
    status, output = script(torchrun(1, SCRIPT, *TOY[:-1], "cuda")).wait(300)
    assert status == 0 and "not measured" not in output, output


@pytest.mark.parametrize(
    "words, named",
    [
        (["--torchbench-model", "hf_Bert"], "PYTHONPATH"),
        (["--toy_model", "--torchbench_model", "hf_Bert"], "--torchbench-model"),
        (["--ddp", "--fsdp"], "--fsdp"),
        (["--dynamo", "gcc"], "--compile"),
        (["--repeat", "-3"], "--steps"),
        (["--profile"], "--trace"),
        (["--compile", "print"], "only with --bare, --ddp or --fsdp"),
        (["--trace_file", "/nowhere/trace.json"], "--trace"),
        (["--bare", "--graph", "a.dot"], "pip install torchviz"),
    ],
)
def test_bad_values(refusal, monkeypatch, tmp_path, words, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torchviz", None)
    assert named in refusal(compile_ddp.main, SCRIPT, *words)
