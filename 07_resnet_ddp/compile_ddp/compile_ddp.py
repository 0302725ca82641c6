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
FullyShardedDataParallel. The flags are in compile_flags.py, the models in compile_models.py.
"""

import logging
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


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
        from common.setup import say

        say(f"graph {len(graphs)}:\n{graph.print_readable(print_output=False)}")
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
    block and computes them again in backward. ValueError if there are no such blocks.
    """
    # A CUDA graph replays its addresses, and FSDP gathers the parameters at others each time.
    torch._inductor.config.triton.cudagraphs = False
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
    inputs_of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(inputs_of_ranks, move(inputs, "cpu"))
    mean_gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank, inputs_of_rank in enumerate(inputs_of_ranks):
        model.zero_grad()
        outputs = forward_backward(model, move(inputs_of_rank, device))
        gradients = gradients_of(model)
        for mean, gradient in zip(mean_gradients, gradients, strict=True):
            mean += gradient / len(inputs_of_ranks)
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


def bytes_that_stay(model: nn.Module, inputs: tuple, how: str) -> int:
    """What this rank holds from step to step, apart from the gradients: also the buckets of DDP."""
    from common.memory import held_bytes

    inputs_of_step = [leaf for leaf in tree_leaves(inputs) if torch.is_tensor(leaf)]
    held = held_bytes([*model.parameters(), *model.buffers(), *inputs_of_step])
    if how == "ddp":  # its buckets have a place for each gradient
        held += held_bytes([p for p in model.parameters() if p.requires_grad])
    return held


def count_parameters(model: nn.Module) -> int:
    """The numbers that this rank holds: of what FSDP has split its shard."""
    count = 0
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter = parameter.to_local()
        count += parameter.numel()
    return count


def prepare(args, device, cell, expected: tuple) -> dict:
    """Build a compile_flags.Cell, time its first call, check it, take its memory.

    It is checked against `expected`, which is what `reference` returns.
    """
    from compile_models import create_model

    from common.memory import peak_bytes
    from common.timing import Stopwatch

    model, inputs = create_model(args, device)
    torch._dynamo.config.optimize_ddp = cell.split
    model, graphs = distribute(model, cell.how, cell.backend, cell.wrap, cell.checkpoint)
    watch = Stopwatch(device)

    def step():
        model.zero_grad()
        watch.mark("start")
        outputs = forward_backward(model, inputs)
        watch.mark("end")
        return outputs, watch.seconds("start", "end")

    def measured_step():
        return {"forward_backward_seconds": step()[1]}

    expected_outputs, my_gradients, mean_gradients = expected
    expected_gradients = my_gradients if cell.how == "bare" else mean_gradients
    outputs, first = step()
    found = {
        "first_call_seconds": first,
        "output_difference": difference(floats(outputs), expected_outputs),
        "gradient_difference": difference(gradients_of(model), expected_gradients),
    }
    del outputs
    step()  # after its first backward DDP arranges the buckets anew
    peaks = []
    for _ in range(3):
        model.zero_grad()
        peaks.append(peak_bytes(step, device))
    # The least is right: the profiler may miss what gloo's thread releases, and then counts more.
    found["peak_bytes"] = bytes_that_stay(model, inputs, cell.how) + min(peaks)
    found["parameters"] = count_parameters(model)
    found["graphs"] = len(graphs)
    return {"step": measured_step, "model": model, "inputs": inputs, "found": found}


def attempt(function) -> tuple:
    """Call a function on all ranks: its result and None, or None and why it failed on one of them.

    Every rank is told the same reason.
    """
    result = None
    reason = None
    try:
        result = function()
    except Exception as error:  # compilers and models have many kinds
        cause = getattr(error, "inner_exception", error)
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        reason = lines[0] if lines else type(cause).__name__
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for rank, reason_of_rank in enumerate(reasons):
        if reason_of_rank is not None:
            return None, f"{reason_of_rank} (rank {rank})"
    return result, None


def try_compiler(backend: str | None, device) -> None:
    """Compile something tiny: without g++, Triton or what else the backend needs it fails here.

    Here no rank waits for another in a collective.
    """
    if backend not in (None, "print"):
        torch.compile(torch.sin, backend=backend)(torch.ones(8, device=device))


def check_differences(name: str, outputs: float, gradients: float, tolerance: float) -> None:
    """Say how far a cell is from eager mode on a single device; end the run if it is too far."""
    from common.setup import say

    if not (outputs <= tolerance and gradients <= tolerance):  # so that nan is caught, too
        found = f"outputs {outputs:.1e}, gradients {gradients:.1e} away"
        allowed = f"from eager single-device; allowed: {tolerance:.0e}"
        sys.exit(f"{name}, rank {dist.get_rank()}: {found} {allowed}")
    found = f"outputs within {outputs:.1e}, gradients within {gradients:.1e}"
    say(f"{name}: {found} of eager single-device (allowed: {tolerance:.0e})")


def prepare_all(args, device, plan: list) -> tuple[dict, dict]:
    """Prepare all cells: those that can be measured by name, and by name why the others cannot."""
    from compile_flags import name_of

    from common.setup import progress

    tolerance = 1e-2 if device.type == "cuda" else 1e-3  # there convolutions may use TF32, 10 bits
    progress("eager on a single device")
    expected = reference(args, device)
    cells = {}
    left_out = {}
    for wanted in plan:
        name = name_of(wanted)
        place = f"{name}, {len(cells) + len(left_out) + 1} of {len(plan)}"
        progress(f"{place}: {'compiling' if wanted.backend else 'checking'}")
        with fresh_cache():  # else the first call would find the kernels of another cell
            _, problem = attempt(partial(try_compiler, wanted.backend, device))
            if not problem:
                cell, problem = attempt(partial(prepare, args, device, wanted, expected))
        if problem:
            left_out[name] = problem
            continue
        outputs = cell["found"]["output_difference"]
        gradients = cell["found"]["gradient_difference"]
        check_differences(name, outputs, gradients, tolerance)
        cells[name] = cell
    return cells, left_out


def print_results(cells: list[dict], left_out: dict) -> None:
    """The table: a row per cell of the JSON."""
    from common import report, setup

    bare_eager = None
    for cell in cells:
        if cell["name"] == "bare eager" and len(cells) > 1:
            bare_eager = cell["forward_backward_seconds"]
    rows = []
    for cell in cells:
        samples = cell["forward_backward_seconds"]
        mean = torch.tensor(samples, dtype=torch.float64).mean().item()
        row = [
            cell["name"],
            f"{1000 * mean:.1f}",
            *report.milliseconds(samples),
            report.ratio(samples, bare_eager),
            f"{cell['first_call_seconds']:.1f}",
            str(cell["graphs"]),
            f"{cell['peak_bytes'] / 2**20:.1f}",
            f"{cell['parameters'] / 1e6:.2f}",
        ]
        rows.append(row)
    header = ["forward + backward, ms", "mean", "p50", "p75", "p90", "p95", "/bare eager"]
    header += ["first call, s", "graphs", "peak memory, MB", "parameters, M"]
    setup.say()
    report.print_table(header, rows)
    for name, problem in left_out.items():
        setup.say(f"{name}: not measured: {problem}")
    setup.say("mean and percentiles over all steps of all ranks; /bare eager: ratio of the p50s;")
    setup.say("first call: compilation included, nothing cached; graphs: compiled;")
    setup.say("peak memory of tensors, parameters held: of rank 0")


def write_graph(path: Path, model: nn.Module, inputs: tuple) -> None:
    """The autograd graph of one step, with what its nodes save, as Graphviz text through torchviz.

    Where Graphviz is installed it is drawn as well: FILE.pdf.
    """
    import torchviz

    from common.setup import say

    loss = mean_square(model(*inputs))
    if dist.get_rank() == 0:
        parameters = dict(model.named_parameters())
        graph = torchviz.make_dot(loss, parameters, show_attrs=True, show_saved=True)
        path.write_text(graph.source)
        say(f"written: {path}")
        if shutil.which("dot"):
            graph.render(path)
            say(f"written: {path}.pdf")
    loss.backward()  # for DDP and FSDP, which expect one after every forward


def write_trace(path: Path, step, steps: int) -> None:
    """A Chrome trace of rank 0, with spans Forward and Backward."""
    from common.setup import say

    with profile(acc_events=True) as profiler:
        for _ in range(steps):
            step()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(path))
    say(f"written: {path}")


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent), str(folder.parent.parent)]
    try:
        import compile_flags
        import compile_models

        from common import report, setup, timing
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/, compile_flags.py and compile_models.py"
        sys.exit(f"error: {error}: copy {needed} into {folder}")

    parser = setup.Parser(__doc__)
    compile_models.add_arguments(parser)
    compile_flags.add_arguments(parser)
    setup.add_process_group_arguments(parser)
    args = parser.parse_args(compile_flags.with_dashes(sys.argv[1:]))
    compile_flags.check(args)
    compile_models.check(args)
    if "RANK" not in os.environ:  # no torchrun: a group of one process, on a free port
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    # With --fsdp-wrap every kind of block is a version of one forward.
    torch._dynamo.config.cache_size_limit = 64
    debugging = {}
    if args.verbose and os.environ["RANK"] == "0":
        debugging = {"dynamo": logging.DEBUG, "graph_breaks": True, "recompiles": True}
    torch._logging.set_logs(all=logging.ERROR, **debugging)

    with setup.process_group(args) as device:
        result = report.begin("07_resnet_ddp/compile_ddp", args, device)
        model = args.torchbench_model or args.model
        setup.say(f"{model}; {args.steps} steps are measured, after {args.warmup} to warm up\n")
        cells, left_out = prepare_all(args, device, compile_flags.cells_of(args))
        if not cells:
            name, problem = left_out.popitem()
            setup.fail(f"{name} does not work here: {problem}")
        if args.verbose:
            for name, cell in cells.items():
                setup.say(f"\n{name}: {cell['model']}")
        steps = {name: cell["step"] for name, cell in cells.items()}
        samples = timing.measure(steps, args.steps, args.warmup)
        result["cells"] = []
        for name, cell in cells.items():
            result["cells"].append({"name": name, **cell["found"], **samples[name]})
        result["left_out"] = left_out
        print_results(result["cells"], left_out)
        for cell in cells.values():  # with --trace or --graph there is only one
            if args.trace:
                write_trace(args.trace, cell["step"], args.steps)
            if args.graph:
                write_graph(args.graph, cell["model"], cell["inputs"])
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
