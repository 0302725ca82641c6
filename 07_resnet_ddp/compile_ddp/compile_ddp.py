r"""07: one forward and backward of DDP and of FSDP, eager and compiled.

A compiler wants the whole graph, but DDP wants a pause after every bucket, to all-reduce it while
the rest is still computed. So torch.compile splits the graph of a DDP model where the buckets end
("whole graph": it does not). FSDP keeps only its shard of the parameters and gathers the others
when they are needed ("wrap": block by block, and never all at once). What each costs and saves is
measured side by side; --bare, --ddp or --fsdp measures one of them alone.

    make 07_resnet_ddp/compile_ddp NPROC=2
    make 07_resnet_ddp/compile_ddp NETWORK=1gbit,1ms
    python 07_resnet_ddp/compile_ddp/compile_ddp.py --compile aot_eager            (one process)
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/compile_ddp/compile_ddp.py --ddp
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        07_resnet_ddp/compile_ddp/compile_ddp.py --fsdp    (two hosts; R is 0 on HOST0, else 1)

Source: PyTorch's benchmarks/dynamo/distributed.py, here with today's fully_shard in place of
FullyShardedDataParallel; its flags are understood. The models are in compile_models.py.
"""

import importlib.util
import logging
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

FOLDERS = [*Path(__file__).resolve().parents[1:3]]
FOLDERS.append(FOLDERS[1] / "06_sharded_optimizer")
sys.path[:0] = map(str, FOLDERS)

from compile_models import blocks_of, create
from memory import held_bytes, peak_bytes
from resnet_ddp import be_the_only_rank

from common import report, setup, timing
from common.setup import say


class Row(NamedTuple):
    """Says how to run the model."""

    how: str  # "bare": on its own, "ddp": replicated, "fsdp": with its parameters split
    backend: str | None = None  # of torch.compile; None: eager; "print": prints the graphs
    wrap: bool = False  # FSDP: each block its own unit
    checkpoint: bool = False  # FSDP: computes each block's activations again in backward
    split: bool = True  # DDP: torch.compile splits the graph where a bucket ends

    @property
    def name(self) -> str:
        words = [self.how, self.backend or "eager"]
        if self.backend == "eager":
            words[1] = "dynamo only"  # torch.compile's backend that leaves the graphs as they are
        if self.wrap:
            words.append("wrap")
        if self.checkpoint:
            words.append("checkpoint")
        if not self.split:
            words.append("whole graph")
        return " ".join(words)


def distribute(model: nn.Module, row: Row) -> tuple[nn.Module, list]:
    """Return the model as a row wants it, and a list for the graphs of torch.compile.

    A graph is added to the list when it is handed to the backend.
    """
    graphs = []

    def remember_and_compile(graph, example_inputs):
        graphs.append(graph)
        if row.backend != "print":
            return torch._dynamo.lookup_backend(row.backend)(graph, example_inputs)
        say(f"graph {len(graphs)}:\n{graph.print_readable(print_output=False)}")
        return graph.forward

    def compiled(function):
        if row.backend is None:
            return function
        return torch.compile(function, backend=remember_and_compile)

    torch._dynamo.config.optimize_ddp = row.split
    torch._dynamo.config.cache_size_limit = 64  # with `wrap` all blocks are versions of one forward
    if row.how == "fsdp":
        return shard(model, row, compiled), graphs
    if row.how == "ddp":
        model = DistributedDataParallel(model)
    return compiled(model), graphs


def shard(model: nn.Module, row: Row, compiled) -> nn.Module:
    """Split the model's parameters over the ranks by FSDP, and compile it by `compiled`.

    FSDP gathers, uses and frees one unit after the other. With `wrap` each block is a unit and
    compiled by itself; without it the model is the only one. `checkpoint` keeps no activations
    inside a block and computes them again in backward.
    """
    blocks = blocks_of(model)
    if not blocks and (row.wrap or row.checkpoint):
        setup.fail(
            "argument --torchbench-model: only the blocks of hf_Bert and hf_T5 are known here: "
            "measure others with --bare, with --ddp, or with --fsdp alone"
        )
    for block in blocks:
        if row.wrap:
            # Not the module, because FSDP gathers in its hooks, and no graph crosses a hook.
            block.forward = compiled(block.forward)
        if row.checkpoint:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if row.wrap:
            fully_shard(block)
    fully_shard(model)  # with `wrap` it holds what is in no block
    return model if row.wrap else compiled(model)


def forward(model: nn.Module, inputs: tuple) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return all outputs that have gradients, and the loss, the sum of their mean squares."""
    leaves = tree_leaves(model(*inputs))
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    loss = sum(output.square().mean() for output in outputs)
    return outputs, loss


def forward_backward(model: nn.Module, inputs: tuple) -> list[torch.Tensor]:
    """Run what is measured; return the outputs."""
    with record_function("Forward"):
        outputs, loss = forward(model, inputs)
    with record_function("Backward"):
        loss.backward()
    return outputs


# ==================================================================================================
# Below this line: the comparison with eager mode on a single device, memory, the command line.


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """Return all gradients that there are; FSDP's shards are gathered."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]


def reference(args, device) -> dict[str, list[torch.Tensor]]:
    """Return outputs and gradients in eager mode without DDP or FSDP, by Row.how.

    "bare": gradients of this rank alone; the others: averaged over the ranks.
    """
    model, inputs = create(args, device)
    outputs = forward_backward(model, inputs)
    averaged = [gradient / dist.get_world_size() for gradient in gradients_of(model)]
    for gradient in averaged:
        dist.all_reduce(gradient)
    of_all = [*outputs, *averaged]
    return {"bare": [*outputs, *gradients_of(model)], "ddp": of_all, "fsdp": of_all}


def difference(tensors: list, expected: list) -> float:
    """Return the largest deviation of a tensor, as a fraction of its norm.

    A little of the largest norm is added, so that the rounding of zeros does not count.
    """
    least = 1e-3 * max(tensor.norm() for tensor in expected)
    pairs = zip(tensors, expected, strict=True)
    deviations = [(ours - theirs).norm() / (theirs.norm() + least) for ours, theirs in pairs]
    return torch.stack(deviations).max().item()  # unlike Python's max it keeps a nan


TOLERANCE = 1e-3


def first_steps(args, device, row: Row, expected: dict) -> tuple:
    """Take a row's first steps; return its step, to be measured, and what they show.

    Ends the run if outputs or gradients are too far from those expected. Those of a model of
    torchbench may be, because it may have dropout.
    """
    from torch._inductor.utils import fresh_cache

    model, inputs = create(args, device)
    model, graphs = distribute(model, row)
    if args.verbose:
        say(f"{row.name}:\n{model}")
    watch = timing.Stopwatch(device)

    def step() -> dict[str, float]:
        watch.mark("start")
        forward_backward(model, inputs)
        watch.mark("end")
        model.zero_grad()
        return {"forward_backward_seconds": watch.seconds("start", "end")}

    found = {"name": row.name}
    with fresh_cache():  # else the first call would find the kernels of another row
        watch.mark("start")
        outputs = forward_backward(model, inputs)
        watch.mark("end")
        found["first_call_seconds"] = watch.seconds("start", "end")
        found["deviation"] = difference([*outputs, *gradients_of(model)], expected[row.how])
        model.zero_grad()
        step()  # after its first backward DDP arranges the buckets anew
        # The least is right: the profiler may miss what gloo's thread releases, and counts more.
        peak = min(peak_bytes(step, device) for _ in range(3))
    within = f"within {found['deviation']:.1e} of eager single-device"
    compared = f"{row.name}: outputs and gradients {within}"
    say(compared)
    if not (found["deviation"] <= TOLERANCE or args.torchbench_model):  # so that nan is caught, too
        sys.exit(f"error: rank {dist.get_rank()}: {compared}, not {TOLERANCE:.0e}")
    if args.torchviz:
        draw_graph(model, inputs, row.name)
    parameters = list(model.parameters())
    held = held_bytes(parameters)
    copies = 2 if row.how == "ddp" else 1  # DDP's buckets hold each gradient
    found["parameters"] = held // parameters[0].itemsize  # on this rank
    found["peak_bytes"] = peak + copies * held  # the most bytes of tensors during a step
    found["graphs"] = len(graphs)
    return step, found


def draw_graph(model: nn.Module, inputs: tuple, name: str) -> None:
    """Draw what backward walks through, by torchviz: a PDF and its text in results/."""
    from torchviz import make_dot

    _, loss = forward(model, inputs)
    names = dict(model.named_parameters())
    drawing = make_dot(loss, params=names, show_attrs=True, show_saved=True)
    loss.backward()  # DDP wants one after each forward
    model.zero_grad()
    if dist.get_rank() == 0:
        path = setup.ROOT / "results" / f"torchviz_{name.replace(' ', '_')}.dot"
        say(f"written: {drawing.render(path, format='pdf')}")


LEGEND = """\
mean and percentiles over all steps of all ranks; /bare eager: ratio of the p50s;
first call: with compilation and an empty cache; graphs: how many were compiled;
peak memory (of tensors) and parameters: what rank 0 holds"""


def print_results(results: list[dict]) -> None:
    """Print the table: a line for each row of the JSON."""
    samples = {result["name"]: result["forward_backward_seconds"] for result in results}
    table = []
    for result in results:
        seconds = samples[result["name"]]
        cells = [
            result["name"],
            f"{1000 * numpy.mean(seconds):.1f}",
            *report.milliseconds(seconds),
            report.ratio(seconds, samples.get("bare eager")),
            f"{result['first_call_seconds']:.1f}",
            str(result["graphs"]),
            f"{result['peak_bytes'] / 2**20:.1f}",
            f"{result['parameters'] / 1e6:.2f}",
        ]
        table.append(cells)
    header = ["forward + backward, ms", "mean", "p50", "p75", "p90", "p95", "/bare eager"]
    header += ["first call, s", "graphs", "peak memory, MB", "parameters, M"]
    say()
    report.print_table(header, table)
    say(LEGEND)


def rows_of(args) -> list[Row]:
    if args.only:
        options = args.fsdp_wrap, args.fsdp_checkpoint, not args.dynamo_no_optimize_ddp
        return [Row(args.only, args.compile, *options)]
    backend = args.compile or "inductor"
    return [
        Row("bare"),
        Row("bare", backend),
        Row("ddp"),
        Row("ddp", backend),
        Row("ddp", backend, split=False),
        Row("fsdp"),
        Row("fsdp", wrap=True),
        Row("fsdp", backend, wrap=True),
    ]


def add_arguments(parser) -> None:
    """Add the flags; upstream's are among them, in both of its spellings."""
    one_of = parser.add_mutually_exclusive_group()
    for how in ("bare", "ddp", "fsdp"):
        alone = {"action": "store_const", "const": how, "help": "measure it alone"}
        one_of.add_argument(f"--{how}", dest="only", **alone)
    add = parser.add_argument
    whole = setup.whole_number
    add("--model", choices=["toy", "lm"], default="lm")
    toy = {"dest": "model", "action": "store_const", "const": "toy", "help": "--model toy"}
    add("--toy-model", "--toy_model", **toy)
    name = "torchbench's model of this name, such as hf_Bert, where torchbench is installed"
    add("--torchbench-model", "--torchbench_model", metavar="NAME", help=name)
    size = "per rank (default: toy 20, lm 4, or torchbench's)"
    add("--batch-size", "--batch_size", type=whole(1), help=size)
    known = [*torch.compiler.list_backends(exclude_tags=()), "print"]
    backends = "torch.compile's backend: inductor, aot_eager, eager, …; print: print the graphs"
    add("--compile", "--dynamo", choices=known, metavar="NAME", help=backends)
    switches = {
        "--dynamo-no-optimize-ddp": "--ddp: don't split the graph where buckets end",
        "--fsdp-wrap": "--fsdp: make each block a unit; otherwise the model is the only one",
        "--fsdp-checkpoint": "--fsdp: compute each block's activations again in backward",
        "--gpu-memory-stats": "nothing more, because peak memory is always measured",
        "--profile": "--trace profile.json",
        "--torchviz": "draw the graph of backward into results/, by torchviz and graphviz's dot",
        "--verbose": "print each model as it is run, and what dynamo logs",
    }
    for switch, text in switches.items():
        spellings = {switch, "--" + switch[2:].replace("-", "_")}
        add(*sorted(spellings), action="store_true", help=text)
    add("--steps", "--repeat", type=whole(1), default=10, help="measured")
    add("--warmup", type=whole(0), default=3, help="steps before them, not measured")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    trace = "Chrome traces of three more steps: FILE.rank0, …"
    traces = ["--trace", "--trace-file", "--trace_file"]
    add(*traces, type=setup.output_file, metavar="FILE", help=trace)
    setup.add_process_group_arguments(parser)


def main():
    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    if "RANK" not in os.environ:  # no torchrun
        be_the_only_rank()
    if args.torchviz and not (importlib.util.find_spec("torchviz") and shutil.which("dot")):
        setup.fail("argument --torchviz: pip install torchviz, and install graphviz")
    if args.profile and not args.trace:
        args.trace = Path("profile.json")
    levels = {"dynamo": logging.DEBUG} if args.verbose else {}
    torch._logging.set_logs(all=logging.ERROR, **levels)  # unless TORCH_LOGS says otherwise
    torch._dynamo.config.verbose = args.verbose

    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("07_resnet_ddp/compile_ddp", args, device)
        model = args.torchbench_model or args.model
        say(f"{model}; {args.steps} steps are measured, after {args.warmup} to warm up\n")
        expected = reference(args, device)
        steps = {}
        result["rows"] = []
        for row in rows_of(args):
            setup.progress(f"{row.name}: its first steps")
            steps[row.name], found = first_steps(args, device, row, expected)
            result["rows"].append(found)
        samples = timing.measure(steps, args.steps, args.warmup)
        for found in result["rows"]:
            found |= samples[found["name"]]
        print_results(result["rows"])
        timing.profile(steps, args.trace)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
