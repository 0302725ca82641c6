"""07: one forward and backward of DDP and of FSDP, eager and compiled.

Two things want the same graph: a compiler wants it whole, DDP wants a pause after every bucket, to all-reduce it while the
rest is still computed. So torch.compile splits the graph of a DDP model where the buckets end (--no-optimize-ddp: it
does not). FSDP keeps only its shard of the parameters and gathers the others when they are needed (--fsdp-wrap: block by
block, and never all at once). What each costs and saves is measured here; --matrix does it side by side.

    make 07_resnet_ddp/compile_ddp NPROC=2 ARGS=--matrix
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/compile_ddp.py --ddp --compile inductor      (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        07_resnet_ddp/compile_ddp.py --fsdp --fsdp-wrap                 (two hosts; R is 0 on HOST0, else 1)

Source: PyTorch's benchmarks/dynamo/distributed.py, here with today's fully_shard in place of FullyShardedDataParallel.
"""

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import utils as inductor_utils
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: the outermost modules in an nn.Sequential or nn.ModuleList that have parts."""
    blocks = []
    for child in module.children():
        if (
            isinstance(module, (nn.Sequential, nn.ModuleList))
            and list(child.children())
            and list(child.parameters())
        ):
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
    """The model on its own ("bare"), replicated ("ddp") or with its parameters split over the ranks ("fsdp"), and compiled
    unless `backend` is None. Second result: a list to which torch.compile adds every graph that it hands to the backend.

    FSDP gathers, uses and frees one unit after the other: with `wrap_blocks` a unit is one block and compiled by itself,
    otherwise the model. `checkpoint_blocks` keeps no activations inside a block and computes them again in backward.
    ValueError if there are no such blocks, RuntimeError if this torch has no FSDP for CPUs.
    """
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        if backend == "print":
            if dist.get_rank() == 0:
                print(
                    f"graph {len(graphs)}:\n{graph.print_readable(print_output=False)}", flush=True
                )
            return graph.forward
        return torch._dynamo.lookup_backend(backend)(graph, example_inputs)

    def compiled(function):
        return torch.compile(function, backend=count) if backend else function

    device, blocks = next(model.parameters()).device, blocks_of(model)
    if how == "ddp":
        model = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    if how == "fsdp":
        if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise RuntimeError("fully_shard on a CPU needs torch 2.7 or newer")
        if (wrap_blocks or checkpoint_blocks) and not blocks:
            raise ValueError(
                "the model has no blocks that could be wrapped or checkpointed one by one"
            )
        for block in blocks:
            if wrap_blocks:  # the function and not the module: FSDP gathers in hooks, and no graph goes across those
                block.forward = compiled(block.forward)
            if checkpoint_blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            if wrap_blocks:
                fully_shard(block)
        fully_shard(model)
        if wrap_blocks:
            return model, graphs
    return compiled(model), graphs


def mean_square(outputs) -> torch.Tensor:
    """A loss for any model: the mean square of the floating-point tensors that it returns, summed."""
    return sum(tensor.square().mean() for tensor in floats(outputs))


def forward_backward(model: nn.Module, inputs: tuple):
    """One step as it is measured; returns the outputs."""
    with record_function("Forward"):
        outputs = model(*inputs)
        loss = mean_square(outputs)
    with record_function("Backward"):
        loss.backward()
    return outputs


# ======================================================================================================================
# Below this line: the models, the comparison with eager single-device, memory, the command line.


class LanguageModel(nn.Module):
    """The model of stages 02 to 05: token ids int64 [batch, context] -> logits [batch, context, vocabulary]."""

    def __init__(self, d_model: int, layers: int = 4, vocabulary: int = 10_000):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                d_model,
                d_model // 64,
                4 * d_model,
                0.0,
                "gelu",
                batch_first=True,
                norm_first=True,
                bias=False,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class ToyModel(nn.Module):
    """A deep perceptron, 10 - width - width - width - width/10 (eight times) - 5: float [batch, 10] -> [batch, 5].

    Not a bare nn.Sequential: torch.compile leaves torch's own forward methods alone when they are called from DDP or FSDP,
    and would compile nothing.
    """

    def __init__(self, width: int):
        super().__init__()
        sizes = [10, width, width, width, *[width // 10] * 8]
        hidden = [
            nn.Sequential(nn.Linear(*pair), nn.ReLU())
            for pair in zip(sizes, sizes[1:], strict=False)
        ]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], 5))

    def forward(self, x):
        return self.layers(x)


def create_model(args, device) -> tuple[nn.Module, tuple]:
    """The model that the flags name, the same on every rank, and inputs, different on every rank."""
    torch.manual_seed(0)
    with device:
        if args.torchbench_model:
            module = importlib.import_module(f"torchbenchmark.models.{args.torchbench_model}")
            model, inputs = module.Model(
                test="train", device=device.type, batch_size=args.batch_size
            ).get_module()
        elif args.model == "toy":
            model = ToyModel(args.width)
        elif args.model == "lm":
            model = LanguageModel(args.width)
        else:
            model = importlib.import_module("torchvision").models.get_model(
                args.model, weights=None
            )
        torch.manual_seed(1 + dist.get_rank())
        if args.model == "toy":
            inputs = (torch.randn(args.batch_size or 20, 10),)
        elif args.model == "lm":
            inputs = (torch.randint(10_000, (args.batch_size or 4, 64)),)
        elif args.model:
            inputs = (torch.rand(args.batch_size or 8, 3, 224, 224),)
    for (
        module
    ) in model.modules():  # random by nature, and compiled code draws other numbers than eager code
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0
    return model.to(device).train(), move(tuple(inputs), device)


def move(inputs: tuple, device) -> tuple:
    return tree_map(lambda x: x.to(device) if torch.is_tensor(x) else x, inputs)


def floats(outputs) -> list[torch.Tensor]:
    """The floating-point tensors in whatever a model returns."""
    return [
        leaf for leaf in tree_leaves(outputs) if torch.is_tensor(leaf) and leaf.is_floating_point()
    ]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """All gradients, whole: of FSDP's shards they are gathered. Zeros for a parameter without one."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [(g.full_tensor() if isinstance(g, DTensor) else g).detach().clone() for g in gradients]


def reference(args, device) -> tuple[list, list, list]:
    """Eager on this device alone: the outputs and gradients for this rank's inputs, and the mean of all ranks' gradients."""
    model, inputs = create_model(args, device)
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, move(inputs, "cpu"))
    mean = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank, inputs in enumerate(everyones):
        model.zero_grad()
        outputs = forward_backward(model, move(inputs, device))
        gradients = gradients_of(model)
        for total, gradient in zip(mean, gradients, strict=True):
            total += gradient / len(everyones)
        if rank == dist.get_rank():
            mine = [tensor.detach() for tensor in floats(outputs)], gradients
    return *mine, mean


def difference(tensors: list, expected: list) -> float:
    """The largest deviation of any tensor, relative to its largest entry plus a thousandth of the largest of all."""
    largest = max(tensor.abs().max() for tensor in expected)
    return (
        torch.stack(
            [
                (ours - theirs).abs().max() / (theirs.abs().max() + largest / 1000)
                for ours, theirs in zip(tensors, expected, strict=True)
            ]
        )
        .max()
        .item()
    )  # nan stays nan


def bytes_held(model: nn.Module, inputs: tuple, how: str) -> int:
    """What stays on this rank from step to step, gradients aside: parameters, buffers, inputs, and the buckets of DDP."""
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(leaf for leaf in tree_leaves(inputs) if torch.is_tensor(leaf)),
    ]
    tensors += (
        [parameter for parameter in model.parameters() if parameter.requires_grad]
        if how == "ddp"
        else []
    )
    return sum(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors
    )


def peak_memory(function, device) -> int:
    """Call a function: the most bytes of tensors that there were meanwhile, beyond those before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # On a CPU only the profiler knows: its trace holds every allocation and release of torch's own allocator.
    with tempfile.TemporaryDirectory() as folder:
        with profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            function()
            dist.barrier()  # gloo's thread has given back what it worked on
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    blocks, peak = {}, 0
    for event in sorted(
        (event for event in events if event.get("name") == "[memory]"),
        key=lambda event: event["ts"],
    ):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            blocks[address] = size
            peak = max(peak, sum(blocks.values()))
        else:  # of a block from before this call the profiler may give the size of an older one at that address: not counted
            blocks.pop(address, None)
    return peak


def prepare(args, device, how: str, backend: str | None, expected: tuple) -> dict:
    """Build one cell of the matrix, time its first call, compare it with eager single-device, take its memory."""
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

    outputs, first = step()
    differences = (
        difference([tensor.detach() for tensor in floats(outputs)], expected[0]),
        difference(gradients_of(model), expected[1] if how == "bare" else expected[2]),
    )
    del outputs
    step()  # after its first backward DDP arranges the buckets anew
    peaks = []
    for _ in range(
        3
    ):  # and the least is right: a tensor that gloo's thread releases may escape the profiler, which only adds
        model.zero_grad()
        peaks.append(peak_memory(step, device))
    held_here = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "step": lambda: {"seconds": step()[1]},
        "model": model,
        "inputs": inputs,
        "first": first,
        "graphs": graphs,
        "peak": bytes_held(model, inputs, how) + min(peaks),
        "parameters": sum(p.numel() for p in held_here),
        "differences": differences,
    }


def attempt(function) -> tuple:
    """Call a function on all ranks: its result and None, or None and why it failed on one of them, the same everywhere."""
    result = reason = None
    try:
        result = function()
    except Exception as error:  # compilers and models have many kinds
        reason = (
            str(getattr(error, "inner_exception", error)) or type(error).__name__
        ).splitlines()[0]
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    reason = next(
        (f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason), None
    )
    return (None, reason) if reason else (result, None)


def prepare_all(args, device, plan: list[tuple[str, str | None]]) -> tuple[dict, dict]:
    """Prepare all cells: those that can be measured by name, and by name why the others cannot."""
    # Nothing is compiled yet in a fresh cache: else the first call of one cell would find the kernels of another.
    fresh_cache = (
        inductor_utils.fresh_cache
        if hasattr(inductor_utils, "fresh_cache")
        else inductor_utils.fresh_inductor_cache
    )
    rank, expected = dist.get_rank(), reference(args, device)
    tolerance = (
        1e-2 if device.type == "cuda" else 1e-3
    )  # float32; on CUDA convolutions may use TF32, of 10 bits
    cells, left_out = {}, {}
    for how, backend in plan:
        name, cell = f"{how} {'dynamo only' if backend == 'eager' else backend or 'eager'}", None
        with fresh_cache():
            # First something tiny: without g++ or Triton it fails here, where no rank waits for another in a collective.
            tiny = torch.compile(torch.sin, backend=backend) if backend == "inductor" else torch.sin
            problem = attempt(partial(tiny, torch.ones(8, device=device)))[1]
            if not problem:
                cell, problem = attempt(partial(prepare, args, device, how, backend, expected))
        if problem:
            left_out[name] = problem
            continue
        outputs, gradients = cell["differences"]
        if not (outputs <= tolerance and gradients <= tolerance):
            sys.exit(
                f"{name}, rank {rank}: outputs {outputs:.1e}, gradients {gradients:.1e} away from eager single-device; "
                f"allowed: {tolerance:.0e}"
            )
        if rank == 0:
            print(
                f"{name}: outputs within {outputs:.1e}, gradients within {gradients:.1e} of eager single-device (allowed: "
                f"{tolerance:.0e})",
                flush=True,
            )
        cells[name] = cell
    return cells, left_out


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


def check(args, fail) -> None:
    """End the run now if flags contradict each other or a model is not there."""
    if args.matrix and (args.profile or args.graph or args.compile == "print"):
        fail(
            "argument --matrix: not with --profile, --graph and --compile print, which are for a single cell"
        )
    if (args.fsdp_wrap or args.fsdp_checkpoint) and not (args.fsdp or args.matrix):
        fail("argument --fsdp-wrap, --fsdp-checkpoint: they need --fsdp or --matrix")
    step = {"toy": 10, "lm": 64}.get(args.model, 1)
    if args.width % step:
        fail(
            f"argument --width: '{args.width}' is not a multiple of {step}, which --model {args.model} needs"
        )
    if args.graph and not importlib.util.find_spec("torchviz"):
        fail("argument --graph: needs torchviz, which is not installed: pip install torchviz")
    try:
        if args.torchbench_model is not None:
            importlib.import_module(f"torchbenchmark.models.{args.torchbench_model}")
        elif args.model not in ("toy", "lm"):
            models = importlib.import_module("torchvision").models
            if args.model not in (known := models.list_models(module=models)):
                fail(
                    f"argument --model: {args.model!r} is not toy, lm or one of torchvision's: {', '.join(known)}"
                )
    except ImportError as error:
        needed = (
            "a checkout of github.com/pytorch/benchmark on PYTHONPATH and its install.py run for this model"
            if args.model is None
            else "torchvision: pip install torchvision"
        )
        flag = "--torchbench-model" if args.model is None else "--model"
        fail(f"argument {flag}: '{args.model or args.torchbench_model}' needs {needed} ({error})")


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common.report import environment, percentiles, print_table
        from common.setup import (
            Parser,
            add_process_group_arguments,
            fail,
            output_file,
            process_group,
            whole_number,
        )
        from common.timing import measure
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    models, cells = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    models.add_argument(
        "--model",
        metavar="toy|lm|NAME",
        help="NAME: a classification model of torchvision (default: lm)",
    )
    models.add_argument(
        "--torchbench-model",
        metavar="NAME",
        help="through a checkout of torchbenchmark on PYTHONPATH",
    )
    cells.add_argument("--ddp", action="store_true")
    cells.add_argument("--fsdp", action="store_true", help="neither: the bare model on every rank")
    cells.add_argument(
        "--matrix",
        action="store_true",
        help="bare, ddp and fsdp, each eager and compiled, side by side",
    )
    parser.add_argument(
        "--compile",
        choices=["inductor", "aot_eager", "eager", "print"],
        help="torch.compile's backend; print: print the graphs (default: none; with --matrix inductor)",
    )
    parser.add_argument(
        "--no-optimize-ddp",
        action="store_true",
        help="don't split the graph where DDP's buckets end",
    )
    parser.add_argument(
        "--fsdp-wrap",
        action="store_true",
        help="each block its own unit; otherwise the model is the only one",
    )
    parser.add_argument(
        "--fsdp-checkpoint",
        action="store_true",
        help="compute each block's activations again in backward",
    )
    parser.add_argument(
        "--width",
        type=whole_number(10, 100_000),
        help="of toy's widest layers (default: 10000, on a CPU 1000), d_model of lm (default: 512)",
    )
    parser.add_argument(
        "--batch-size", type=whole_number(1), help="per rank (default: toy 20, lm 4, torchvision 8)"
    )
    parser.add_argument(
        "--repeat",
        type=whole_number(1),
        default=10,
        help="measured steps, after 3 others (default: 10)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print the model, graph breaks and recompilations"
    )
    parser.add_argument(
        "--profile", action="store_true", help="write a Chrome trace to --trace-file"
    )
    parser.add_argument(
        "--trace-file",
        type=output_file,
        default=Path("profile.json"),
        metavar="FILE",
        help="(default: profile.json)",
    )
    parser.add_argument(
        "--graph", type=output_file, metavar="FILE.dot", help="the autograd graph; needs torchviz"
    )
    add_process_group_arguments(parser)
    args = parser.parse_args()
    if args.model is None and args.torchbench_model is None:
        args.model = "lm"
    if args.width is None:
        args.width = (
            512
            if args.model == "lm"
            else 10_000
            if args.device != "cpu" and torch.cuda.is_available()
            else 1000
        )
    check(args, fail)
    torch._dynamo.config.optimize_ddp = not args.no_optimize_ddp
    torch._dynamo.config.cache_size_limit = (
        64  # with --fsdp-wrap every kind of block is a version of one forward
    )
    torch._logging.set_logs(all=logging.ERROR, graph_breaks=args.verbose, recompiles=args.verbose)

    with process_group(args) as device:
        rank = dist.get_rank()
        if args.matrix:
            plan = [
                (how, backend)
                for how in ("bare", "ddp", "fsdp")
                for backend in (None, args.compile or "inductor")
            ]
        else:
            plan = [("ddp" if args.ddp else "fsdp" if args.fsdp else "bare", args.compile)]
        if rank == 0:
            print(
                "torch {torch}, {backend} on {device}, {world_size} ranks, {threads_per_rank} threads per rank\n"
                "{}, {} steps after 3 for warming up\n".format(
                    args.torchbench_model or args.model, args.repeat, **environment(device)
                ),
                flush=True,
            )
        cells, left_out = prepare_all(args, device, plan)
        if not args.matrix and left_out:
            fail("{} does not work here: {}".format(*left_out.popitem()))
        if args.verbose and rank == 0:
            print(*(f"\n{name}: {cell['model']}" for name, cell in cells.items()), sep="\n")
        samples = measure(
            {name: cell["step"] for name, cell in cells.items()}, args.repeat, warmup=3
        )

        rows = []
        for name, cell in cells.items():
            seconds = samples[name]["seconds"]
            times = [sum(seconds) / len(seconds), *percentiles(seconds)]
            ratio = (
                f"{times[1] / percentiles(samples['bare eager']['seconds'])[0]:.2f}"
                if args.matrix
                else "-"
            )
            rows.append(
                [
                    name,
                    *(f"{1000 * t:.1f}" for t in times),
                    ratio,
                    f"{cell['first']:.1f}",
                    f"{len(cell['graphs'])}",
                    f"{cell['peak'] / 2**20:.1f}",
                    f"{cell['parameters'] / 1e6:.2f}",
                ]
            )
        if rank == 0:
            print()
            print_table(
                [
                    "forward + backward, ms",
                    "mean",
                    "p50",
                    "p75",
                    "p90",
                    "p95",
                    "/bare eager",
                    "first call, s",
                    "graphs",
                    "peak memory, MB",
                    "parameters, M",
                ],
                rows,
            )
            for name, problem in left_out.items():
                print(f"{name}: not measured: {problem}")
            print(
                "mean and percentiles over all steps of all ranks; /bare eager: ratio of the p50s; first call: compilation\n"
                "included, nothing cached; graphs: compiled; peak memory of tensors, parameters held: of rank 0",
                flush=True,
            )
        cell = list(cells.values())[-1]
        if args.profile:
            write_trace(args.trace_file, cell["step"], args.repeat)
        if args.graph:
            write_graph(args.graph, cell["model"], cell["inputs"])


if __name__ == "__main__":
    main()
