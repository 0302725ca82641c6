"""07: the models that compile_ddp.py takes, and inputs for them.

    toy     a deep perceptron: some wide layers, then narrow ones
    lm      the language model of stages 02 to 05
    NAME    a classification model of torchvision, or with --torchbench-model one of torchbenchmark

`create_model` makes them. Every rank gets the same weights and inputs of its own. compile_ddp.py
imports this file when it runs; this file needs torch alone, for its models toy and lm.
"""

import argparse
import importlib
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map


class ToyModel(nn.Module):
    """A deep perceptron: float [batch, 10] -> [batch, 5].

    The layers' sizes are 10 - width - width - width - width/10 (eight times) - 5.
    Not a bare nn.Sequential: torch.compile leaves torch's own forward methods alone when they are
    called from DDP or FSDP, and would compile nothing.
    """

    def __init__(self, width: int):
        super().__init__()
        sizes = [10, width, width, width] + 8 * [width // 10]
        self.layers = nn.Sequential()
        for size, next_size in pairwise(sizes):
            self.layers.append(nn.Sequential(nn.Linear(size, next_size), nn.ReLU()))
        self.layers.append(nn.Linear(sizes[-1], 5))

    def forward(self, x):
        return self.layers(x)


class LanguageModel(nn.Module):
    """That of 02 to 05: token ids int64 [batch, context] -> logits [batch, context, vocabulary]."""

    def __init__(self, d_model: int, layers: int = 4, vocabulary: int = 10_000):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, d_model)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.TransformerEncoderLayer(
                d_model,
                nhead=d_model // 64,
                dim_feedforward=4 * d_model,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
                bias=False,
            )
            self.layers.append(layer)
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def create_model(args, device: torch.device) -> tuple[nn.Module, tuple]:
    """The model that the flags name, the same on every rank; inputs, different on every rank.

    Reads args.model, torchbench_model, width and batch_size.
    """
    torch.manual_seed(0)
    with device:
        if args.torchbench_model:
            module = importlib.import_module(f"torchbenchmark.models.{args.torchbench_model}")
            options = {"test": "train", "device": device.type, "batch_size": args.batch_size}
            model, inputs = module.Model(**options).get_module()
        elif args.model == "toy":
            model = ToyModel(args.width)
        elif args.model == "lm":
            model = LanguageModel(args.width)
        else:
            import torchvision

            model = torchvision.models.get_model(args.model, weights=None)
        torch.manual_seed(1 + dist.get_rank())
        if args.model == "toy":
            inputs = (torch.randn(args.batch_size or 20, 10),)
        elif args.model == "lm":
            inputs = (torch.randint(10_000, (args.batch_size or 4, 64)),)
        elif args.model:
            inputs = (torch.rand(args.batch_size or 8, 3, 224, 224),)
    for module in model.modules():
        # Random by nature, and compiled code draws other numbers than eager code.
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0
    return model.to(device).train(), move(tuple(inputs), device)


def move(inputs: tuple, device: torch.device | str) -> tuple:
    """The inputs with all their tensors on this device."""

    def moved(leaf):
        return leaf.to(device) if torch.is_tensor(leaf) else leaf

    return tree_map(moved, inputs)


def add_arguments(parser) -> None:
    """The flags that say which model and how large."""
    from common.setup import whole_number

    one_of = parser.add_mutually_exclusive_group()
    name = "NAME: a classification model of torchvision (default: lm)"
    one_of.add_argument("--model", metavar="toy|lm|NAME", help=name)
    toy = {"dest": "model", "action": "store_const", "const": "toy", "help": argparse.SUPPRESS}
    one_of.add_argument("--toy-model", **toy)  # upstream's name
    checkout = "through a checkout of torchbenchmark on PYTHONPATH"
    one_of.add_argument("--torchbench-model", metavar="NAME", help=checkout)
    widths = "of toy's widest layers (default: 10000, on a CPU 1000), d_model of lm (default: 512)"
    parser.add_argument("--width", type=whole_number(10, 100_000), help=widths)
    batches = "per rank (default: toy 20, lm 4, torchvision 8)"
    parser.add_argument("--batch-size", type=whole_number(1), help=batches)


def default_width(args) -> int:
    """The width of `toy` and `lm` where --width does not say it."""
    if args.model == "lm":
        return 512
    if args.device != "cpu" and torch.cuda.is_available():
        return 10_000
    return 1000


def check(args) -> None:
    """Fill in model and width. Ends the run if the model cannot be so wide, or is not there."""
    from common.setup import fail

    if args.model is None and args.torchbench_model is None:
        args.model = "lm"
    if args.width is None:
        args.width = default_width(args)
    multiple = {"toy": 10, "lm": 64}.get(args.model, 1)
    if args.width % multiple != 0:
        reason = f"is not a multiple of {multiple}, which --model {args.model} needs"
        fail(f"argument --width: '{args.width}' {reason}")
    if args.torchbench_model is not None:
        name = args.torchbench_model
        try:
            importlib.import_module(f"torchbenchmark.models.{name}")
        except ImportError as error:
            needed = "a checkout of github.com/pytorch/benchmark on PYTHONPATH and its install.py "
            needed += "run for this model"
            fail(f"argument --torchbench-model: '{name}' needs {needed} ({error})")
    elif args.model not in ("toy", "lm"):
        try:
            import torchvision
        except ImportError as error:
            needed = "torchvision: pip install torchvision"
            fail(f"argument --model: '{args.model}' needs {needed} ({error})")
        known = torchvision.models.list_models(module=torchvision.models)
        if args.model not in known:
            allowed = f"toy, lm or one of torchvision's: {', '.join(known)}"
            fail(f"argument --model: {args.model!r} is not {allowed}")
