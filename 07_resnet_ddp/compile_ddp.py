r"""07: one forward and backward of DDP and of FSDP, eager and compiled.

Two things want the same graph: a compiler wants it whole, DDP wants a pause after every bucket, to
all-reduce it while the rest is still computed. So torch.compile splits the graph of a DDP model
where the buckets end (--no-optimize-ddp: it does not). FSDP keeps only its shard of the parameters
and gathers the others when they are needed (--fsdp-wrap: block by block, and never all at once).
What each costs and saves is measured here; --matrix does it side by side.

    make 07_resnet_ddp/compile_ddp NPROC=2 ARGS=--matrix
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/compile_ddp.py --ddp --compile inductor
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        07_resnet_ddp/compile_ddp.py --fsdp --fsdp-wrap     (two hosts; R is 0 on HOST0, else 1)

Source: PyTorch's benchmarks/dynamo/distributed.py, here with today's fully_shard in place of
FullyShardedDataParallel. The models are in compile_models.py, memory is in peak_memory.py.
"""

import importlib.util
import logging
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

try:
    from torch._inductor.utils import fresh_cache
except ImportError:
    from torch._inductor.utils import fresh_inductor_cache as fresh_cache  # its older name


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: the outermost modules with parts that stand in a list."""
    blocks = []
    is_list = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child in module.children():
        if is_list and list(child.children()) and list(child.parameters()):
            blocks.append(child)
        else:
            blocks += blocks_of(child)
    return blocks


def distribute(
    model: nn.Module,
    how: str,
    backend: str | None = None,
    wrap_blocks: bool = False,
    checkpoint_blocks: bool = False,
) -> tuple[nn.Module, list]:
    """The model on its own ("bare"), replicated ("ddp") or with its parameters split ("fsdp").

    It is compiled unless `backend` is None. Second result: a list to which torch.compile adds every
    graph that it hands to the backend. FSDP's options and errors: see `shard`.
    """
    graphs = []

    def remember_and_compile(graph, example_inputs):
        graphs.append(graph)
        if backend != "print":
            compile_graph = torch._dynamo.lookup_backend(backend)
            return compile_graph(graph, example_inputs)
        if dist.get_rank() == 0:
            code = graph.print_readable(print_output=False)
            print(f"graph {len(graphs)}:\n{code}", flush=True)
        return graph.forward

    def compiled(function):
        if backend is None:
            return function
        return torch.compile(function, backend=remember_and_compile)

    if how == "fsdp":
        return shard(model, compiled, wrap_blocks, checkpoint_blocks), graphs
    if how == "ddp":
        device = next(model.parameters()).device
        device_ids = None
        if device.type == "cuda":
            device_ids = [device]
        model = DistributedDataParallel(model, device_ids)
    return compiled(model), graphs


def shard(model: nn.Module, compiled, wrap_blocks: bool, checkpoint_blocks: bool) -> nn.Module:
    """The model with its parameters split over the ranks by FSDP, and compiled by `compiled`.

    FSDP gathers, uses and frees one unit after the other: with `wrap_blocks` a unit is one block
    and compiled by itself, otherwise the model. `checkpoint_blocks` keeps no activations inside a
    block and computes them again in backward. ValueError if there are no such blocks, RuntimeError
    if this torch has no FSDP for CPUs.
    """
    device = next(model.parameters()).device
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise RuntimeError("fully_shard on a CPU needs torch 2.7 or newer")
    blocks = blocks_of(model)
    if (wrap_blocks or checkpoint_blocks) and not blocks:
        raise ValueError("the model has no blocks that could be wrapped or checkpointed one by one")
    for block in blocks:
        if wrap_blocks:
            # The function and not the module: FSDP gathers in hooks, and no graph crosses those.
            block.forward = compiled(block.forward)
        if checkpoint_blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if wrap_blocks:
            fully_shard(block)
    fully_shard(model)  # with wrap_blocks it holds what is in no block
    if wrap_blocks:
        return model
    return compiled(model)


def floats(outputs) -> list[torch.Tensor]:
    """The floating-point tensors in whatever a model returns."""
    tensors = [leaf for leaf in tree_leaves(outputs) if torch.is_tensor(leaf)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


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
# Below this line: the comparison with eager single-device, the cells, the command line.


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """All gradients, whole: FSDP's shards are gathered. Zeros for a parameter without one."""
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        gradients.append(gradient.detach().clone())
    return gradients


def reference(args, device) -> tuple[list, list, list]:
    """Eager on this device alone, the inputs of all ranks one after the other.

    Returns the outputs and gradients for this rank's inputs, and the mean of all ranks' gradients.
    """
    from compile_models import create_model, move

    model, inputs = create_model(args, device)
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, move(inputs, "cpu"))
    mean_gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank, inputs in enumerate(everyones):
        model.zero_grad()
        outputs = forward_backward(model, move(inputs, device))
        gradients = gradients_of(model)
        for mean, gradient in zip(mean_gradients, gradients, strict=True):
            mean += gradient / len(everyones)
        if rank == dist.get_rank():
            my_outputs = [tensor.detach() for tensor in floats(outputs)]
            my_gradients = gradients
    return my_outputs, my_gradients, mean_gradients


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


def prepare(args, device, how: str, backend: str | None, expected: tuple) -> dict:
    """Build one cell of the matrix, time its first call, check it, take its memory.

    It is checked against `expected`, which is what `reference` returns.
    """
    from compile_models import create_model
    from peak_memory import bytes_held, held_here, peak_memory

    from common.timing import Stopwatch

    model, inputs = create_model(args, device)
    model, graphs = distribute(model, how, backend, args.fsdp_wrap, args.fsdp_checkpoint)
    watch = Stopwatch(device)

    def step():
        model.zero_grad()
        watch.mark("start")
        outputs = forward_backward(model, inputs)
        watch.mark("end")
        return outputs, watch.seconds("start", "end")

    def measured_step():
        return {"seconds": step()[1]}

    expected_outputs, my_gradients, mean_gradients = expected
    expected_gradients = mean_gradients
    if how == "bare":
        expected_gradients = my_gradients
    outputs, first = step()
    differences = (
        difference([tensor.detach() for tensor in floats(outputs)], expected_outputs),
        difference(gradients_of(model), expected_gradients),
    )
    del outputs
    step()  # after its first backward DDP arranges the buckets anew
    peaks = []
    for _ in range(3):
        model.zero_grad()
        peaks.append(peak_memory(step, device))
    # The least is right: the profiler may miss what gloo's thread releases, and then counts more.
    peak = bytes_held(model, inputs, how) + min(peaks)
    return {
        "step": measured_step,
        "model": model,
        "inputs": inputs,
        "first": first,
        "graphs": graphs,
        "peak": peak,
        "parameters": sum(held_here(parameter).numel() for parameter in model.parameters()),
        "differences": differences,
    }


def attempt(function) -> tuple:
    """Call a function on all ranks: its result and None, or None and why it failed on one of them.

    Every rank is told the same reason.
    """
    result, reason = None, None
    try:
        result = function()
    except Exception as error:  # compilers and models have many kinds
        cause = getattr(error, "inner_exception", error)
        message = str(cause) or type(error).__name__
        reason = message.splitlines()[0]
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for rank, reason in enumerate(reasons):
        if reason:
            return None, f"{reason} (rank {rank})"
    return result, None


def cell_name(how: str, backend: str | None) -> str:
    """How the output calls a cell of the matrix."""
    if backend == "eager":
        return f"{how} dynamo only"
    return f"{how} {backend or 'eager'}"


def prepare_all(args, device, plan: list[tuple[str, str | None]]) -> tuple[dict, dict]:
    """Prepare all cells: those that can be measured by name, and by name why the others cannot."""
    tolerance = 1e-3  # float32
    if device.type == "cuda":
        tolerance = 1e-2  # convolutions may use TF32, of 10 bits
    rank = dist.get_rank()
    expected = reference(args, device)
    cells, left_out = {}, {}
    for how, backend in plan:
        name = cell_name(how, backend)
        with fresh_cache():  # else the first call would find the kernels of another cell
            # First something tiny: without g++ or Triton it fails here, where no rank waits for
            # another in a collective.
            tiny = torch.sin
            if backend == "inductor":
                tiny = torch.compile(torch.sin, backend="inductor")
            _, problem = attempt(partial(tiny, torch.ones(8, device=device)))
            if not problem:
                cell, problem = attempt(partial(prepare, args, device, how, backend, expected))
        if problem:
            left_out[name] = problem
            continue
        outputs, gradients = cell["differences"]
        if not (outputs <= tolerance and gradients <= tolerance):  # so that nan is caught, too
            found = f"outputs {outputs:.1e}, gradients {gradients:.1e} away"
            allowed = f"from eager single-device; allowed: {tolerance:.0e}"
            sys.exit(f"{name}, rank {rank}: {found} {allowed}")
        if rank == 0:
            found = f"outputs within {outputs:.1e}, gradients within {gradients:.1e}"
            allowed = f"of eager single-device (allowed: {tolerance:.0e})"
            print(f"{name}: {found} {allowed}", flush=True)
        cells[name] = cell
    return cells, left_out


def print_results(cells: dict, samples: dict, bar: list[float] | None, left_out: dict) -> None:
    """The table: a row per cell. `samples`: their times; `bar`: those of bare eager, in seconds."""
    from common import report

    rows = []
    for name, cell in cells.items():
        seconds = samples[name]["seconds"]
        mean = sum(seconds) / len(seconds)
        ratio = "-"
        if bar:
            ratio = f"{report.percentiles(seconds)[0] / report.percentiles(bar)[0]:.2f}"
        row = [name, f"{1000 * mean:.1f}", *report.milliseconds(seconds), ratio]
        row += [f"{cell['first']:.1f}", str(len(cell["graphs"]))]
        row += [f"{cell['peak'] / 2**20:.1f}", f"{cell['parameters'] / 1e6:.2f}"]
        rows.append(row)
    header = ["forward + backward, ms", "mean", "p50", "p75", "p90", "p95", "/bare eager"]
    header += ["first call, s", "graphs", "peak memory, MB", "parameters, M"]
    print()
    report.print_table(header, rows)
    for name, problem in left_out.items():
        print(f"{name}: not measured: {problem}")
    print(
        "mean and percentiles over all steps of all ranks; /bare eager: ratio of the p50s; "
        "first call: compilation\nincluded, nothing cached; graphs: compiled; peak memory of "
        "tensors, parameters held: of rank 0",
        flush=True,
    )


def write_graph(path: Path, model: nn.Module, inputs: tuple) -> None:
    """The autograd graph of one step as Graphviz text, through torchviz."""
    import torchviz

    loss = mean_square(model(*inputs))
    if dist.get_rank() == 0:
        path.write_text(torchviz.make_dot(loss, params=dict(model.named_parameters())).source)
    loss.backward()  # for DDP and FSDP, which expect one after every forward


def write_trace(path: Path, step, repeat: int) -> None:
    """A Chrome trace of rank 0, with spans Forward and Backward."""
    with profile() as profiler:
        for _ in range(repeat):
            step()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(path))


def check_flags(args) -> None:
    """End the run now if flags contradict each other or need what is not there."""
    from common.setup import fail

    if args.matrix and (args.profile or args.graph or args.compile == "print"):
        single = "--profile, --graph and --compile print, which are for a single cell"
        fail(f"argument --matrix: not with {single}")
    if (args.fsdp_wrap or args.fsdp_checkpoint) and not (args.fsdp or args.matrix):
        fail("argument --fsdp-wrap, --fsdp-checkpoint: they need --fsdp or --matrix")
    if args.graph and not importlib.util.find_spec("torchviz"):
        fail("argument --graph: needs torchviz, which is not installed: pip install torchviz")


def plan_of(args) -> list[tuple[str, str | None]]:
    """The cells to measure: (how the model is distributed, backend of torch.compile)."""
    if args.matrix:
        backends = (None, args.compile or "inductor")
        return [(how, backend) for how in ("bare", "ddp", "fsdp") for backend in backends]
    if args.ddp:
        return [("ddp", args.compile)]
    if args.fsdp:
        return [("fsdp", args.compile)]
    return [("bare", args.compile)]


def add_arguments(parser) -> None:
    """The flags, apart from those of the models and the process group."""
    from common.setup import output_file, whole_number

    add = parser.add_argument
    one_of = parser.add_mutually_exclusive_group()
    bare = "neither: the bare model on every rank"
    matrix = "bare, ddp and fsdp, each eager and compiled, side by side"
    one_of.add_argument("--ddp", action="store_true")
    one_of.add_argument("--fsdp", action="store_true", help=bare)
    one_of.add_argument("--matrix", action="store_true", help=matrix)
    backends = ["inductor", "aot_eager", "eager", "print"]
    printing = "print: print the graphs (default: none; with --matrix inductor)"
    add("--compile", choices=backends, help=f"torch.compile's backend; {printing}")
    one_graph = "don't split the graph where DDP's buckets end"
    add("--no-optimize-ddp", action="store_true", help=one_graph)
    units = "each block its own unit; otherwise the model is the only one"
    add("--fsdp-wrap", action="store_true", help=units)
    again = "compute each block's activations again in backward"
    add("--fsdp-checkpoint", action="store_true", help=again)
    steps = "measured steps, after 3 others (default: 10)"
    add("--repeat", type=whole_number(1), default=10, help=steps)
    more = "print the model, graph breaks and recompilations"
    add("--verbose", action="store_true", help=more)
    add("--profile", action="store_true", help="write a Chrome trace to --trace-file")
    trace = Path("profile.json")
    default = f"(default: {trace})"
    add("--trace-file", type=output_file, default=trace, metavar="FILE", help=default)
    graph = "the autograd graph; needs torchviz"
    add("--graph", type=output_file, metavar="FILE.dot", help=graph)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import compile_models
        import peak_memory  # noqa: F401 (prepare needs it; what is missing is said here)

        from common import report, setup, timing
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/, compile_models.py and peak_memory.py"
        sys.exit(f"error: {error}: copy {needed} into {folder}")

    parser = setup.Parser(__doc__)
    compile_models.add_arguments(parser)
    add_arguments(parser)
    setup.add_process_group_arguments(parser)
    args = parser.parse_args()
    check_flags(args)
    compile_models.check(args)
    torch._dynamo.config.optimize_ddp = not args.no_optimize_ddp
    # With --fsdp-wrap every kind of block is a version of one forward.
    torch._dynamo.config.cache_size_limit = 64
    torch._logging.set_logs(all=logging.ERROR, graph_breaks=args.verbose, recompiles=args.verbose)

    with setup.process_group(args) as device:
        rank = dist.get_rank()
        if rank == 0:
            line = "torch {torch}, {backend} on {device}, {world_size} ranks, "
            line += "{threads_per_rank} threads per rank"
            print(line.format(**report.environment(device)))
            model = args.torchbench_model or args.model
            print(f"{model}, {args.repeat} steps after 3 for warming up\n", flush=True)
        cells, left_out = prepare_all(args, device, plan_of(args))
        if not args.matrix and left_out:
            name, problem = left_out.popitem()
            setup.fail(f"{name} does not work here: {problem}")
        if args.verbose and rank == 0:
            for name, cell in cells.items():
                print(f"\n{name}: {cell['model']}")
        steps = {name: cell["step"] for name, cell in cells.items()}
        samples = timing.measure(steps, args.repeat, warmup=3)
        bar = None
        if args.matrix and "bare eager" in cells:
            bar = samples["bare eager"]["seconds"]
        if rank == 0:
            print_results(cells, samples, bar, left_out)
        for cell in cells.values():  # with --profile or --graph there is only one
            if args.profile:
                write_trace(args.trace_file, cell["step"], args.repeat)
            if args.graph:
                write_graph(args.graph, cell["model"], cell["inputs"])


if __name__ == "__main__":
    main()
