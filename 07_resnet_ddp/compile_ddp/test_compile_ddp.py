"""Tests of compile_ddp.py with compile_flags.py and compile_models.py.

Gradients of every cell, FSDP's shards, graphs, memory, real runs, bad input.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common import setup
from common.testing.harness import check_script_alone, masked, read_json, torchrun

FOLDER = Path(__file__).resolve().parent
SCRIPT = FOLDER / "compile_ddp.py"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
import compile_ddp  # noqa: E402
import compile_flags  # noqa: E402
import compile_models  # noqa: E402

TOY = ["--model", "toy", "--width", 20, "--steps", 2, "--device", "cpu"]


def prepared(model, how, backend=None, batch_size=None, **options):
    """One cell on the rank that calls this, in float64: all that is known of it but the model."""
    args = argparse.Namespace(model=model, torchbench_model=None, batch_size=batch_size)
    args.width = 64 if model == "lm" else 400
    device = torch.device("cpu")
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    wanted = compile_flags.Cell(how, backend, **options)
    try:
        expected = compile_ddp.reference(args, device)
        cell = compile_ddp.prepare(args, device, wanted, expected)
    finally:
        torch.set_default_dtype(torch.float32)
    # The ranks' inputs, and so their gradients, are different.
    differ = not torch.equal(expected[1][0], expected[2][0])
    return {**cell["found"], "total": sum(g.numel() for g in expected[1]), "inputs differ": differ}


WAYS = [
    ("bare", {}),
    ("ddp", {}),
    ("fsdp", {}),
    ("fsdp", {"wrap": True}),
    ("fsdp", {"wrap": True, "checkpoint": True}),
    ("fsdp", {"checkpoint": True}),
]


def ways():
    """Every way with the toy; full: most of them compiled, and with the other model."""
    found = []
    for model, backend in [("toy", None), ("lm", None), ("toy", "aot_eager")]:
        for how, flags in WAYS:
            marks = []
            is_simple = model == "toy" and backend is None
            if not (is_simple or how == "ddp" or len(flags) == 2):
                marks.append(pytest.mark.full)
            name = "-".join([model, str(backend), how, *flags])
            found.append(pytest.param(model, backend, how, flags, marks=marks, id=name))
    return found


@pytest.mark.parametrize("model, backend, how, flags", ways())
def test_outputs_and_gradients_equal_eager_single_device(ranks, model, how, flags, backend):
    for cell in ranks(2).run(run_prepared, model, how, backend, flags):
        assert cell["inputs differ"]
        assert max(cell["output_difference"], cell["gradient_difference"]) < 1e-12
        # Compiled in fact, and not passed over.
        assert (cell["graphs"] > 0) == (backend is not None)


def run_prepared(model, how, backend, flags):
    return prepared(model, how, backend, **flags)


@pytest.mark.parametrize(
    "how, wrap, share", [("ddp", False, 1), ("fsdp", False, 2), ("fsdp", True, 2)]
)
def test_fsdp_holds_one_nth_of_the_parameters(ranks, how, wrap, share):
    for cell in ranks(2).run(run_prepared, "lm", how, None, {"wrap": wrap, "batch_size": 1}):
        assert share * cell["parameters"] == cell["total"]


def test_fsdp_shares_out_what_cannot_be_halved(ranks):
    cells = ranks(2).run(run_prepared, "toy", "fsdp", None, {})
    assert sum(cell["parameters"] for cell in cells) == cells[0]["total"]


def test_graph_is_split_at_buckets_unless_switched_off(ranks):
    for cell in ranks(2).run(run_prepared, "toy", "ddp", "eager", {}):
        assert cell["graphs"] > 1
    for cell in ranks(2).run(run_prepared, "toy", "ddp", "eager", {"split": False}):
        assert cell["graphs"] == 1


def test_memory(ranks):
    def peak(how):
        cell, other = ranks(2).run(run_prepared, "lm", how, None, {"batch_size": 1})
        assert cell["peak_bytes"] == other["peak_bytes"]
        return cell["peak_bytes"]

    bare = peak("bare")
    ddp = peak("ddp")
    parameters = 8 * ranks(2).run(run_prepared, "lm", "bare", None, {})[0]["total"]
    logits = 8 * 64 * 10_000  # the largest activation: outputs, their squares, their gradients, …
    assert 2 * parameters <= bare < 2 * parameters + 4 * logits  # parameters and gradients
    assert 3 * parameters <= ddp < 3 * parameters + 4 * logits  # and buckets


def test_what_lowers_the_peak_of_fsdp(ranks):
    """Units of one block, where parameters take the memory; checkpoints, where activations do."""

    def peak(model, batch_size, **options):
        options["batch_size"] = batch_size
        return ranks(2).run(run_prepared, model, "fsdp", None, options)[0]["peak_bytes"]

    parameters = 8 * ranks(2).run(run_prepared, "toy", "bare", None, {})[0]["total"]
    one_unit = peak("toy", 1)
    # Both shards, of parameters and gradients; gathered: all of both, or those of a block or two.
    assert 2.9 * parameters < one_unit < 3.2 * parameters
    assert peak("toy", 1, wrap=True) < one_unit - 0.5 * parameters
    # Of a block of the language model at least: q, k, v, what attention and the two halves of the
    # perceptron make, each of 4 × 64 tokens; the first block's is there in any case.
    activations = 3 * (3 + 1 + 4 + 4) * 4 * 64 * 64 * 8
    assert peak("lm", 4, checkpoint=True) < peak("lm", 4) - activations


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


def run_attempts():
    """What `attempt` makes of a failure of rank 1 alone, told by this exception, and of none."""

    def fail(error):
        if dist.get_rank() == 1:
            raise error
        return "result"

    errors = [RuntimeError("\n\n  the reason\nmore"), RuntimeError(" \n"), RuntimeError()]
    outcomes = [compile_ddp.attempt(lambda error=error: fail(error)) for error in errors]
    return [*outcomes, compile_ddp.attempt(lambda: "result")]


def test_a_failure_is_one_whatever_its_text_begins_with(ranks):
    for outcomes in ranks(2).run(run_attempts):
        assert outcomes[0] == (None, "the reason (rank 1)")
        assert outcomes[1:3] == [(None, "RuntimeError (rank 1)")] * 2
        assert outcomes[3] == ("result", None)


def test_matrix(forked, tmp_path):
    words = [*TOY, "--compile", "eager", "--fsdp-wrap", "--json", tmp_path / "json"]
    status, output = forked(2, SCRIPT, *words)
    assert status == 0 and "not measured" not in output, output
    table = output.split("forward + backward, ms")[1].splitlines()
    rows = [line.split()[:2] for line in table[1:7]]
    expected = [["bare", "eager"], ["bare", "dynamo"], ["ddp", "eager"], ["ddp", "dynamo"]]
    assert rows == [*expected, ["fsdp", "eager"], ["fsdp", "dynamo"]], output
    recorded = masked(SCRIPT.with_name("reference_output.txt").read_text())
    for line in masked(output):  # what the recorded output shows is what the script prints today
        if not line.startswith(("toy", "written")) and "dynamo" not in line:
            assert line.replace("fsdp eager wrap", "fsdp eager") in recorded

    result = read_json(tmp_path / "json", "07_resnet_ddp/compile_ddp")
    assert result["left_out"] == {}
    assert (result["options"]["steps"], result["options"]["warmup"]) == (2, 3)
    assert [cell["name"].split()[:2] for cell in result["cells"]] == rows
    for cell in result["cells"]:
        assert [len(rank) for rank in cell["forward_backward_seconds"]] == [2, 2]
        assert cell["first_call_seconds"] > 0 and cell["peak_bytes"] > 4 * cell["parameters"] > 0
        assert (cell["graphs"] > 0) == ("dynamo" in cell["name"])


def test_one_process_that_says_on_a_terminal_what_takes_long(forked):
    """Without torchrun; all cases of the options."""
    words = [*TOY, "--steps", 1, "--warmup", 0, "--dynamo", "eager", "--variants"]
    status, output, shown = forked.on_a_terminal(None, SCRIPT, *words)
    assert status == 0 and "gloo on cpu, 1 ranks" in output, shown
    assert "ddp dynamo only, 7 of 8: compiling" in shown and "fsdp eager, 3 of 8: " in shown, shown
    assert "compiling" not in output
    recorded = masked(SCRIPT.with_name("reference_output_variants.txt").read_text())
    for line in masked(output.replace("dynamo only", "inductor")):
        if not line.startswith(("toy", "ddp inductor")):
            assert line in recorded, line


@pytest.mark.full
def test_without_a_compiler(script, tmp_path):
    command = torchrun(2, SCRIPT, *TOY, "--json", tmp_path / "json")
    status, output = script(command, env={"CXX": "/nowhere/g++"}).wait()
    assert status == 0, output
    table = output.split("forward + backward, ms")[1].splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["bare", "ddp", "fsdp"]
    assert sum("inductor: not measured: " in line and "C++ compiler" in line for line in table) == 3
    left_out = json.loads((tmp_path / "json").read_text())["left_out"]
    assert list(left_out) == ["bare inductor", "ddp inductor", "fsdp inductor"]
    assert all("C++ compiler" in reason for reason in left_out.values())


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
    compile_flags.add_arguments(parser)
    compile_models.add_arguments(parser)
    args = parser.parse_args(compile_flags.with_dashes([str(word) for word in words]))
    compile_flags.check(args)
    return args, parser.format_help()


def test_older_names_of_flags_are_understood_and_not_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, shown = parsed("--repeat", 7, "--ddp", "--profile")
    assert (args.steps, args.trace) == (7, Path("profile.json"))
    args, _ = parsed("--fsdp", "--profile", "--trace-file", "other.json")
    assert args.trace == Path("other.json")
    assert not any(name in shown for name in ("--repeat", "--profile", "--trace-file", "SUPPRESS"))


def test_the_matrix_is_the_default():
    def cells(*words):
        return compile_flags.cells_of(parsed(*words)[0])

    six = [(how, backend) for how in ("bare", "ddp", "fsdp") for backend in (None, "inductor")]
    assert cells() == cells("--matrix") == [compile_flags.Cell(*one) for one in six]
    assert cells("--bare") == [compile_flags.Cell("bare")]
    assert cells("--fsdp", "--compile", "eager") == [compile_flags.Cell("fsdp", "eager")]
    assert [cell.backend for cell in cells("--compile", "eager")] == [None, "eager"] * 3
    options = [cell[2:] for cell in cells("--fsdp-wrap", "--no-optimize-ddp")]
    assert (
        options
        == [(False, False, True)] * 2 + [(False, False, False)] * 2 + [(True, False, True)] * 2
    )


def test_variants_are_all_that_the_options_change():
    names = list(map(compile_flags.name_of, compile_flags.cells_of(parsed("--variants")[0])))
    fsdp = ["fsdp eager", "fsdp eager wrap", "fsdp eager checkpoint", "fsdp eager wrap checkpoint"]
    ddp = ["ddp inductor", "ddp inductor whole graph"]
    assert names == ["bare eager", "ddp eager", *fsdp, *ddp]


def test_upstreams_command_lines_are_understood(tmp_path, monkeypatch):
    """Those of benchmarks/dynamo/distributed.py, with its spelling."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torchviz.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    args, shown = parsed(
        *"--toy_model --ddp --dynamo aot_eager --dynamo_no_optimize_ddp --batch_size=8".split(),
        *"--gpu_memory_stats --torchviz --profile --trace_file a_b.json --repeat 2".split(),
    )
    assert (args.model, args.batch_size, args.steps) == ("toy", 8, 2)
    assert args.trace == Path("a_b.json") and args.graph == Path("torchviz.dot")
    cells = compile_flags.cells_of(args)
    assert cells == [compile_flags.Cell("ddp", "aot_eager", split=False)]
    args, _ = parsed("--dynamo", "cudagraphs", "--fsdp", "--fsdp_wrap", "--fsdp_checkpoint")
    assert compile_flags.cells_of(args) == [compile_flags.Cell("fsdp", "cudagraphs", True, True)]
    hidden = ("--dynamo", "--toy", "--gpu-memory", "--torchviz", "--profile", "SUPPRESS")
    assert not any(name in shown for name in hidden)


def test_under_fsdp_inductor_makes_no_cuda_graphs(ranks):
    assert ranks(1).run(cuda_graphs_after_sharding) == [(True, False)]


def cuda_graphs_after_sharding():
    config = torch._inductor.config.triton
    config.cudagraphs = True
    found = []
    for how in ("ddp", "fsdp"):
        compile_ddp.distribute(compile_models.ToyModel(20), how)
        found.append(config.cudagraphs)
    return tuple(found)


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
    files = [f"written: {tmp_path}/{name}\n" for name in ("graph.dot", "graph.dot.pdf")]
    assert "".join(files) in output, output


@pytest.mark.cuda
def test_on_a_gpu(script):
    status, output = script(torchrun(1, SCRIPT, *TOY[:-1], "cuda")).wait(300)
    assert status == 0 and "not measured" not in output, output


@pytest.mark.parametrize(
    "words, named",
    [
        (["--model", "resnet1"], "--model"),
        (["--torchbench-model", "hf_Bert"], "PYTHONPATH"),
        (["--model", "lm", "--torchbench-model", "hf_Bert"], "--torchbench-model"),
        (["--ddp", "--fsdp"], "--fsdp"),
        (["--ddp", "--matrix"], "--matrix"),
        (["--ddp", "--variants"], "--variants"),
        (["--variants", "--fsdp-wrap"], "--variants"),
        (["--variants", "--trace", "trace.json"], "--trace"),
        (["--toy_model", "--model", "lm"], "--model"),
        (["--dynamo", "gcc"], "--compile"),
        (["--compile", "gcc"], "--compile"),
        (["--width", "5"], "--width"),
        (["--width", "100"], "--width"),
        (["--model", "toy", "--width", "33"], "--width"),
        (["--repeat", "-3"], "--steps"),
        (["--matrix", "--profile"], "--trace"),
        (["--trace", "trace.json"], "--trace"),
        (["--graph", "graph.dot"], "--graph"),
        (["--matrix", "--compile", "print"], "--compile print"),
        (["--compile", "print"], "--bare, --ddp or --fsdp"),
        (["--bare", "--fsdp-wrap"], "--fsdp-wrap"),
        (["--bare", "--ddp"], "--bare"),
        (["--ddp", "--fsdp-checkpoint"], "--fsdp-checkpoint"),
        (["--profile", "--trace-file", "/nowhere/trace.json"], "--trace"),
        (["--graph", "/nowhere/graph.dot"], "--graph"),
    ],
)
def test_bad_values(words, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compile_ddp.py", *words])
    with pytest.raises(SystemExit) as end:
        compile_ddp.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("compile_ddp.py: error: ") and named in line


def test_graph_without_torchviz(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["compile_ddp.py", "--bare", "--graph", str(tmp_path / "a.dot")]
    )
    monkeypatch.setitem(sys.modules, "torchviz", None)
    with pytest.raises(SystemExit) as end:
        compile_ddp.main()
    assert end.value.code == 2 and "pip install torchviz" in capsys.readouterr().err


def test_copied_alone(tmp_path):
    check_script_alone(SCRIPT, tmp_path)


@pytest.mark.parametrize("missing", ["compile_flags", "compile_models"])
def test_copied_without_the_files_beside_it(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as end:
        compile_ddp.main()
    reason, needed = end.value.code.split(": copy ")
    assert reason.startswith("error: ") and missing in reason and f"{missing}.py" in needed
