r"""07: one forward and backward of DDP and of FSDP, eager and compiled.

Two things want the same graph: a compiler wants it whole, DDP wants a pause after every bucket, to
all-reduce it while the rest is still computed. So torch.compile splits the graph of a DDP model
where the buckets end (--no-optimize-ddp: it does not). FSDP keeps only its shard of the parameters
and gathers the others when they are needed (--fsdp-wrap: block by block, and never all at once).
What each costs and saves is measured here, side by side; --bare, --ddp or --fsdp takes one of them,
--variants all that --fsdp-wrap, --fsdp-checkpoint and --no-optimize-ddp change.

    make 07_resnet_ddp/compile_ddp NPROC=2
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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent.parent)]

from compile_models import create  # noqa: E402
from resnet_ddp import be_the_only_rank  # noqa: E402
from upstream import as_ours  # noqa: E402

from common import memory, report, setup, timing  # noqa: E402
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
        name = f"{self.how} {self.backend or 'eager'}"
        if self.backend == "eager":  # that of torch.compile, which leaves the graphs as they are
            name = f"{self.how} dynamo only"
        if self.wrap:
            name += " wrap"
        if self.checkpoint:
            name += " checkpoint"
        if not self.split:
            name += " whole graph"
        return name


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
            return compile_graph(configuration.backend, graph, example_inputs)
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
# Below this line: what is private in torch, the comparison with eager mode on a single device, the
# configurations, the command line.


# Private in torch is what these five functions use, and nothing else here is.


def configure_compiler(configuration: Configuration) -> None:
    """Settings of torch.compile until the next configuration."""
    torch._dynamo.config.optimize_ddp = configuration.split
    # With --fsdp-wrap every kind of block is a version of one forward.
    torch._dynamo.config.cache_size_limit = 64
    if configuration.how == "fsdp":
        # A CUDA graph replays its addresses, and FSDP gathers the parameters at others each time.
        from torch._inductor import config

        config.triton.cudagraphs = False


def compile_graph(backend: str, graph, example_inputs: list):
    """What the backend of this name makes of a graph."""
    return torch._dynamo.lookup_backend(backend)(graph, example_inputs)


def empty_cache():
    """A context in which inductor does not find what it compiled before."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def log_compiler(verbose: bool) -> None:
    """Let torch log errors only; with `verbose` what dynamo does, on rank 0."""
    messages = {}
    if verbose and os.environ["RANK"] == "0":
        messages = {"dynamo": logging.DEBUG, "graph_breaks": True, "recompiles": True}
    torch._logging.set_logs(all=logging.ERROR, **messages)


def floats(values) -> list[torch.Tensor]:
    """The floating-point tensors in tuples, lists and dicts of any depth."""
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """All gradients; FSDP's shards are gathered."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [
        gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for gradient in gradients
    ]


def reference(args, device) -> dict[str, list[torch.Tensor]]:
    """Eager, without DDP or FSDP: outputs of this rank, and the gradients that each is to have."""
    model, inputs = create(args, device)
    outputs = [tensor.detach() for tensor in floats(forward_backward(model, inputs))]
    gradients = gradients_of(model)
    means = [gradient.clone() for gradient in gradients]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return {"outputs": outputs, "bare": gradients, "ddp": means, "fsdp": means}


def difference(tensors: list, expected: list) -> float:
    """The largest deviation of any tensor, relative to its own largest entry.

    To that a thousandth of the largest entry of all is added, so that the rounding of a tensor that
    should be zero does not count.
    """
    largest = max(tensor.abs().max() for tensor in expected)
    deviations = []
    for ours, theirs in zip(tensors, expected, strict=True):
        scale = theirs.abs().max() + largest / 1000
        deviations.append((ours - theirs).abs().max() / scale)
    return torch.stack(deviations).max().item()  # unlike Python's max it keeps a nan


def prepare(args, device, configuration: Configuration, expected: dict) -> dict:
    """Build a configuration, time its first call, compare it with `expected`, take its memory."""
    model, inputs = create(args, device)
    if (configuration.wrap or configuration.checkpoint) and not blocks_of(model):
        setup.fail(
            "argument --fsdp-wrap, --fsdp-checkpoint: this model has no blocks to take one by one"
        )
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

    outputs = floats(step())
    found = {
        "first_call_seconds": watch.seconds("start", "end"),
        "output_difference": difference(outputs, expected["outputs"]),
        "gradient_difference": difference(gradients_of(model), expected[configuration.how]),
    }
    del outputs
    model.zero_grad()
    measured_step()  # after its first backward DDP arranges the buckets anew
    # The least is right: the profiler may miss what gloo's thread releases, and then counts more.
    peak = min(memory.peak_bytes(measured_step, device) for _ in range(3))
    held = memory.held_bytes(model.parameters())
    stays = held + memory.held_bytes([*model.buffers(), *floats(inputs)])
    if configuration.how == "ddp":  # its buckets have a place for each gradient
        stays += held
    found["peak_bytes"] = stays + peak
    found["parameters"] = held // next(model.parameters()).itemsize  # all are of one dtype
    found["graphs"] = len(graphs)
    return {"step": measured_step, "model": model, "inputs": inputs, "found": found}


def problem_of(backend: str | None, device) -> str:
    """Why a backend of torch.compile does not work on some rank; "" if it does on all.

    It compiles something tiny, where no rank waits for another in a collective: without g++, Triton
    or what else the backend needs that fails.
    """
    problem = ""
    try:
        if backend not in (None, "print"):
            torch.compile(torch.sin, backend=backend)(torch.ones(8, device=device))
    except Exception as error:  # compilers have many kinds
        cause = getattr(error, "inner_exception", error)
        message = str(cause).strip().partition("\n")[0] or type(cause).__name__
        problem = f"{message} (rank {dist.get_rank()})"
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return max(problems)


def prepare_all(args, device, wanted: list[Configuration]) -> tuple[dict, dict]:
    """Prepare all: by name those that can be measured, and why the others cannot.

    Ends the run if one is too far from eager mode on a single device.
    """
    tolerance = 1e-2 if device.type == "cuda" else 1e-3  # there convolutions may use TF32, 10 bits
    setup.progress("eager on a single device")
    expected = reference(args, device)
    prepared = {}
    left_out = {}
    for number, configuration in enumerate(wanted, 1):
        name = configuration.name
        setup.progress(f"{name}, {number} of {len(wanted)}")
        with empty_cache():  # else the first call would find the kernels of another one
            problem = problem_of(configuration.backend, device)
            if problem:
                left_out[name] = problem
                continue
            prepared[name] = prepare(args, device, configuration, expected)
        outputs = prepared[name]["found"]["output_difference"]
        gradients = prepared[name]["found"]["gradient_difference"]
        compared = (
            f"outputs within {outputs:.1e}, gradients within {gradients:.1e} of eager "
            f"single-device (allowed: {tolerance:.0e})"
        )
        if not (outputs <= tolerance and gradients <= tolerance):  # so that nan is caught, too
            sys.exit(f"error: {name}, rank {dist.get_rank()}: only {compared}")
        say(f"{name}: {compared}")
    return prepared, left_out


LEGEND = """\
mean and percentiles over all steps of all ranks; /bare eager: ratio of the p50s;
first call: compilation included, nothing cached; graphs: compiled;
peak memory of tensors, parameters held: of rank 0"""


def print_results(results: list[dict], left_out: dict) -> None:
    """The table: a row per configuration of the JSON."""
    samples = {result["name"]: result["forward_backward_seconds"] for result in results}
    rows = []
    for result in results:
        seconds = samples[result["name"]]
        row = [
            result["name"],
            f"{1000 * torch.tensor(seconds).mean():.1f}",
            *report.milliseconds(seconds),
            report.ratio(seconds, samples.get("bare eager")),
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
    for name, problem in left_out.items():
        say(f"{name}: not measured: {problem}")
    say(LEGEND)


def write_graph(path: Path, model: nn.Module, inputs: tuple) -> None:
    """The autograd graph of one step, with what its nodes save, as Graphviz text through torchviz.

    Where Graphviz is installed it is drawn as well: FILE.pdf.
    """
    import torchviz

    loss = mean_square(model(*inputs))
    if dist.get_rank() == 0:
        parameters = dict(model.named_parameters())
        graph = torchviz.make_dot(loss, parameters, show_attrs=True, show_saved=True)
        path.write_text(graph.source)
        if shutil.which("dot"):
            graph.render(path)
        say(f"written: {path}")
    loss.backward()  # for DDP and FSDP, which expect one after every forward


def configurations_of(args) -> list[Configuration]:
    """What to measure."""
    backend = args.compile or "inductor"
    if args.variants:
        return [
            Configuration("bare"),
            Configuration("ddp"),
            Configuration("fsdp"),
            Configuration("fsdp", wrap=True),
            Configuration("fsdp", checkpoint=True),
            Configuration("fsdp", wrap=True, checkpoint=True),
            Configuration("ddp", backend),
            Configuration("ddp", backend, split=False),
        ]
    ddp = Configuration("ddp", split=not args.no_optimize_ddp)
    fsdp = Configuration("fsdp", None, args.fsdp_wrap, args.fsdp_checkpoint)
    configurations = []
    for eager in (Configuration("bare"), ddp, fsdp):
        if args.only == eager.how:
            return [eager._replace(backend=args.compile)]
        configurations += [eager, eager._replace(backend=backend)]
    return configurations


UPSTREAM = {  # flags of benchmarks/dynamo/distributed.py that have another name here
    "--toy-model": "--model=toy",
    "--dynamo": "--compile",
    "--dynamo-no-optimize-ddp": "--no-optimize-ddp",
    "--repeat": "--steps",
    "--trace-file": "--trace",
    "--torchviz": "--graph",
}


def add_arguments(parser) -> None:
    """The flags, apart from those of the process group."""
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", choices=["toy", "lm"], default="lm")
    checkout = "one of torchbenchmark, through a checkout of it on PYTHONPATH"
    models.add_argument("--torchbench-model", metavar="NAME", help=checkout)
    one_of = parser.add_mutually_exclusive_group()
    for how in ("bare", "ddp", "fsdp"):
        one_of.add_argument(f"--{how}", dest="only", action="store_const", const=how, help="alone")
    variants = "what --fsdp-wrap, --fsdp-checkpoint and --no-optimize-ddp change, side by side"
    one_of.add_argument("--variants", action="store_true", help=variants)
    add = parser.add_argument
    add("--batch-size", type=setup.whole_number(1), help="per rank (default: toy 20, lm 4)")
    known = [*torch.compiler.list_backends(exclude_tags=()), "print"]
    backends = "torch.compile's backend: inductor, aot_eager, eager, …; print: print the graphs"
    add("--compile", choices=known, metavar="NAME", help=backends)
    switches = {
        "--no-optimize-ddp": "don't split the graph where DDP's buckets end",
        "--fsdp-wrap": "each block its own unit; otherwise the model is the only one",
        "--fsdp-checkpoint": "compute each block's activations again in backward",
        "--verbose": "print the model; dynamo's debug log and graph breaks of rank 0",
        "--profile": "the same as --trace profile.json",
        "--gpu-memory-stats": "as upstream; the table always has the peak",
    }
    for switch, text in switches.items():
        add(switch, action="store_true", help=text)
    add("--steps", type=setup.whole_number(1), default=10, help="measured")
    add("--warmup", type=setup.whole_number(0), default=3, help="steps before them, not measured")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    trace = "Chrome trace of three more steps of rank 0"
    add("--trace", type=setup.output_file, metavar="FILE", help=trace)
    graph = "the autograd graph for Graphviz, drawn where that is installed; needs torchviz"
    file = {"nargs": "?", "const": Path("torchviz.dot"), "metavar": "FILE"}
    add("--graph", type=setup.output_file, help=graph, **file)


def check(args) -> None:
    """Fill in args.trace; end the run if flags contradict each other, or need what is not here."""
    if args.profile and not args.trace:
        args.trace = Path("profile.json")
    if not args.only and (args.trace or args.graph or args.compile == "print"):
        setup.fail("argument --trace, --graph, --compile print: only with --bare, --ddp or --fsdp")
    if args.graph and not importlib.util.find_spec("torchviz"):
        setup.fail("argument --graph: needs torchviz, which is not installed: pip install torchviz")
    if args.torchbench_model:
        try:
            importlib.import_module(f"torchbenchmark.models.{args.torchbench_model}")
        except ImportError as error:
            setup.fail(
                f"argument --torchbench-model: '{args.torchbench_model}' needs a checkout of "
                f"github.com/pytorch/benchmark on PYTHONPATH and its install.py run ({error})"
            )


def main():
    parser = setup.Parser(__doc__)
    add_arguments(parser)
    setup.add_process_group_arguments(parser)
    args = parser.parse_args(as_ours(sys.argv[1:], UPSTREAM))
    check(args)
    if "RANK" not in os.environ:  # no torchrun
        be_the_only_rank()
    log_compiler(args.verbose)

    with setup.process_group(args) as device:
        result = report.begin("07_resnet_ddp/compile_ddp", args, device)
        model = args.torchbench_model or args.model
        say(f"{model}; {args.steps} steps are measured, after {args.warmup} to warm up\n")
        prepared, left_out = prepare_all(args, device, configurations_of(args))
        if not prepared:
            name, problem = left_out.popitem()
            setup.fail(f"{name} does not work here: {problem}")
        if args.verbose:
            for name, one in prepared.items():
                say(f"\n{name}: {one['model']}")
        steps = {name: one["step"] for name, one in prepared.items()}
        samples = timing.measure(steps, args.steps, args.warmup)
        result["configurations"] = []
        for name, one in prepared.items():
            result["configurations"].append({"name": name, **one["found"], **samples[name]})
        result["left_out"] = left_out
        print_results(result["configurations"], left_out)
        timing.profile(steps, args.trace)
        if args.graph:
            [one] = prepared.values()
            write_graph(args.graph, one["model"], one["inputs"])
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
