"""06, FSDP: what a rank of many would hold, told by a training step of the code itself.

The step runs on the device `meta`, where tensors have a shape and no numbers, in torch's fake
process group, which sends nothing. So neither the ranks nor the memory have to be there.

fsdp.py uses it; it has no command line of its own.
"""

import os
import weakref
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import finish
from sharded_optimizer import ADAMW, SHARDED_ADAMW, LanguageModel, held_parts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import report
from common.setup import SIZES, fail, progress, say

LEGEND = """\
MB: 2^20 bytes; counted in a training step on the device meta, without activations;
whole: the most at any time of what is gathered and of whole gradients;
theory: 4, 4 and 8 bytes per parameter, each divided by the ranks that share it, and with
FSDP what is whole in one moment of backward.
"""


class WholeWeights(TorchDispatchMode):
    """While it is on: `most`, the bytes of units and whole gradients at any one time."""

    def __init__(self, units: list):
        super().__init__()
        self.units = units
        weights = [weight for unit in units for weight in [unit.whole, *unit.weights.values()]]
        self.sizes = {weight.nbytes for weight in weights}  # by which gradients are known
        self.known = {weight.untyped_storage()._cdata for weight in weights}
        self.gradients = 0
        self.most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage.nbytes() in self.sizes and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.gradients += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        whole = sum(unit.whole.untyped_storage().nbytes() for unit in self.units)
        self.most = max(self.most, whole + self.gradients)
        return result

    def forget(self, identity: int, size: int) -> None:
        self.known.remove(identity)
        self.gradients -= size


@contextmanager
def fake_ranks(world_size: int):
    """This process is rank 0 of so many; all of them say what this one says."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def as_all_say(of_ranks, mine, group=None):
        of_ranks[:] = [mine] * len(of_ranks)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with patch.object(dist, "all_gather_object", as_all_say):
            yield
    finally:
        dist.destroy_process_group()


def account(size: str, world_size: int, wrap, make_optimizer) -> list[int]:
    """Bytes of parameters, gradients, optimizer state, and at most of what is whole beside them."""
    with fake_ranks(world_size):
        with torch.device("meta"):
            model = wrap(LanguageModel(*SIZES[size][:5]))
            tokens = torch.zeros(1, 8, dtype=torch.long)
        optimizer = make_optimizer(model.parameters(), lr=1e-4)
        with WholeWeights(getattr(model, "units", [])) as seen:
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            finish(model)
        optimizer.step()
        return [*held_parts(model, optimizer), seen.most]


def theory(size: str, world_size: int) -> dict[str, float]:
    """{candidate: bytes}: 4, 4 and 8 per parameter, each divided by the ranks that share it.

    With FSDP some units are whole besides, or whole gradients, most in one of these moments.
    """
    with torch.device("meta"):
        model = LanguageModel(*SIZES[size][:5])
    everything = sum(parameter.nbytes for parameter in model.parameters())
    layer = sum(weight.nbytes for weight in model.layers[0].parameters() if weight.ndim >= 2)
    head = model.head.weight.nbytes
    moments = [
        # What is sent, the units that backward needs now and next, and its gradients:
        layer + 2 * layer + layer,
        head + 2 * layer + layer,  # of the first layer that backward comes to
        2 * head + layer,  # of the head: its gradients twice, the next unit
    ]
    return {
        "DDP": 4 * everything,
        "ShardedOptimizer": 2 * everything + 2 * everything / world_size,
        "FSDP": 4 * everything / world_size + max(moments),
    }


def show(args, wrap) -> None:
    """The table, by rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    if torch.__version__ < "2.12":
        fail(f"argument --accounting: needs torch 2.12, and this is {torch.__version__}")

    candidates = {
        "DDP": (lambda model: model, ADAMW),
        "ShardedOptimizer": (lambda model: model, SHARDED_ADAMW),
        "FSDP": (wrap, ADAMW),
    }
    rows = []
    for world_size in args.accounting:
        progress(f"a step of one of {world_size} ranks")
        expected = theory(args.size, world_size)
        for name, how in candidates.items():
            parts = account(args.size, world_size, *how)
            total = sum(parts)
            megabytes = [f"{part / 2**20:,.0f}" for part in [*parts, total, expected[name]]]
            of_theory = f"{total / expected[name]:.3f}"
            rows.append([f"{world_size} ranks, {name}", *megabytes, of_theory])
    progress()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LanguageModel(*SIZES[args.size][:5]).parameters())
    say(f"{args.size} model: {parameters / 1e6:,.1f} million parameters, float32, AdamW; rank 0")
    header = ["MB", "parameters", "gradients", "optimizer state", "whole", "all"]
    report.print_table([*header, "theory", "/theory"], rows)
    say(LEGEND)
