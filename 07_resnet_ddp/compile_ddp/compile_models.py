"""07: the models that compile_ddp.py measures, and inputs for them."""

import importlib
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from common import setup

TOY_WIDTHS = {"cpu": 1000, "cuda": 10_000}
D_MODEL = 512  # of lm


class ToyModel(nn.Module):
    """Maps float [batch, 10] -> [batch, 5] by a deep perceptron.

    The layers' sizes are 10 - width - width - width - width/10 (eight times) - 5. It is no bare
    nn.Sequential, because torch.compile does not compile torch's own forward methods that DDP or
    FSDP call.
    """

    def __init__(self, width: int):
        super().__init__()
        sizes = [10, width, width, width] + 8 * [width // 10]
        self.layers = nn.Sequential()
        for size, next_size in pairwise(sizes):
            self.layers.append(nn.Sequential(nn.Linear(size, next_size), nn.ReLU()))
        self.layers.append(nn.Linear(sizes[-1], 5))

    def blocks(self):
        return self.layers[:-1]

    def forward(self, x):
        return self.layers(x)


class LanguageModel(nn.Module):
    """Maps token ids int64 [batch, context] -> logits [batch, context, 10,000], as in 02 to 05."""

    def __init__(self, d_model: int):
        super().__init__()
        heads, d_ff = d_model // 64, 4 * d_model
        options = {"batch_first": True, "norm_first": True, "bias": False}
        layer = nn.TransformerEncoderLayer(d_model, heads, d_ff, 0.0, "gelu", **options)
        norm = nn.LayerNorm(d_model, bias=False)
        self.token_embedding = nn.Embedding(10_000, d_model)
        self.encoder = nn.TransformerEncoder(layer, 4, norm, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, 10_000, bias=False)

    def blocks(self):
        return self.encoder.layers

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        return self.head(self.encoder(x, mask, is_causal=True))


def torchbench(args, device: torch.device) -> tuple[nn.Module, tuple]:
    """Return torchbench's model of this name and its inputs, the same on all ranks."""
    name = args.torchbench_model
    try:
        module = importlib.import_module(f"torchbenchmark.models.{name}")
    except ImportError as error:
        setup.fail(
            f"argument --torchbench-model: '{name}' cannot be imported ({error}): git clone "
            "https://github.com/pytorch/benchmark, run its install.py with the model's name, and "
            "set PYTHONPATH to its folder"
        )
    batch_size = args.batch_size  # None: its own
    benchmark = module.Model(test="train", device=device.type, batch_size=batch_size)
    model, inputs = benchmark.get_module()
    to_device = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
    return model.to(device), to_device


# Names of the classes that upstream makes units of FSDP in torchbench's hf_Bert and hf_T5; but for
# BertLMPredictionHead, because its weight is the embedding's, and a weight belongs to one unit.
BLOCKS = {"BertLayer", "T5Block"}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return what is repeated in the model, [] if nobody knows it."""
    if hasattr(model, "blocks"):
        return list(model.blocks())
    return [module for module in model.modules() if type(module).__name__ in BLOCKS]


def create(args, device: torch.device) -> tuple[nn.Module, tuple]:
    """Return the model that args.model names, and what its forward takes, args.batch_size examples.

    All ranks get the same weights, and each gets inputs of its own.
    """
    torch.manual_seed(0)
    if args.torchbench_model:
        return torchbench(args, device)
    random = torch.Generator(device).manual_seed(1 + dist.get_rank())
    with device:
        if args.model == "toy":
            model = ToyModel(TOY_WIDTHS[device.type])
            return model, (torch.randn(args.batch_size or 20, 10, generator=random),)
        tokens = torch.randint(10_000, (args.batch_size or 4, 64), generator=random)
        return LanguageModel(D_MODEL), (tokens,)
