"""Tests of compile_ddp.py with compile_models.py and peak_memory.py.

Gradients of every cell, FSDP's shards, graphs, memory, real runs, bad input.
"""

import argparse
import json
import sys
from pathlib import Path

import compile_ddp
import compile_models
import peak_memory
import pytest
import torch

from common.testing import check_script_alone, torchrun

SCRIPT = Path(__file__).resolve().parent / "compile_ddp.py"
NEEDS_FSDP = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP on a CPU needs torch 2.7"
)
TOY = ["--model", "toy", "--width", 20, "--repeat", 2, "--device", "cpu"]


def prepared(model, how, backend=None, optimize_ddp=True, **flags):
    """One cell on the rank that calls this, in float64: all that is known of it but the model."""
    args = argparse.Namespace(
        model=model,
        torchbench_model=None,
        width=64 if model == "lm" else 400,
        batch_size=None,
        fsdp_wrap=False,
        fsdp_checkpoint=False,
    )
    vars(args).update(flags)
    device = torch.device("cpu")
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = optimize_ddp
    torch.set_default_dtype(torch.float64)
    try:
        expected = compile_ddp.reference(args, device)
        cell = compile_ddp.prepare(args, device, how, backend, expected)
    finally:
        torch.set_default_dtype(torch.float32)
    # The ranks' inputs, and so their gradients, are different.
    differ = not torch.equal(expected[1][0], expected[2][0])
    return {
        "differences": cell["differences"],
        "parameters": cell["parameters"],
        "peak": cell["peak"],
        "graphs": len(cell["graphs"]),
        "total": sum(g.numel() for g in expected[1]),
        "inputs differ": differ,
    }


@pytest.mark.parametrize("model, backend", [("toy", None), ("lm", None), ("toy", "aot_eager")])
@pytest.mark.parametrize(
    "how, flags",
    [
        ("bare", {}),
        ("ddp", {}),
        pytest.param("fsdp", {}, marks=NEEDS_FSDP),
        pytest.param("fsdp", {"fsdp_wrap": True}, marks=NEEDS_FSDP),
        pytest.param("fsdp", {"fsdp_wrap": True, "fsdp_checkpoint": True}, marks=NEEDS_FSDP),
        pytest.param("fsdp", {"fsdp_checkpoint": True}, marks=NEEDS_FSDP),
    ],
)
def test_outputs_and_gradients_equal_eager_single_device(ranks, model, how, flags, backend):
    for cell in ranks(2).run(run_prepared, model, how, backend, flags):
        assert cell["inputs differ"]
        assert max(cell["differences"]) < 1e-12
        # Compiled in fact, and not passed over.
        assert (cell["graphs"] > 0) == (backend is not None)


def run_prepared(model, how, backend, flags):
    return prepared(model, how, backend, **flags)


@pytest.mark.parametrize(
    "how, wrap, share",
    [
        ("ddp", False, 1),
        pytest.param("fsdp", False, 2, marks=NEEDS_FSDP),
        pytest.param("fsdp", True, 2, marks=NEEDS_FSDP),
    ],
)
def test_fsdp_holds_one_nth_of_the_parameters(ranks, how, wrap, share):
    for cell in ranks(2).run(run_prepared, "lm", how, None, {"fsdp_wrap": wrap, "batch_size": 1}):
        assert share * cell["parameters"] == cell["total"]


@NEEDS_FSDP
def test_fsdp_shares_out_what_cannot_be_halved(ranks):
    cells = ranks(2).run(run_prepared, "toy", "fsdp", None, {})
    assert sum(cell["parameters"] for cell in cells) == cells[0]["total"]


def test_graph_is_split_at_buckets_unless_switched_off(ranks):
    for cell in ranks(2).run(run_prepared, "toy", "ddp", "eager", {}):
        assert cell["graphs"] > 1
    for cell in ranks(2).run(run_prepared, "toy", "ddp", "eager", {"optimize_ddp": False}):
        assert cell["graphs"] == 1


def test_memory(ranks):
    def peak(how):
        cell, other = ranks(2).run(run_prepared, "lm", how, None, {"batch_size": 1})
        assert cell["peak"] == other["peak"]
        return cell["peak"]

    bare = peak("bare")
    ddp = peak("ddp")
    parameters = 8 * ranks(2).run(run_prepared, "lm", "bare", None, {})[0]["total"]
    logits = 8 * 64 * 10_000  # the largest activation: outputs, their squares, their gradients, …
    assert 2 * parameters <= bare < 2 * parameters + 4 * logits  # parameters and gradients
    assert 3 * parameters <= ddp < 3 * parameters + 4 * logits  # and buckets


def test_peak_memory_of_a_function():
    kept = torch.ones(1000)  # was there before, and does not count

    def step():
        first = torch.ones(3000)  # 12,000 bytes
        second = first + 1
        del first
        return second + kept.sum()

    peak = peak_memory.peak_memory(step, torch.device("cpu"))
    assert 24_000 <= peak < 25_000


@pytest.mark.parametrize("factor", [2.0, 0.5, 0.0, float("nan")])
def test_wrong_gradients_are_seen(factor):
    expected = [torch.tensor([1.0, -2.0]), torch.tensor([1e-4])]
    assert compile_ddp.difference([tensor.clone() for tensor in expected], expected) == 0
    assert not compile_ddp.difference([expected[0], factor * expected[1]], expected) <= 1e-2
    assert not compile_ddp.difference([factor * expected[0], expected[1]], expected) <= 1e-2


def test_blocks():
    lm = compile_models.LanguageModel(64)
    toy = compile_models.ToyModel(20)
    assert compile_ddp.blocks_of(lm) == list(lm.layers)
    assert compile_ddp.blocks_of(toy) == list(toy.layers[:-1])
    resnet = pytest.importorskip("torchvision").models.resnet18()
    assert [type(block).__name__ for block in compile_ddp.blocks_of(resnet)] == ["BasicBlock"] * 8


@NEEDS_FSDP
def test_matrix(script):
    words = [*TOY, "--matrix", "--compile", "eager", "--fsdp-wrap"]
    status, output = script(torchrun(2, SCRIPT, *words)).wait()
    assert status == 0 and "not measured" not in output, output
    table = output.split("forward + backward, ms")[1].splitlines()
    rows = [line.split()[:2] for line in table[1:7]]
    expected = [["bare", "eager"], ["bare", "dynamo"], ["ddp", "eager"], ["ddp", "dynamo"]]
    assert rows == [*expected, ["fsdp", "eager"], ["fsdp", "dynamo"]], output


@pytest.mark.full
@NEEDS_FSDP
def test_without_a_compiler(script):
    command = torchrun(2, SCRIPT, *TOY, "--matrix")
    status, output = script(command, env={"CXX": "/nowhere/g++"}).wait()
    assert status == 0, output
    table = output.split("forward + backward, ms")[1].splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["bare", "ddp", "fsdp"]
    assert sum("inductor: not measured: " in line and "C++ compiler" in line for line in table) == 3


def test_trace_and_printed_graph(script, tmp_path):
    words = ["--ddp", "--compile", "print", "--profile", "--trace-file", tmp_path / "trace.json"]
    status, output = script(torchrun(2, SCRIPT, *TOY, *words)).wait()
    assert status == 0 and "graph 1:" in output and "torch._C._nn.linear" in output, output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Forward") >= 2 and names.count("Backward") >= 2


@NEEDS_FSDP
def test_graph(script, tmp_path):
    pytest.importorskip("torchviz")
    words = [*TOY, "--fsdp", "--graph", tmp_path / "graph.dot"]
    status, output = script(torchrun(2, SCRIPT, *words)).wait()
    assert status == 0 and (tmp_path / "graph.dot").read_text().startswith("digraph"), output


@pytest.mark.cuda
def test_on_a_gpu(script):
    status, output = script(torchrun(1, SCRIPT, *TOY[:-1], "cuda", "--matrix")).wait(300)
    assert status == 0 and "not measured" not in output, output


@pytest.mark.parametrize(
    "words, named",
    [
        (["--model", "resnet1"], "--model"),
        (["--model", ""], "--model"),
        (["--torchbench-model", "hf_Bert"], "PYTHONPATH"),
        (["--torchbench-model", ""], "PYTHONPATH"),
        (["--model", "lm", "--torchbench-model", "hf_Bert"], "--torchbench-model"),
        (["--ddp", "--fsdp"], "--fsdp"),
        (["--ddp", "--matrix"], "--matrix"),
        (["--compile", "gcc"], "--compile"),
        (["--compile"], "--compile"),
        (["--width", "5"], "--width"),
        (["--width", "100"], "--width"),
        (["--model", "toy", "--width", "33"], "--width"),
        (["--batch-size", "0"], "--batch-size"),
        (["--batch-size", "1e9"], "--batch-size"),
        (["--repeat", "0"], "--repeat"),
        (["--repeat", "-3"], "--repeat"),
        (["--matrix", "--profile"], "--profile"),
        (["--matrix", "--compile", "print"], "print"),
        (["--fsdp-wrap"], "--fsdp-wrap"),
        (["--ddp", "--fsdp-checkpoint"], "--fsdp-checkpoint"),
        (["--profile", "--trace-file", "/nowhere/trace.json"], "--trace-file"),
        (["--trace-file", "."], "--trace-file"),
        (["--graph", "/nowhere/graph.dot"], "--graph"),
        (["--device", "tpu"], "--device"),
        (["--backend", "mpi"], "--backend"),
        (["--timeout", "0"], "--timeout"),
        (["--compile-it"], "--compile-it"),
        ([], "torchrun"),
    ],
)
def test_bad_values(words, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compile_ddp.py", *words])
    with pytest.raises(SystemExit) as end:
        compile_ddp.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("compile_ddp.py: error: ") and named in line


def test_graph_without_torchviz(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["compile_ddp.py", "--graph", str(tmp_path / "graph.dot")])
    monkeypatch.setitem(sys.modules, "torchviz", None)
    with pytest.raises(SystemExit) as end:
        compile_ddp.main()
    assert end.value.code == 2 and "pip install torchviz" in capsys.readouterr().err


def test_copied_alone(tmp_path):
    check_script_alone(SCRIPT, tmp_path)


@pytest.mark.parametrize("missing", ["compile_models", "peak_memory"])
def test_copied_without_the_files_beside_it(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as end:
        compile_ddp.main()
    reason, needed = end.value.code.split(": copy ")
    assert reason.startswith("error: ") and missing in reason and f"{missing}.py" in needed
