r"""07: one forward and backward of DDP and of FSDP, eager and compiled.

Two things want the same graph: a compiler wants it whole, DDP wants a pause after every bucket, to
all-reduce it while the rest is still computed. So torch.compile splits the graph of a DDP model
where the buckets end ("whole graph": it does not). FSDP keeps only its shard of the parameters and
gathers the others when they are needed ("wrap": block by block, and never all at once). What each
costs and saves is measured side by side; --bare, --ddp or --fsdp takes one of them.

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
from torch.utils.checkpoint import checkpoint

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

from compile_models import create  # noqa: E402
from resnet_ddp import be_the_only_rank  # noqa: E402

from common import report, setup, timing  # noqa: E402
from common.setup import say  # noqa: E402


class Configuration(NamedTuple):
    """One way to run the model."""

    how: str  # "bare": on its own, "ddp": replicated, "fsdp": with its parameters split
    backend: str | None = None  # of torch.compile; None: eager; "print": prints the graphs
    wrap: bool = False  # FSDP: each block its own unit
    checkpoint: bool = False  # FSDP: computes each block's activations again in backward
    split: bool = True  # DDP: torch.compile splits the graph where a bucket ends

    @property
    def name(self) -> str:
        # torch.compile's backend of the name "eager" leaves the graphs as they are.
        backend = {None: "eager", "eager": "dynamo only"}.get(self.backend, self.backend)
        wrap = " wrap" if self.wrap else ""
        again = " checkpoint" if self.checkpoint else ""
        whole = "" if self.split else " whole graph"
        return f"{self.how} {backend}{wrap}{again}{whole}"


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: the outermost modules with children that stand in a list."""
    blocks = []
    is_list = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child in module.children():
        if is_list and list(child.children()) and list(child.parameters()):
            blocks.append(child)
        else:
            blocks += blocks_of(child)
    return blocks


def distribute(model: nn.Module, configuration: Configuration) -> tuple[nn.Module, list]:
    """The model as the configuration wants it.

    Second result: a list to which torch.compile adds every graph that it hands to the backend.
    """
    graphs = []

    def remember_and_compile(graph, example_inputs):
        graphs.append(graph)
        if configuration.backend != "print":
            return torch._dynamo.lookup_backend(configuration.backend)(graph, example_inputs)
        say(f"graph {len(graphs)}:\n{graph.print_readable(print_output=False)}")
        return graph.forward

    def compiled(function):
        if configuration.backend is None:
            return function
        return torch.compile(function, backend=remember_and_compile)

    configure_compiler(configuration)
    if configuration.how == "fsdp":
        return shard(model, configuration, compiled), graphs
    if configuration.how == "ddp":
        model = DistributedDataParallel(model)
    return compiled(model), graphs


def shard(model: nn.Module, configuration: Configuration, compiled) -> nn.Module:
    """The model with its parameters split over the ranks by FSDP, and compiled by `compiled`.

    FSDP gathers, uses and frees one unit after the other: with `wrap` a unit is one block and
    compiled by itself, otherwise the model. `checkpoint` keeps no activations inside a block and
    computes them again in backward.
    """
    for block in blocks_of(model):
        if configuration.wrap:
            # The function and not the module: FSDP gathers in hooks, and no graph crosses those.
            block.forward = compiled(block.forward)
        if configuration.checkpoint:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if configuration.wrap:
            fully_shard(block)
    fully_shard(model)  # with `wrap` it holds what is in no block
    return model if configuration.wrap else compiled(model)


def mean_square(outputs) -> torch.Tensor:
    """A loss for any model: the mean square of each floating-point tensor it returns, summed."""
    return sum(tensor.square().mean() for tensor in floats(outputs))


def forward_backward(model: nn.Module, inputs: tuple):
    """One step as it is measured; returns the outputs."""
    with record_function("Forward"):
        outputs = model(*inputs)
        loss = mean_square(outputs)
    with record_function("Backward"):
        loss.backward()
    return outputs


# ==================================================================================================
# Below this line: the compiler's settings, the comparison with eager mode on a single device, the
# configurations, the command line.


def configure_compiler(configuration: Configuration) -> None:
    """Settings of torch.compile until the next configuration."""
    torch._dynamo.config.optimize_ddp = configuration.split
    # With --fsdp-wrap every kind of block is a version of one forward.
    torch._dynamo.config.cache_size_limit = 64


def empty_cache():
    """A context in which inductor does not find what it compiled before."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def log_compiler(verbose: bool) -> None:
    """Let torch log errors only; with `verbose` what dynamo does, on rank 0."""
    messages = {}
    if verbose and setup.is_rank_0():
        messages = {"dynamo": logging.DEBUG, "graph_breaks": True, "recompiles": True}
    torch._logging.set_logs(all=logging.ERROR, **messages)


def floats(values) -> list[torch.Tensor]:
    """The floating-point tensors in tuples, lists and dicts of any depth."""
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def outcome(model: nn.Module, outputs) -> list[torch.Tensor]:
    """The outputs and all gradients; FSDP's shards are gathered."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]
    return [*floats(outputs), *whole]


def reference(args, device) -> dict[str, list[torch.Tensor]]:
    """Eager, without DDP or FSDP: the outcome of this rank alone, and with averaged gradients."""
    model, inputs = create(args, device)
    outputs = forward_backward(model, inputs)
    alone = outcome(model, outputs)
    averaged = [tensor / dist.get_world_size() for tensor in outcome(model, [])]
    for gradient in averaged:
        dist.all_reduce(gradient)
    averaged = [*floats(outputs), *averaged]
    return {"bare": alone, "ddp": averaged, "fsdp": averaged}


def difference(tensors: list, expected: list) -> float:
    """The largest deviation of a tensor, as a fraction of its norm (and a little of the largest).

    That little keeps the rounding of a tensor that should be zero from counting.
    """
    least = 1e-3 * max(tensor.norm() for tensor in expected)
    pairs = zip(tensors, expected, strict=True)
    deviations = [(ours - theirs).norm() / (theirs.norm() + least) for ours, theirs in pairs]
    return torch.stack(deviations).max().item()  # unlike Python's max it keeps a nan


def prepare(args, device, configuration: Configuration, expected: dict) -> tuple:
    """Build a configuration, time its first call, compare it with `expected`, take its memory.

    Returns a step to measure, and what was found. Ends the run if outputs or gradients are too far
    from those expected.
    """
    model, inputs = create(args, device)
    model, graphs = distribute(model, configuration)
    watch = timing.Stopwatch(device)

    def step():
        watch.mark("start")
        outputs = forward_backward(model, inputs)
        watch.mark("end")
        return outputs

    def measured_step():
        step()
        model.zero_grad()
        return {"forward_backward_seconds": watch.seconds("start", "end")}

    deviation = difference(outcome(model, step()), expected[configuration.how])
    first_call = watch.seconds("start", "end")
    compared = (
        f"{configuration.name}: outputs and gradients within {deviation:.1e} of eager single-device"
    )
    tolerance = 1e-2 if device.type == "cuda" else 1e-3  # there convolutions may use TF32, 10 bits
    if not deviation <= tolerance:  # so that nan is caught, too
        sys.exit(f"error: rank {dist.get_rank()}: only {compared} (allowed: {tolerance:.0e})")
    say(compared)
    model.zero_grad()
    measured_step()  # after its first backward DDP arranges the buckets anew
    # The least is right: the profiler may miss what gloo's thread releases, and then counts more.
    peak = min(report.peak_bytes(measured_step, device) for _ in range(3))
    held = report.held_bytes(model.parameters())
    peak += held + report.held_bytes([*model.buffers(), *floats(inputs)])
    if configuration.how == "ddp":  # its buckets have a place for each gradient
        peak += held
    if args.verbose:
        say(f"\n{configuration.name}: {model}")
    if args.graph:
        write_graph(args.graph, model, inputs)
    return measured_step, {
        "name": configuration.name,
        "first_call_seconds": first_call,
        "deviation": deviation,
        "peak_bytes": peak,
        "parameters": held // next(model.parameters()).itemsize,  # all are of one dtype
        "graphs": len(graphs),
    }


LEGEND = """\
mean and percentiles over all steps of all ranks; /bare eager: ratio of the p50s;
first call: compilation included, nothing cached; graphs: compiled;
peak memory of tensors, parameters held: of rank 0"""


def print_results(results: list[dict], dilation: float) -> None:
    """The table: a row per configuration of the JSON."""
    samples = {result["name"]: result["forward_backward_seconds"] for result in results}
    rows = []
    for result in results:
        seconds = numpy.array(samples[result["name"]]) / dilation
        row = [
            result["name"],
            f"{1000 * seconds.mean():.1f}",
            *report.milliseconds(seconds),
            report.ratio(samples[result["name"]], samples.get("bare eager")),
            f"{result['first_call_seconds']:.1f}",
            str(result["graphs"]),
            f"{result['peak_bytes'] / 2**20:.1f}",
            f"{result['parameters'] / 1e6:.2f}",
        ]
        rows.append(row)
    header = ["forward + backward, ms", "mean", "p50", "p75", "p90", "p95", "/bare eager"]
    header += ["first call, s", "graphs", "peak memory, MB", "parameters, M"]
    say()
    report.print_table(header, rows)
    say(LEGEND)


def write_graph(path: Path, model: nn.Module, inputs: tuple) -> None:
    """The autograd graph of one step, with what its nodes save, as Graphviz text by torchviz."""
    import torchviz

    loss = mean_square(model(*inputs))
    if dist.get_rank() == 0:
        parameters = dict(model.named_parameters())
        graph = torchviz.make_dot(loss, parameters, show_attrs=True, show_saved=True)
        path.write_text(graph.source)
        say(f"written: {path}")
    loss.backward()  # for DDP and FSDP, which expect one after every forward
    model.zero_grad()


def configurations_of(args) -> list[Configuration]:
    """What to measure."""
    if args.only:
        options = args.fsdp_wrap, args.fsdp_checkpoint, not args.dynamo_no_optimize_ddp
        return [Configuration(args.only, args.compile, *options)]
    backend = args.compile or "inductor"
    return [
        Configuration("bare"),
        Configuration("bare", backend),
        Configuration("ddp"),
        Configuration("ddp", backend),
        Configuration("ddp", backend, split=False),
        Configuration("fsdp"),
        Configuration("fsdp", wrap=True),
        Configuration("fsdp", backend, wrap=True),
    ]


def add_arguments(parser) -> None:
    """The flags; those of upstream are among them, in both of its spellings."""
    one_of = parser.add_mutually_exclusive_group()
    for how in ("bare", "ddp", "fsdp"):
        one_of.add_argument(f"--{how}", dest="only", action="store_const", const=how, help="alone")
    add = parser.add_argument
    whole = setup.whole_number
    add("--model", choices=["toy", "lm"], default="lm")
    toy = {"dest": "model", "action": "store_const", "const": "toy", "help": "--model toy"}
    add("--toy-model", "--toy_model", **toy)
    checkout = "one of torchbenchmark, through a checkout of it on PYTHONPATH"
    add("--torchbench-model", "--torchbench_model", metavar="NAME", help=checkout)
    size = "per rank (default: toy 20, lm 4)"
    add("--batch-size", "--batch_size", type=whole(1), help=size)
    known = [*torch.compiler.list_backends(exclude_tags=()), "print"]
    backends = "torch.compile's backend: inductor, aot_eager, eager, …; print: print the graphs"
    add("--compile", "--dynamo", choices=known, metavar="NAME", help=backends)
    switches = {
        "--dynamo-no-optimize-ddp": "--ddp: don't split the graph where buckets end",
        "--fsdp-wrap": "--fsdp: each block its own unit; otherwise the model is the only one",
        "--fsdp-checkpoint": "--fsdp: compute each block's activations again in backward",
        "--gpu-memory-stats": "in the end torch's summary of rank 0's GPU memory",
        "--verbose": "print the model; dynamo's debug log and graph breaks of rank 0",
        "--profile": "the same as --trace profile.json",
    }
    for switch, text in switches.items():
        spellings = {switch, "--" + switch[2:].replace("-", "_")}
        add(*sorted(spellings), action="store_true", help=text)
    add("--steps", "--repeat", type=whole(1), default=10, help="measured")
    add("--warmup", type=whole(0), default=3, help="steps before them, not measured")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    trace = "Chrome trace of three more steps of rank 0"
    traces = ["--trace", "--trace-file", "--trace_file"]
    add(*traces, type=setup.output_file, metavar="FILE", help=trace)
    graph = "the autograd graph for Graphviz; needs torchviz"
    file = {"nargs": "?", "const": Path("torchviz.dot"), "metavar": "FILE"}
    add("--graph", "--torchviz", type=setup.output_file, help=graph, **file)
    setup.add_process_group_arguments(parser)


def main():
    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    if args.profile:
        args.trace = args.trace or Path("profile.json")
    if args.graph and not (args.only and importlib.util.find_spec("torchviz")):
        setup.fail("argument --graph: needs --bare, --ddp or --fsdp, and pip install torchviz")
    if "RANK" not in os.environ:  # no torchrun
        be_the_only_rank()
    log_compiler(args.verbose)

    with setup.process_group(args.device, args.backend, args.timeout, args.network) as device:
        result = report.begin("07_resnet_ddp/compile_ddp", args, device)
        model = args.torchbench_model or args.model
        say(f"{model}; {args.steps} steps are measured, after {args.warmup} to warm up\n")
        expected = reference(args, device)
        steps = {}
        result["configurations"] = []
        for configuration in configurations_of(args):
            setup.progress(f"{configuration.name}: its first steps")
            with empty_cache():  # else the first call would find the kernels of another one
                steps[configuration.name], found = prepare(args, device, configuration, expected)
            result["configurations"].append(found)
        samples = timing.measure(steps, args.steps, args.warmup, setup.wire())
        for found in result["configurations"]:
            found |= samples[found["name"]]
        print_results(result["configurations"], result["dilation"])
        if args.gpu_memory_stats and device.type == "cuda":
            say(torch.cuda.memory_summary(device, abbreviated=True))
        timing.profile(steps, args.trace)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
