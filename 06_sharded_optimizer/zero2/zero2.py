r"""06, ZeRO2: split gradients and optimizer state, as fast as DDP (ZeRO, stage 2, overlapped).

An all-reduce is a reduce-scatter and an all-gather. Here they are two calls: a bucket's gradients
go to their owners during backward; each rank updates its slice of the weights; and the new weights
are gathered during the next forward, first layers first. So forward hides half of the bytes.

    make 06_sharded_optimizer/zero2 NPROC=2                               (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/zero2/zero2.py        (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/zero2/zero2.py                             (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO", SC 2020, 5.2; Zhang et al., "DeAR", ICDCS 2023.
"""

import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class Bucket:
    """Weights that travel together: one after another in `flat`, which is cut into N slices."""

    def __init__(self, weights: list[nn.Parameter], process_group):
        self.group, self.rank = process_group, dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        size = sum(weight.numel() for weight in weights)
        self.flat = weights[0].new_zeros(size + -size % self.world_size)  # N slices of one size
        for weight, view in zip(weights, views_like(weights, self.flat), strict=True):
            weight.data = view.copy_(weight.detach())
        self.slice = self.flat.view(self.world_size, -1)[self.rank]  # this rank updates it
        pieces = pieces_of(weights, self.slice, self.rank)
        self.shards = {w: nn.Parameter(piece) for w, piece in zip(weights, pieces, strict=True)}
        self.gathering = []  # the all-gather under way

    def begin_reduce_scatter(self, buffers):
        """Begin to send every rank its slice of the gradients; those of the weights are freed."""
        sent, received = [buffer[: self.flat.nbytes].view(self.flat.dtype) for buffer in buffers]
        for weight, view in zip(self.shards, views_like(self.shards, sent), strict=True):
            torch.mul(gradient_or_zeros(weight), 1 / self.world_size, out=view)
            weight.grad = None
        self.buffers = buffers
        self.reducing, self.parts = reduce_scatter(received, sent, self.group)

    def end_reduce_scatter(self):
        """Add the mean to the shards' gradients; return the buffers for the next bucket."""
        self.reducing.wait()
        gradients = pieces_of(self.shards, self.parts.sum(0), self.rank)
        for shard, gradient in zip(self.shards.values(), gradients, strict=True):
            shard.grad = gradient if shard.grad is None else shard.grad + gradient
        return self.buffers

    def begin_all_gather(self):
        """Begin to fill flat, and so the weights, with the slices of all ranks."""
        work = all_gather_single(self.flat, self.slice, group=self.group, async_op=True)
        self.gathering.append(work)


class ZeRO2(nn.Module):
    """Keep 1/N of the gradients and of the optimizer's state; the weights stay whole.

    model = ZeRO2(module)                                  # on every rank; takes rank 0's weights
    optimizer = torch.optim.AdamW(model.shards, lr=1e-3)   # this rank's slice of every bucket
    loss_fn(model(x), y).backward()                        # reduce-scatter, bucket by bucket
    model.finish_gradient_synchronization()                # the shards' .grad are the means
    optimizer.step()
    optimizer.zero_grad()                                  # the next model(x) gathers the weights

    A bucket holds at most `bucket_size_mb` MB (2^20 bytes; None: no limit), or one larger weight.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float | None = 25.0, process_group=None):
        super().__init__()
        self.module = module
        self.process_group = process_group  # the ranks that train together; None: all of them
        broadcast_from_rank_0(module, process_group)
        # Ranks match calls by their order alone, so all use this one, which is close to backward's.
        self.order = [p for p in module.parameters() if p.requires_grad][::-1]
        filled = fill_buckets(self.order, bucket_size_mb)
        self.buckets = [Bucket(weights, process_group) for weights in filled]
        self.bucket_of = {weight: bucket for bucket in self.buckets for weight in bucket.shards}
        self.shards = [shard for bucket in self.buckets for shard in bucket.shards.values()]
        self.free = buffers_for(self.buckets)  # pairs that no bucket has now, to send and receive
        self.waiting = self.buckets.copy()  # not launched yet
        self.ready = set()  # weights whose gradient is complete
        self.reducing = []  # buckets whose gradients are under way
        self.in_step = False  # True from a forward to the finish: only then gradients are sent
        self.stale = False  # True when an optimizer may have changed the slices of other ranks
        self.called = set()  # modules whose forward was called
        self.needed_by = {}  # after the first forward: module -> the buckets that it waits for
        self.layout = layout_of(module)
        for weight in self.order:
            weight.register_post_accumulate_grad_hook(self._gradient_is_ready)
        for submodule in module.modules():
            submodule.register_forward_pre_hook(self._before_forward)

    def forward(self, *inputs, **kwargs):
        self.in_step = self.in_step or torch.is_grad_enabled()
        if self.stale:
            self._begin_to_gather()
        if not self.needed_by or not torch.is_grad_enabled():
            wait_for(self.buckets)  # the first forward notes who is called; evaluation may differ
        outputs = self.module(*inputs, **kwargs)
        wait_for(self.buckets)  # those that this forward did not use
        self.needed_by = self.needed_by or who_needs_what(self.module, self.called, self.bucket_of)
        return outputs

    def _begin_to_gather(self):
        # While gradients are not cleared an optimizer may step: the next forward gathers again.
        self.stale = any(shard.grad is not None for shard in self.shards)
        for bucket in reversed(self.buckets):  # close to forward's order
            bucket.begin_all_gather()

    def _before_forward(self, module, inputs):  # PyTorch calls it before the module's forward
        self.called.add(module)
        wait_for(self.needed_by.get(module, []))

    def gather(self) -> None:
        """Make the weights whole, to save or read them after a step. All ranks must call it."""
        self._begin_to_gather()
        wait_for(self.buckets)

    def _gradient_is_ready(self, weight):  # autograd calls it when weight.grad is complete
        if weight in self.ready:
            raise RuntimeError("a gradient came twice: finish after every backward")
        if self.in_step:
            self.ready.add(weight)
            self._launch_ready()

    def _launch_ready(self):
        while self.waiting and self.ready.issuperset(self.waiting[0].shards):
            if not self.free:
                self._end_oldest()
            self.reducing.append(self.waiting.pop(0))
            self.reducing[-1].begin_reduce_scatter(self.free.pop())

    def _end_oldest(self):
        self.free.append(self.reducing.pop(0).end_reduce_scatter())

    def finish_gradient_synchronization(self) -> None:
        """Complete the shards' gradients. Call it after backward(), before optimizer.step()."""
        self.in_step = False
        self.ready.update(self.order)  # an unused weight counts as zero
        self._launch_ready()
        while self.reducing:
            self._end_oldest()
        self.waiting = self.buckets.copy()
        self.ready.clear()
        self.stale = True
        if layout_of(self.module) != self.layout:
            raise RuntimeError("parameters were frozen, replaced, moved or cast: wrap again")

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm of the whole gradient, as torch does; after the finish, on all ranks."""
        square = nn.utils.get_total_norm([shard.grad for shard in self.shards]).square()
        dist.all_reduce(square, group=self.process_group)
        nn.utils.clip_grads_with_norm_(self.shards, max_norm, square.sqrt())
        return square.sqrt()

    def parameters(self, recurse: bool = True):
        return iter(self.shards)  # with the weights an optimizer would do nothing

    def no_sync(self):
        raise RuntimeError("there is no no_sync: finish after every backward, gradients add up")


# ==================================================================================================
# Below this line: helpers, the benchmark.


# torch has renamed them (2.13, 2.14), and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PAIRS = 3  # of buffers: so many buckets are under way at once


def buffers_for(buckets: list[Bucket]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs that each of the buckets fits into. They are made once: new memory is slow."""
    pairs = []
    for bucket in buckets[:PAIRS]:
        empty = partial(bucket.flat.new_empty, dtype=torch.uint8)
        size = max(bucket.flat.nbytes for bucket in buckets)
        pairs.append((empty(size), empty(size)))
    return pairs


def reduce_scatter(received: torch.Tensor, sent: torch.Tensor, group):
    """Begin; return the call, and tensors [1 or N] that add up to this rank's slice of the sum.

    gloo's own sends twice as much as it has to: there it is an all-to-all, and we add.
    """
    parts = received.view(dist.get_world_size(group), -1)
    if dist.get_backend(group) == "nccl":
        return reduce_scatter_single(parts[0], sent, group=group, async_op=True), parts[:1]
    return dist.all_to_all_single(received, sent, group=group, async_op=True), parts


def wait_for(buckets: list[Bucket]) -> None:
    """Wait until the weights of these buckets are whole."""
    for bucket in buckets:
        while bucket.gathering:
            bucket.gathering.pop().wait()


def who_needs_what(module: nn.Module, called: set[nn.Module], bucket_of: dict) -> dict:
    """Return {submodule: buckets that have to be whole before its forward}.

    They have its own weights, and those of its children that were never called: it may use them
    itself, as nn.MultiheadAttention does.
    """
    needed_by = {}
    for submodule in module.modules():
        buckets = [bucket_of[w] for w in weights_used_by(submodule, called) if w in bucket_of]
        needed_by[submodule] = list(dict.fromkeys(buckets))
    return needed_by


def weights_used_by(module: nn.Module, called: set[nn.Module]) -> list[nn.Parameter]:
    weights = list(module.parameters(recurse=False))
    for child in module.children():
        if child not in called:
            weights += weights_used_by(child, called)
    return weights


def layout_of(module: nn.Module) -> list[tuple]:
    return [(id(p), p.requires_grad, p.data_ptr()) for p in module.parameters()]


def views_like(weights: Iterable[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return each weight's place in flat memory, one after another, with its strides."""
    weights = list(weights)
    sizes = [weight.numel() for weight in weights]
    views = []
    for weight, piece in zip(weights, flat[: sum(sizes)].split(sizes), strict=True):
        strides = torch.empty_like(weight, device="meta").stride()  # of its memory format
        views.append(piece.as_strided(weight.shape, strides))
    return views


def pieces_of(weights: Iterable[torch.Tensor], part: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Return what a rank's slice has of each weight, maybe nothing, with as many dimensions."""
    pieces = []
    start = -rank * len(part)  # of a weight, counted from where the slice begins
    for weight in weights:
        end = start + weight.numel()
        ones = [1] * (weight.ndim - 1)  # recipes decay what has two dimensions
        pieces.append(part[max(start, 0) : max(end, 0)].view(*ones, -1))
        start = end
    return pieces


def gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    """Return .grad, which is set to zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def fill_buckets(parameters: list[nn.Parameter], bucket_size_mb: float | None) -> list[list]:
    """Split parameters, in this order, into lists of limited size and of one dtype."""
    limit = torch.inf if bucket_size_mb is None else bucket_size_mb * 2**20
    buckets = []
    last = {}  # dtype -> the last bucket of that kind
    for parameter in parameters:
        bucket = last.get(parameter.dtype)
        if bucket is None or sum(p.nbytes for p in bucket) + parameter.nbytes > limit:
            bucket = last[parameter.dtype] = []
            buckets.append(bucket)
        bucket.append(parameter)
    return buckets


def broadcast_from_rank_0(module: nn.Module, process_group) -> None:
    """Give all ranks rank 0's parameters and buffers. ValueError if the module is wrapped."""
    for submodule in module.modules():
        if hasattr(submodule, "no_sync") or hasattr(submodule, "finish_gradient_synchronization"):
            raise ValueError("a module can be wrapped only once: wrap the plain one, model.module")
    for tensor in [*module.parameters(), *module.buffers()]:
        contiguous = tensor.detach().contiguous()  # as collectives need it
        dist.broadcast(contiguous, group=process_group, group_src=0)
        tensor.detach().copy_(contiguous)


class ZeRO2WithoutOverlap(ZeRO2):
    """The same calls: gradients leave after backward, and all weights are there before forward."""

    def forward(self, *inputs, **kwargs):
        if self.stale:
            self.gather()
        return super().forward(*inputs, **kwargs)

    def _launch_ready(self):
        if not self.in_step:  # but in the finish
            super()._launch_ready()


def most_bytes(ways: dict, args, device, result: dict) -> dict:
    """Measure what a rank holds at most if a model is made and trained for two steps: a column."""
    from memory import peak_bytes

    from common import ladder, setup, timing

    memory = result["memory_bytes"] = {}
    for name, way in ways.items():
        setup.progress(f"memory of {name}")

        def train(way=way):
            trainee = ladder.language_trainee(way, args, device, (1, 8))
            trainee.step()
            trainee.step()

        # On a busy machine gloo lags, so the least counts.
        memory[name] = timing.gather(min(peak_bytes(train, device) for _ in range(2)))
    return {"MB": {name: f"{max(of_ranks) / 2**20:.1f}" for name, of_ranks in memory.items()}}


def main():
    stage = Path(__file__).resolve().parents[1]
    folders = stage.parent, stage, stage / "fsdp", stage.parent / "05_bucketed"
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        import accounting
        import fsdp
        from bucketed import BucketedDDP

        from common import ladder
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folders common/, 05_* and 06_*, too")
    many = int(os.environ.get("WORLD_SIZE", 2)) > 2  # seven candidates, and all within a minute
    args = ladder.stage_parser(
        __doc__, steps=3 if many else 5, warmup=1 if many else 2, bucket_size_mb=5.0
    ).parse_args()
    size = {"bucket_size_mb": args.bucket_size_mb}
    way = partial(ladder.Way, waits_anywhere=True)
    others = {
        "BucketedDDP": ladder.Way(partial(BucketedDDP, **size)),
        **ladder.torch_ddp(args),
        "ZeRO2, no overlap": way(partial(ZeRO2WithoutOverlap, **size)),
        "FSDP": way(fsdp.FSDP),
        "torch, no reshard": way(accounting.torch_fsdp(fsdp.choose_units)["torch, no reshard"]),
    }
    ours = {"ZeRO2": way(partial(ZeRO2, **size))}
    ladder.main(args, ours, others, account=most_bytes)


if __name__ == "__main__":
    main()
