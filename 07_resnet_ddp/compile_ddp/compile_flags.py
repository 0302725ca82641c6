"""07: the flags of compile_ddp.py, and the cells that they ask for.

A cell is one way to run the model; compile_ddp.py measures all that it is asked for side by side.
The flags of PyTorch's benchmarks/dynamo/distributed.py are understood as well, also with _ for -.
compile_ddp.py imports this file when it runs.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch


class Cell(NamedTuple):
    """One way to run the model."""

    how: str  # "bare", "ddp" or "fsdp"
    backend: str | None = None  # of torch.compile; None: eager; "print": prints the graphs
    wrap: bool = False  # FSDP: each block its own unit
    checkpoint: bool = False  # FSDP: computes each block's activations again in backward
    split: bool = True  # DDP: torch.compile splits the graph where a bucket ends


def name_of(cell: Cell) -> str:
    """How the output calls a cell."""
    words = [cell.how]
    if cell.backend is None:
        words.append("eager")
    elif cell.backend == "eager":  # torch.compile's backend that leaves the graphs as they are
        words.append("dynamo only")
    else:
        words.append(cell.backend)
    if cell.wrap:
        words.append("wrap")
    if cell.checkpoint:
        words.append("checkpoint")
    if not cell.split:
        words.append("whole graph")
    return " ".join(words)


def cells_of(args) -> list[Cell]:
    """The cells to measure."""
    fsdp = {"wrap": args.fsdp_wrap, "checkpoint": args.fsdp_checkpoint}
    ddp = {"split": not args.no_optimize_ddp}
    if args.variants:
        backend = args.compile or "inductor"
        cells = [Cell("bare"), Cell("ddp")]
        for wrap, checkpoint in ((False, False), (True, False), (False, True), (True, True)):
            cells.append(Cell("fsdp", None, wrap, checkpoint))
        return [*cells, Cell("ddp", backend), Cell("ddp", backend, split=False)]
    if args.matrix:
        cells = []
        for how, options in (("bare", {}), ("ddp", ddp), ("fsdp", fsdp)):
            for backend in (None, args.compile or "inductor"):
                cells.append(Cell(how, backend, **options))
        return cells
    if args.ddp:
        return [Cell("ddp", args.compile, **ddp)]
    if args.fsdp:
        return [Cell("fsdp", args.compile, **fsdp)]
    return [Cell("bare", args.compile)]


def backend(text: str) -> str:
    """A type for argparse: a backend that torch.compile knows, or "print"."""
    if text == "print" or text in torch._dynamo.list_backends(exclude_tags=()):
        return text
    known = ", ".join(torch._dynamo.list_backends())
    raise argparse.ArgumentTypeError(f"{text!r} is no backend of torch.compile: {known} or print")


def with_dashes(words: list[str]) -> list[str]:
    """A command line with its flags spelled with -: --batch_size=8 becomes --batch-size=8."""
    spelled = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            word = flag.replace("_", "-") + equals + value
        spelled.append(word)
    return spelled


def add_arguments(parser) -> None:
    """The flags, apart from those of the models and the process group."""
    from common.setup import output_file, whole_number

    add = parser.add_argument
    file = {"type": output_file, "metavar": "FILE"}
    one_of = parser.add_mutually_exclusive_group()
    matrix = "bare, ddp and fsdp, each eager and compiled, side by side (the default)"
    one_of.add_argument("--matrix", action="store_true", help=matrix)
    variants = "what --fsdp-wrap, --fsdp-checkpoint and --no-optimize-ddp change, side by side"
    one_of.add_argument("--variants", action="store_true", help=variants)
    one_of.add_argument("--bare", action="store_true", help="only the bare model on every rank")
    one_of.add_argument("--ddp", action="store_true", help="only DDP")
    one_of.add_argument("--fsdp", action="store_true", help="only FSDP")
    printing = "print: print the graphs (default: none; of --matrix and --variants inductor)"
    backends = f"torch.compile's backend: inductor, aot_eager, eager, …; {printing}"
    add("--compile", type=backend, metavar="NAME", old_names=["--dynamo"], help=backends)
    one_graph = "don't split the graph where DDP's buckets end"
    older = {"old_names": ["--dynamo-no-optimize-ddp"]}
    add("--no-optimize-ddp", action="store_true", help=one_graph, **older)
    units = "each block its own unit; otherwise the model is the only one"
    add("--fsdp-wrap", action="store_true", help=units)
    again = "compute each block's activations again in backward"
    add("--fsdp-checkpoint", action="store_true", help=again)
    add("--steps", type=whole_number(1), default=10, old_names=["--repeat"], help="measured")
    add("--warmup", type=whole_number(0), default=3, help="steps before them, not measured")
    more = "print the model; dynamo's debug log, graph breaks and recompilations of rank 0"
    add("--verbose", action="store_true", help=more)
    add("--json", **file, help="everything measured, raw")
    trace = "Chrome trace of --steps steps of rank 0"
    add("--trace", **file, old_names=["--trace-file"], help=trace)
    graph = "the autograd graph for Graphviz, drawn where that is installed; needs torchviz"
    add("--graph", **file, help=graph)
    hidden = {"action": "store_true", "help": argparse.SUPPRESS}
    add("--profile", **hidden)  # --trace profile.json
    add("--torchviz", **hidden)  # --graph torchviz.dot
    add("--gpu-memory-stats", **hidden)  # the table always has the peak


def check(args) -> None:
    """Fill in --matrix, --trace and --graph; end the run if flags contradict each other."""
    from common.setup import can_be_written, fail

    args.matrix = not (args.variants or args.bare or args.ddp or args.fsdp)
    if args.profile and args.trace is None:
        args.trace = Path("profile.json")
    if args.torchviz and args.graph is None:
        args.graph = Path("torchviz.dot")
    for flag, file in (("--trace", args.trace), ("--graph", args.graph)):
        if file is not None and not can_be_written(file):
            fail(f"argument {flag}: '{file}' cannot be written here; name another file")
    of_one = {
        "--trace": args.trace,
        "--graph": args.graph,
        "--compile print": args.compile == "print",
    }
    for flag, given in of_one.items():
        if (args.matrix or args.variants) and given:
            fail(f"argument {flag}: is for one cell of the matrix: add --bare, --ddp or --fsdp")
    if args.variants and (args.fsdp_wrap or args.fsdp_checkpoint or args.no_optimize_ddp):
        flags = "--fsdp-wrap, --fsdp-checkpoint, --no-optimize-ddp"
        fail(f"argument --variants: has all cases of {flags}; leave these out")
    if (args.fsdp_wrap or args.fsdp_checkpoint) and (args.bare or args.ddp):
        fail("argument --fsdp-wrap, --fsdp-checkpoint: they need --fsdp or --matrix")
    if args.graph and not importlib.util.find_spec("torchviz"):
        fail("argument --graph: needs torchviz, which is not installed: pip install torchviz")
