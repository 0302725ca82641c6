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
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Bucket:
    """Weights that travel together: one after another in `flat`, which is cut into N slices.

    weights  │ a        │ b                    │ c    │ zeros      views into `flat`
    slices   │ rank 0's          │ rank 1's                  │     a shard: b's part in rank 1's

    A shard has a slice's memory, so the optimizer's step changes this rank's part of the weights.
    """

    def __init__(self, parameters: list[nn.Parameter], process_group):
        self.parameters = parameters
        self.group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        size = sum(parameter.numel() for parameter in parameters)
        self.flat = parameters[0].new_zeros(size + -size % self.world_size)  # N slices of one size
        for parameter, view in zip(parameters, views_like(parameters, self.flat), strict=True):
            parameter.data = view.copy_(parameter.detach())
        self.slice = self.flat.view(self.world_size, -1)[self.rank]  # this rank updates it
        pieces = pieces_of(parameters, self.slice, self.rank)
        self.shards = [nn.Parameter(piece) for piece in pieces]  # of each parameter
        self.gathering = []  # all-gathers under way
        self.buffers = None  # of the reduce-scatter under way: what it sends, and what it receives
        self.sending = None  # its call
        self.parts = None  # its results, which are to be added up

    def begin_reduce_scatter(self, buffers):
        """Begin to send every rank its slice of the gradients; those of the weights are freed."""
        sent, received = [buffer[: self.flat.nbytes].view(self.flat.dtype) for buffer in buffers]
        for parameter, view in zip(self.parameters, views_like(self.parameters, sent), strict=True):
            torch.mul(gradient_or_zeros(parameter), 1 / self.world_size, out=view)
            parameter.grad = None
        self.buffers = buffers
        self.sending, self.parts = reduce_scatter(received, sent, self.group)

    def end_reduce_scatter(self):
        """Add the mean to the shards' gradients; return the buffers for the next bucket."""
        self.sending.wait()
        gradients = pieces_of(self.parameters, self.parts.sum(0), self.rank)
        for shard, gradient in zip(self.shards, gradients, strict=True):
            shard.grad = gradient if shard.grad is None else shard.grad + gradient
        return self.buffers

    def begin_all_gather(self):
        """Begin to fill flat, and so the weights, with the slices of all ranks."""
        work = all_gather_single(self.flat, self.slice, group=self.group, async_op=True)
        self.gathering.append(work)


class ZeRO2(nn.Module):
    """Keep 1/N of the gradients and of the optimizer's state; the weights stay whole.

    model = ZeRO2(module)                                  # on every rank; takes rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters())      # this rank's slice of every bucket
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
        self.buckets = [Bucket(members, process_group) for members in filled]
        self.bucket_of = {}  # by parameter
        self.shard_of = {}
        for bucket in self.buckets:
            self.bucket_of |= dict.fromkeys(bucket.parameters, bucket)
            self.shard_of |= zip(bucket.parameters, bucket.shards, strict=True)
        self.shards = [shard for bucket in self.buckets for shard in bucket.shards]
        self.free = buffers_for(self.buckets)  # pairs that no bucket has now, to send and receive
        # In a step: forward sets in_step, and gathers if the weights are stale. Hooks in backward
        # fill `ready`; a bucket goes from `waiting` to `reducing`. The finish resets all, and says
        # that the weights are stale, because it does not see the optimizer.
        self.waiting = self.buckets.copy()  # not launched yet
        self.ready = set()  # parameters whose gradient is complete
        self.reducing = []  # buckets whose gradients are under way
        self.in_step = False  # True from a forward to the finish: only then gradients are sent
        self.stale = False  # True when an optimizer may have changed the slices of other ranks
        self.called = set()  # modules whose forward was called
        self.needed_by = {}  # after the first forward: module -> the buckets that it waits for
        self.layout = layout_of(module)
        for parameter in self.order:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)
        for submodule in module.modules():
            # Before hooks that were there already, such as those of weight_norm: they read weights.
            submodule.register_forward_pre_hook(self._before_forward, prepend=True)
        mark_for_optimizers(self.order, self.shards, process_group)

    def forward(self, *inputs, **kwargs):
        self.in_step = self.in_step or torch.is_grad_enabled()
        if self.stale:
            self._begin_to_gather()
        if not self.needed_by or not torch.is_grad_enabled():
            wait_for(self.buckets)  # the first forward notes who is called; evaluation may differ
        outputs = self.module(*inputs, **kwargs)
        wait_for(self.buckets)  # those that this forward did not use
        if not self.needed_by:
            self.needed_by = who_needs_what(self.module, self.called, self.bucket_of)
        return outputs

    def _begin_to_gather(self):
        # Before zero_grad() the optimizer may step once more, which nothing here sees. Then this
        # gathers again in the next forward.
        self.stale = any(shard.grad is not None for shard in self.shards)
        for bucket in reversed(self.buckets):  # close to forward's order
            bucket.begin_all_gather()

    def _before_forward(self, module, inputs):  # PyTorch calls it before the module's forward
        self.called.add(module)
        wait_for(self.needed_by.get(module, []))

    def _gradient_is_ready(self, parameter):  # autograd calls it when parameter.grad is complete
        if parameter in self.ready:
            raise RuntimeError("a gradient came twice: finish after every backward")
        if self.in_step:
            self.ready.add(parameter)
            self._launch_ready()

    def _launch_ready(self):
        while self.waiting and self.ready.issuperset(self.waiting[0].parameters):
            if not self.free:
                self._end_oldest()
            bucket = self.waiting.pop(0)
            bucket.begin_reduce_scatter(self.free.pop())
            self.reducing.append(bucket)

    def _end_oldest(self):
        bucket = self.reducing.pop(0)
        self.free.append(bucket.end_reduce_scatter())

    def finish_gradient_synchronization(self) -> None:
        """Complete the shards' gradients. Call it after backward(), before optimizer.step()."""
        self.in_step = False
        self.ready.update(self.order)  # an unused parameter counts as zero
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
        if self.in_step:
            raise RuntimeError("call finish_gradient_synchronization() before clip_grad_norm_()")
        norms = []  # in float32 at least: the square of 256 is infinite in float16
        for shard in self.shards:
            dtype = torch.promote_types(shard.dtype, torch.float32)
            norms.append(torch.linalg.vector_norm(shard.grad, dtype=dtype))
        square = torch.stack(norms).square().sum()
        dist.all_reduce(square, group=self.process_group)
        nn.utils.clip_grads_with_norm_(self.shards, max_norm, square.sqrt())
        return square.sqrt()

    def gather(self) -> None:
        """Make the weights whole, to save or read them after a step. All ranks must call it."""
        self._begin_to_gather()
        wait_for(self.buckets)

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return a copy of the module's state_dict, on every rank; all ranks must call it."""
        self.gather()
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Yield the shards, by the names of their weights; so parameters() has the shards, too."""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, self.shard_of.get(parameter, parameter)  # a frozen one has no shard

    def no_sync(self):
        raise RuntimeError("there is no no_sync: finish after every backward, gradients add up")


def train_step(model, optimizer, inputs, targets):
    """Train on this rank's share of a batch; return its loss."""
    loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# ==================================================================================================
# Below this line: helpers, and the comparison.


# torch has renamed them (2.13, 2.14), and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PAIRS = 3  # of buffers: so many buckets are under way at once


def buffers_for(buckets: list[Bucket]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs that each of the buckets fits into. They are made once: new memory is slow."""
    largest = max((bucket.flat for bucket in buckets), key=lambda flat: flat.nbytes, default=None)
    pairs = []
    for _ in buckets[:PAIRS]:
        empty = partial(largest.new_empty, largest.nbytes, dtype=torch.uint8)  # for any dtype
        pairs.append((empty(), empty()))
    return pairs


def reduce_scatter(received: torch.Tensor, sent: torch.Tensor, group):
    """Begin; return the call, and tensors [1 or N] that add up to this rank's slice of the sum.

    gloo's own sends twice as much as it has to: there it is an all-to-all, and we add.
    """
    parts = received.view(dist.get_world_size(group), -1)
    if "nccl" in dist.get_backend(group):
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
        weights = weights_used_by(submodule, called)
        needed_by[submodule] = {bucket_of[weight] for weight in weights if weight in bucket_of}
    return needed_by


def weights_used_by(module: nn.Module, called: set[nn.Module]) -> list[nn.Parameter]:
    """Return its own weights, and those of its children that were never called."""
    weights = list(module.parameters(recurse=False))
    for child in module.children():
        if child not in called:
            weights += weights_used_by(child, called)
    return weights


def layout_of(module: nn.Module) -> list[tuple]:
    """Return what must not change while the module is wrapped."""
    return [(id(p), p.requires_grad, p.data_ptr()) for p in module.parameters()]


def mark_for_optimizers(weights: list, shards: list, group) -> None:
    """Let check_optimizer() know these weights and shards."""
    for weight in weights:
        weight.is_sharded = True
    for shard in shards:
        shard.is_shard = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"


def check_optimizer(optimizer: torch.optim.Optimizer, *_) -> None:
    """Refuse whole weights, which get no gradient, and another rank's state. Runs before a step."""
    for group in optimizer.param_groups:
        if any(hasattr(parameter, "is_sharded") for parameter in group["params"]):
            raise RuntimeError("this optimizer holds whole weights: give it model.parameters()")
        for shard in [parameter for parameter in group["params"] if hasattr(parameter, "is_shard")]:
            saved_by = group.setdefault("shards of", shard.is_shard)  # it is saved with the state
            if saved_by != shard.is_shard:
                raise RuntimeError(f"{shard.is_shard} has loaded the state of {saved_by}")


register_optimizer_step_pre_hook(check_optimizer)


def views_like(tensors: list[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return each tensor's place in flat memory, one after another, in its shape and strides."""
    views = []
    start = 0
    for tensor in tensors:
        strides = torch.empty_like(tensor, device="meta").stride()  # channels_last, too
        place = flat[start : start + tensor.numel()]
        views.append(place.as_strided(tensor.shape, strides))
        start += tensor.numel()
    return views


def pieces_of(weights: list[torch.Tensor], part: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Return what a rank's part of flat memory has of each weight, maybe nothing.

    A piece has as many dimensions as its weight: recipes decay what has two.
    """
    pieces = []
    begins = 0  # of a weight, in flat memory
    part_begins = rank * len(part)
    for weight in weights:
        ends = begins + weight.numel()
        first = max(begins - part_begins, 0)
        last = max(ends - part_begins, 0)
        ones = [1] * (weight.ndim - 1)
        pieces.append(part[first:last].view(*ones, -1))
        begins = ends
    return pieces


def gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    """Return .grad, which is set to zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def fill_buckets(parameters: list[nn.Parameter], bucket_size_mb: float | None) -> list[list]:
    """Split parameters, in this order, into lists of limited size, each of one dtype and device."""
    limit = torch.inf if bucket_size_mb is None else bucket_size_mb * 2**20
    buckets = []
    last = {}  # (dtype, device) -> the last bucket of that kind
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        bucket = last.get(kind)
        if bucket is None or sum(p.nbytes for p in bucket) + parameter.nbytes > limit:
            bucket = last[kind] = []
            buckets.append(bucket)
        bucket.append(parameter)
    return buckets


def broadcast_from_rank_0(module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
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
        if not self.in_step:  # only from the finish
            super()._launch_ready()


def main():
    stage = Path(__file__).resolve().parents[1]
    stage_05 = stage.parent / "05_bucketed"
    folders = stage.parent, stage, stage / "fsdp", stage_05, stage_05 / "compare"
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        import accounting
        import timeline
        from bucketed import BucketedDDP
        from fsdp import FSDP, choose_units
        from memory import account
        from sharded_optimizer import ShardedOptimizer, of_adamw

        from common import ladder
    except ModuleNotFoundError as error:
        folders = "common/, 05_bucketed/ and 06_sharded_optimizer/"
        sys.exit(f"error: {error}: copy the repository's folders {folders}")
    many = int(os.environ.get("WORLD_SIZE", 2)) > 2  # eight rows, and all within a minute
    parser = ladder.stage_parser(__doc__, steps=3 if many else 5, warmup=1 if many else 2)
    ladder.add_bucket_size(parser)
    timeline.add_argument(parser)
    args = parser.parse_args()
    size = {"bucket_size_mb": args.bucket_size_mb}
    shards = partial(ladder.Way, waits_noted=timeline.waits_noted)
    ours = {"ZeRO2": shards(partial(ZeRO2, **size))}
    buckets = {"BucketedDDP": ladder.Way(partial(BucketedDDP, **size))}
    if args.timeline:
        title = "ZeRO2 sends in forward, too: two steps"
        timeline.draw_ways(args, train_step, {**buckets, **ours}, title, steps=2)
        return
    torchs = ladder.torch_ddp(args.bucket_size_mb)
    stage_1 = torchs[ladder.TORCH_DDP]._replace(optimizer=of_adamw(ShardedOptimizer))
    others = {
        **torchs,
        **buckets,
        "ShardedOptimizer": stage_1,
        "ZeRO2, no overlap": shards(partial(ZeRO2WithoutOverlap, **size)),
        "FSDP": shards(FSDP),
        "torch, no reshard": accounting.torch_fsdp(choose_units)["torch, no reshard"],
    }
    ladder.main(args, train_step, ours, others, account)


if __name__ == "__main__":
    main()
