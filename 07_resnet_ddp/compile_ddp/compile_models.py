"""07: the models that compile_ddp.py takes, and inputs for them; it imports this file when it runs.

Every rank gets the same weights and inputs of its own.
"""

import importlib
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from common.setup import fail

TOY_WIDTHS = {"cpu": 1000, "cuda": 10_000}
D_MODEL = 512  # of lm


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
    """Token ids int64 [batch, context] -> logits [batch, context, 10,000]; as that of 02 to 05."""

    def __init__(self, d_model: int):
        super().__init__()
        heads, d_ff = d_model // 64, 4 * d_model
        options = {"batch_first": True, "norm_first": True, "bias": False}
        layer = nn.TransformerEncoderLayer(d_model, heads, d_ff, 0.0, "gelu", **options)
        norm = nn.LayerNorm(d_model, bias=False)
        self.token_embedding = nn.Embedding(10_000, d_model)
        self.encoder = nn.TransformerEncoder(layer, 4, norm, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, 10_000, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        return self.head(self.encoder(x, mask, is_causal=True))


def create(args, device: torch.device) -> tuple[nn.Module, tuple]:
    """The model that args.model or args.torchbench_model names, and the arguments of a forward.

    Weights are the same on every rank, and inputs, args.batch_size examples, others on every rank
    (not with torchbench).
    """
    torch.manual_seed(0)
    random = torch.Generator(device).manual_seed(1 + dist.get_rank())
    with device:
        if args.torchbench_model:
            try:
                module = importlib.import_module(f"torchbenchmark.models.{args.torchbench_model}")
            except ImportError as error:
                checkout = "a checkout of github.com/pytorch/benchmark on PYTHONPATH"
                fail(f"argument --torchbench-model: needs {checkout}, installed ({error})")
            benchmark = module.Model("train", device.type, args.batch_size)
            model, inputs = benchmark.get_module()
        elif args.model == "toy":
            model = ToyModel(TOY_WIDTHS[device.type])
            inputs = [torch.randn(args.batch_size or 20, 10, generator=random)]
        else:
            model = LanguageModel(D_MODEL)
            inputs = [torch.randint(10_000, (args.batch_size or 4, 64), generator=random)]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # compiled code draws other numbers than eager code
    return model.train(), tuple(inputs)
