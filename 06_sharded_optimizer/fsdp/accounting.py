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
from sharded_optimizer import LanguageModel, ShardedOptimizer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.setup import SIZES

GPUS = (24, 40, 80)  # GB


class WholeWeights(TorchDispatchMode):
    """While it is on: `most`, the bytes of tensors as large as a whole weight at any one time."""

    def __init__(self, model: nn.Module, sizes: set[int]):
        super().__init__()
        self.sizes = sizes
        self.now = 0
        self.most = 0
        # What is there already does not count.
        self.known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        if size in self.sizes and storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, storage._cdata, size)

    def forget(self, identity: int, size: int) -> None:
        self.known.remove(identity)
        self.now -= size


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
    """Bytes of parameters, gradients, optimizer state, and at most of whole weights beside them."""
    from common.memory import held_bytes

    with fake_ranks(world_size):
        with torch.device("meta"):
            model = LanguageModel(*SIZES[size][:5])
            tokens = torch.zeros(1, 8, dtype=torch.long)
        whole = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        padded = {4 * world_size * -(-weight.numel() // world_size) for weight in whole}
        sizes = padded | {weight.nbytes for weight in whole}
        model = wrap(model)
        optimizer = make_optimizer(model.parameters(), lr=1e-4)
        for _ in range(2):  # FSDP knows what comes next in the second
            optimizer.zero_grad()
            with WholeWeights(model, sizes) as gathered:
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                if hasattr(model, "finish_gradient_synchronization"):
                    model.finish_gradient_synchronization()
            optimizer.step()
        parameters = list(model.parameters())
        local = getattr(optimizer, "local", optimizer)  # where ShardedOptimizer keeps its part
        state = [value for values in local.state.values() for value in values.values()]
        gradients = [parameter.grad for parameter in parameters]
        held = [held_bytes(tensors) for tensors in (parameters, gradients, state)]
        in_flight = gathered.most if model is not getattr(model, "module", model) else 0
        return [*held, in_flight]


def theory(size: str, world_size: int) -> dict[str, float]:
    """{candidate: bytes}: 4, 4 and 8 per parameter, each divided by the ranks that share it.

    With FSDP there are whole weights besides, most of them somewhere in backward: a weight with its
    gradient, the gradient before it, which is still under way, and what the next module needs.
    """
    with torch.device("meta"):
        model = LanguageModel(*SIZES[size][:5])
    everything = sum(parameter.nbytes for parameter in model.parameters())
    layer = model.layers[0]
    attention = layer.self_attn.in_proj_weight.nbytes, layer.self_attn.out_proj.weight.nbytes
    up, down = layer.linear1.weight.nbytes, layer.linear2.weight.nbytes
    head = model.head.weight.nbytes
    whole = [
        head + head + down,  # in backward of the head,
        head + down + down + up,  # of a layer's second Linear,
        down + up + up + sum(attention),  # of its first,
        up + 2 * attention[1] + attention[0],  # of the projection of its attention,
        attention[1] + 2 * attention[0] + down,  # and of the rest of that
    ]
    return {
        "DDP": 4 * everything,
        "ShardedOptimizer": 2 * everything + 2 * everything / world_size,
        "FSDP": 4 * everything / world_size + max(whole),
    }


def show(args, wrap) -> None:
    """The table, by rank 0."""
    from common import report
    from common.setup import fail, progress, say

    if os.environ.get("RANK", "0") != "0":
        return
    if torch.__version__ < "2.12":
        fail(f"argument --accounting: needs torch 2.12, and this is {torch.__version__}")

    def sharded_adamw(parameters, **options):
        return ShardedOptimizer(parameters, torch.optim.AdamW, **options)

    candidates = {
        "DDP": (lambda model: model, torch.optim.AdamW),
        "ShardedOptimizer": (lambda model: model, sharded_adamw),
        "FSDP": (wrap, torch.optim.AdamW),
    }
    rows = []
    for world_size in args.ranks:
        progress(f"a step of one of {world_size} ranks")
        expected = theory(args.size, world_size)
        for name, how in candidates.items():
            parts = account(args.size, world_size, *how)
            total = sum(parts)
            fits = [gpu for gpu in GPUS if total < gpu * 2**30]
            row = [f"{world_size} ranks, {name}", *[f"{part / 2**20:,.0f}" for part in parts]]
            row += [f"{total / 2**20:,.0f}", f"{expected[name] / 2**20:,.0f}"]
            row += [f"{total / expected[name]:.3f}", f"{fits[0]} GB" if fits else "none"]
            rows.append(row)
    progress()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LanguageModel(*SIZES[args.size][:5]).parameters())
    say(f"{args.size} model: {parameters / 1e6:,.1f} million parameters, float32, AdamW; rank 0")
    header = ["MB", "parameters", "gradients", "optimizer state", "whole weights", "all"]
    report.print_table([*header, "theory", "/theory", "fits into"], rows)
    say("MB: 2^20 bytes; counted in a training step on the device meta, without activations;")
    say("whole weights: the most at any time of what is gathered and of whole gradients;")
    say("theory: 4, 4 and 8 bytes per parameter, each divided by the ranks that share it, and with")
    say("FSDP the whole weights of one moment in backward; fits into: a GPU of 24, 40 or 80 GB.\n")
