r"""06: split the optimizer's state over the ranks (ZeRO, stage 1).

Data-parallel ranks hold the same parameters and the same averaged gradients, so each of them would
keep the same optimizer state and compute the same update. Here every parameter has one owner: that
rank alone keeps its state (for Adam twice the parameter's bytes) and updates it, and then sends the
new values to all others. Gradients are averaged as before, by any of stages 02 to 05.

    make 06_sharded_optimizer NPROC=2                                     (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/sharded_optimizer.py  (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/sharded_optimizer.py                       (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5.1 (P_os); Stanford CS336, assignment 2, "Optimizer state sharding".
"""

import sys
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_map


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls(params, **kwargs)`, with the state of each parameter on one rank only.

    Use it as the optimizer that it stands for, but call its methods on all ranks: all of them
    communicate, except `zero_grad`. Wrap the model in DDP before, so that all ranks have equal
    values; at `step` gradients must be averaged. Parameters become views into flat buffers: move or
    cast the model before, not after. It works for optimizers that treat parameters independently:
    all of torch's except LBFGS. ValueError, on all ranks, if their shapes, dtypes or groups differ.
    """

    def __init__(self, params, optimizer_cls, *, process_group=None, **kwargs):
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.optimizer_cls = optimizer_cls
        self.options = kwargs
        self.local = None  # the optimizer of those parameters that this rank owns
        self.owners = {}  # parameter -> the rank that keeps its state and updates it
        world_size = dist.get_world_size(process_group)
        self.loads = [0] * world_size  # bytes of parameters that each rank owns
        self.flats = []  # (owner, one flat buffer with the values of parameters that it owns)
        self.views = {}  # parameter -> its part of a flat buffer
        # The base class wants a group, and would register groups one by one: this one is not added.
        super().__init__([{"params": []}], {})
        self._register(params)
        self.defaults = self.local.defaults
        self.state = self.local.state

    def _register(self, params) -> None:
        """Share new groups out: here they have all parameters, in `local` those of this rank."""
        groups = agree_on_groups(self, params)  # the new ones; if one rank refuses them, all do
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._choose_owners(parameters)
        add_to_local(self, groups)
        self._flatten(parameters)

    def _choose_owners(self, parameters: list[nn.Parameter]) -> None:
        """Largest first, to the rank that has least so far. All ranks compute the same, alone.

        Frozen ones come last: they have no state, until somebody unfreezes them.
        """
        largest_first = sorted(parameters, key=lambda p: (p.requires_grad, p.nbytes), reverse=True)
        for parameter in largest_first:
            owner = self.loads.index(min(self.loads))
            self.loads[owner] += parameter.nbytes
            self.owners[parameter] = owner

    def _flatten(self, parameters: list[nn.Parameter]) -> None:
        """Make parameters of one owner views into one buffer, so that one broadcast sends them."""
        groups = {}  # (owner, dtype, device) -> the parameters of a flat buffer
        for parameter in parameters:
            kind = self.owners[parameter], parameter.dtype, parameter.device
            groups.setdefault(kind, []).append(parameter)
        for (owner, _, _), members in groups.items():
            sizes = [parameter.numel() for parameter in members]
            flat = members[0].detach().new_empty(sum(sizes))
            self.flats.append((owner, flat))
            for parameter, piece in zip(members, flat.split(sizes), strict=True):
                view = view_in_layout_of(parameter, piece)
                self.views[parameter] = view.copy_(parameter.detach())
                parameter.data = view

    @torch.no_grad()
    def step(self, closure=None, **kwargs):
        """Update this rank's shard, and exchange. All ranks call a closure; returns its loss."""
        with torch.enable_grad():  # a closure runs backward
            loss = closure() if closure is not None else None
        sync_groups_to_local(self)  # such as a learning rate that a scheduler has changed
        self.local.step(**kwargs)
        sync_groups_from_local(self)  # such as a step counter that a class keeps in its groups
        works = []
        for owner, flat in self.flats:  # in the same order on all ranks
            group = {"group": self.process_group, "group_src": owner}
            works.append(dist.broadcast(flat, **group, async_op=True))
        for work in works:
            work.wait()
        return loss

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, also in mid-training; what is there keeps its owner and its state."""
        if self.local is not None:
            self._register([param_group])

    def state_dict(self) -> dict:
        """On rank 0 the whole state, on CPU, as `optimizer_cls` without sharding would give it.

        It is a copy, fetched parameter by parameter. On other ranks it is empty.
        """
        return gather_state(self, super().state_dict())

    def load_state_dict(self, state_dict: dict | None) -> None:
        """Load a whole state, saved at any world size or by `optimizer_cls` itself.

        Rank 0 hands it out; what others pass does not matter.
        """
        super().load_state_dict(scatter_state(self, state_dict))

    def __getstate__(self):
        raise RuntimeError("cannot be copied or pickled: save state_dict(), load it into another")


# ==================================================================================================
# Below this line: what keeps the ranks together, the models, verify, the benchmark, main.


def agree_on_groups(sharded: ShardedOptimizer, params) -> list[dict]:
    """The new groups, in the base class's form. ValueError, on all ranks, if theirs differ."""

    def checked() -> list[dict]:
        groups = torch.optim.Optimizer(params, {}).param_groups  # whatever form they have
        torch.optim.Optimizer([*sharded.param_groups, *groups], {})  # no parameter is in two
        return groups

    groups = on_all_ranks(checked, sharded.process_group)
    lines = []
    for number, group in enumerate(groups):
        for p in group["params"]:
            layout = f"{tuple(p.shape)} {p.dtype} strides={p.stride()} {p.device.type}"
            kind = f"requires_grad={p.requires_grad}, group {number}"
            lines.append(f"as number {len(lines)} {layout}, {kind}")
    all_lines = gather_objects(lines, sharded.process_group)
    for rank, theirs in enumerate(all_lines):
        for first, other in zip_longest(all_lines[0], theirs, fillvalue="nothing"):
            if first != other:
                raise ValueError(
                    f"the ranks' parameters differ: rank 0 has {first}, rank {rank} has {other}"
                )
    return groups


def on_all_ranks(function, process_group):
    """What it returns. If it raises on one rank all raise, or they would wait for that one."""
    result = failure = None
    try:
        result = function()
    except Exception as error:
        failure = error
    for rank, text in enumerate(gather_objects(failure and str(failure), process_group)):
        if text is not None:
            raise failure or ValueError(f"rank {rank}, of its part of the parameters: {text}")
    return result


def gather_objects(mine, process_group=None) -> list:
    """What all ranks have, by rank."""
    gathered = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, mine, group=process_group)
    return gathered


def add_to_local(sharded: ShardedOptimizer, groups: list[dict]) -> None:
    """Give the local optimizer this rank's part of new groups. If one refuses its part, all do."""

    def add() -> None:
        own_groups = [own_part(sharded, group) for group in groups]
        if sharded.local is None:
            sharded.local = sharded.optimizer_cls(own_groups, **sharded.options)
        else:
            sync_groups_to_local(sharded)
            for own_group in own_groups:
                sharded.local.add_param_group(own_group)
        if isinstance(sharded.local, torch.optim.LBFGS):
            raise ValueError("LBFGS looks at all parameters at once: use it without sharding")

    on_all_ranks(add, sharded.process_group)
    sharded.param_groups += groups
    sync_groups_from_local(sharded)  # the options that they did not say


def own_part(sharded: ShardedOptimizer, group: dict) -> dict:
    """A group with its current options, cut down to this rank's parameters."""
    rank = sharded.rank
    own = [parameter for parameter in group["params"] if sharded.owners[parameter] == rank]
    return {**group, "params": own}


def view_in_layout_of(parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor:
    """Flat memory, seen in a parameter's shape and strides (channels_last, transposed)."""
    strides = torch.empty_like(parameter, device="meta").stride()  # meta: nothing is allocated
    return flat.as_strided(parameter.shape, strides)


def sync_groups_to_local(sharded: ShardedOptimizer) -> None:
    """Take over what was changed since the last step: hyper-parameters, a state that was reset."""
    for parameter, view in sharded.views.items():
        if parameter.data_ptr() != view.data_ptr():
            raise RuntimeError(
                "a parameter has left its flat buffer: move or cast the model before constructing"
                " ShardedOptimizer, not after, and change values in place: parameter.copy_(…)"
            )
    for group, local in zip(sharded.param_groups, sharded.local.param_groups, strict=True):
        local.update(own_part(sharded, group))
    sharded.local.state = sharded.state


def sync_groups_from_local(sharded: ShardedOptimizer) -> None:
    """Show in param_groups what the local optimizer wrote into its own."""
    for group, local in zip(sharded.param_groups, sharded.local.param_groups, strict=True):
        group.update({**local, "params": group["params"]})


def gather_state(sharded: ShardedOptimizer, state_dict: dict) -> dict:
    """Of this rank's state_dict the whole one, on rank 0; an empty one elsewhere."""
    mine = state_dict["state"]
    state_dict["state"] = {}
    for packed, index, parameter in numbered(sharded, state_dict["param_groups"]):
        owner = sharded.owners[parameter]
        state, options = from_rank(owner, sharded, [mine.get(index, {}), packed])
        packed.update(options)  # this rank may own nothing of the group
        if state and sharded.rank == 0:
            state_dict["state"][index] = state
    return state_dict if sharded.rank == 0 else {"state": {}, "param_groups": []}


def scatter_state(sharded: ShardedOptimizer, state_dict: dict | None) -> dict:
    """This rank's part of the whole state_dict that rank 0 was given."""
    whole = state_dict or {"state": {}, "param_groups": []}
    packed_groups = from_rank(0, sharded, whole["param_groups"])
    if not packed_groups:
        raise ValueError("rank 0 was given no whole state: pass what state_dict() returns there")
    state = {}
    for _, index, parameter in numbered(sharded, packed_groups):
        piece = from_rank(0, sharded, whole["state"].get(index, {}))
        if piece and sharded.rank == sharded.owners[parameter]:
            state[index] = piece
    return {"state": state, "param_groups": packed_groups}


def numbered(sharded: ShardedOptimizer, packed_groups: list[dict]):
    """(packed group, number, parameter) for all parameters of a state_dict."""
    for packed, group in zip(packed_groups, sharded.param_groups, strict=False):
        for index, parameter in zip(packed["params"], group["params"], strict=False):
            yield packed, index, parameter


def from_rank(source: int, sharded: ShardedOptimizer, values):
    """On all ranks a copy, on CPU, of rank `source`'s values, however they are nested."""
    box = [tree_map(copy_to_cpu, values)]
    dist.broadcast_object_list(box, group=sharded.process_group, group_src=source)
    return box[0]


def copy_to_cpu(value):
    return value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value


ADAMW = torch.optim.AdamW
SHARDED_ADAMW = partial(ShardedOptimizer, optimizer_cls=ADAMW)
TOLERANCE = 1e-12  # of the weights in verify: the same updates by the same gradients give 0
MEMORY_LEGEND = """\
MB: 2^20 bytes, held by a rank: whole parameters and gradients, its own optimizer state.
"""
LEGEND = """\
Percentiles over all steps of all ranks; optimizer: optimizer.step() alone; step: all of a
training step; ZeRO: torch's ZeroRedundancyOptimizer, view: with its option
parameters_as_bucket_view; /: ratio of the p50s, below 1 is faster; state: optimizer state
of the rank that has most."""


class LanguageModel(nn.Module):
    """Causal transformer: tokens int64 [batch, context] -> logits [batch, context, vocabulary]."""

    def __init__(self, d_model, d_ff, layers, heads, vocabulary):
        super().__init__()
        options = {"batch_first": True, "norm_first": True, "bias": False}
        layer = nn.TransformerEncoderLayer(d_model, heads, d_ff, 0.0, F.gelu, **options)
        norm = nn.LayerNorm(d_model, bias=False)
        self.token_embedding = nn.Embedding(vocabulary, d_model)  # no positions: random tokens
        self.layers = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        return self.head(self.layers(x, mask, is_causal=True))


def average_gradients(model: nn.Module) -> None:
    """Stage 03's way: one all-reduce of one flat tensor."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients).div_(dist.get_world_size())
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, gradients)


def verify(make_sharded, args, device):
    """Train a classifier with a sharded AdamW and a twin with AdamW; compare all their weights.

    The first layer is frozen in epoch 1 and added as a group for epoch 2; a scheduler lowers the
    learning rates.
    """
    from common import report, setup, timing

    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *held_out = setup.load_equal_shares(args, device)
    twins = {}
    for name, make_optimizer in (("sharded", make_sharded), ("unsharded", ADAMW)):
        model = setup.classifier(args.seed, images)
        model[0].requires_grad_(False)
        optimizer = make_optimizer(model[1:].parameters(), lr=3e-3)
        twins[name] = model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    watch = timing.Stopwatch(device)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in (1, 2):
        if epoch == 2:
            for model, optimizer, _ in twins.values():
                first_layer = list(model[0].requires_grad_(True).parameters())
                optimizer.add_param_group({"params": first_layer, "lr": 1e-3})
        order = torch.randperm(len(images), generator=shuffle)
        for step, union in enumerate(order.split(64 * world_size), 1):
            shard = union[rank::world_size]
            times = {}
            for name, (model, optimizer, scheduler) in twins.items():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[shard]), labels[shard])
                loss.backward()
                average_gradients(model)
                watch.mark("averaged")
                optimizer.step()
                watch.mark("stepped")
                times[name] = watch.seconds("averaged", "stepped")
                scheduler.step()
            report.log_step(args, epoch, step, loss, times)
        accuracy = report.evaluate(epoch, twins["sharded"][0], *held_out)
    weights, expected = [model.state_dict() for model, _, _ in twins.values()]
    worst = largest_distance(weights, expected, TOLERANCE, "unsharded AdamW")
    setup.say(
        f"verify: passed, all ranks are at most {worst:.1e} away from unsharded AdamW"
        f" (allowed: {TOLERANCE:.0e})\n"
    )
    return {"max_abs_diff": worst, "tolerance": TOLERANCE, "passed": True, "accuracy": accuracy}


def largest_distance(weights: dict, expected: dict, tolerance: float, theirs: str) -> float:
    """How far apart any weights are, on any rank; above the tolerance it ends the run."""
    distances = [(weights[name] - weight).abs().max() for name, weight in expected.items()]
    worst = torch.stack(distances).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if not worst <= tolerance:
        sys.exit(f"verify: FAILED, a weight is {worst:.1e} away from {theirs}")
    return worst.item()


class Training:
    """A language model and its optimizer, with averaged gradients; and what a step of it takes."""

    def __init__(
        self, args, device, batch_shape, make_optimizer, wrap=None, finish=average_gradients
    ):
        from common import setup, timing

        shape = setup.SIZES[args.size][:5]
        torch.manual_seed(args.seed + dist.get_rank())
        self.tokens, self.targets = torch.randint(shape[-1], (2, *batch_shape), device=device)
        torch.manual_seed(args.seed)
        with device:
            model = LanguageModel(*shape).to(getattr(torch, args.dtype))
            self.model = wrap(model) if wrap else model
        self.optimizer = make_optimizer(self.model.parameters(), lr=1e-4, fused=True)
        self.finish = finish
        self.watch = timing.Stopwatch(device)

    def compute_gradients(self) -> None:
        with self.watch.phase("forward"):
            self.optimizer.zero_grad()
            logits = self.model(self.tokens).flatten(0, 1).float()
            loss = F.cross_entropy(logits, self.targets.flatten())
        with self.watch.phase("backward"):
            loss.backward()
        with self.watch.phase("sync"):
            self.finish(self.model)

    def step(self) -> dict[str, float]:
        self.compute_gradients()
        with self.watch.phase("optimizer"):
            self.optimizer.step()
        times = self.watch.times()
        times["forward_seconds"] = self.watch.seconds("forward starts", "forward ends")
        times["backward_seconds"] = self.watch.seconds("backward starts", "sync ends")
        return times

    def held_parts(self) -> list[int]:
        """Bytes that this rank holds: of parameters, gradients, optimizer state."""
        from common.memory import held_bytes

        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [held_bytes(part) for part in (parameters, gradients, state_of(self.optimizer))]


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors on this rank. Of a sharded one they are in an optimizer within the optimizer."""
    within = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    states = [state for each in within or [optimizer] for state in each.state.values()]
    return [value for state in states for value in state.values() if torch.is_tensor(value)]


def account(training: Training) -> dict:
    """What each rank holds around the second optimizer step (the first one makes the state).

    Returns {moment: [rank][bytes of parameters, gradients, optimizer state]}.
    """
    built = gather_objects(training.held_parts())
    training.step()
    training.compute_gradients()
    before = gather_objects(training.held_parts())
    training.optimizer.step()
    after = gather_objects(training.held_parts())
    return {"model built": built, "before the step": before, "after the step": after}


def print_memory(memory: dict[str, dict]) -> None:
    """The table: a row for each optimizer and moment, with the state of every rank."""
    from common import report, setup

    rows = []
    for name, moments in memory.items():
        for moment, all_ranks in moments.items():
            parameters, gradients, _ = all_ranks[0]  # all ranks have the same
            held = [parameters, gradients, *[state for _, _, state in all_ranks]]
            rows.append([f"{name}, {moment}", *[f"{part / 2**20:.1f}" for part in held]])
    ranks = [f"state, rank {rank}" for rank in range(dist.get_world_size())]
    report.print_table(["MB", "parameters", "gradients", *ranks], rows)
    setup.say(MEMORY_LEGEND)


def benchmark(optimizers: dict, args, device, batch_shape) -> dict:
    """AdamW unsharded, this stage's, torch's ZeRO: what ranks hold, and times of their steps."""
    from common import timing

    if not args.no_baseline:
        zero = partial(ZeroRedundancyOptimizer, optimizer_class=ADAMW)
        view = partial(zero, parameters_as_bucket_view=True)
        optimizers = {"AdamW": ADAMW, **optimizers, "torch ZeRO": zero, "torch ZeRO view": view}
    candidates = {}
    memory = {}
    for name, make_optimizer in optimizers.items():
        candidates[name] = Training(args, device, batch_shape, make_optimizer)
        if "torch ZeRO" not in name:
            memory[name] = account(candidates[name])
    print_memory(memory)

    steps = {name: training.step for name, training in candidates.items()}
    samples = timing.measure(steps, args.steps, args.warmup)
    for name, training in candidates.items():
        held = gather_objects(training.held_parts())
        samples[name]["optimizer_state_bytes"] = [state for _, _, state in held]
        samples[name]["collectives_per_step"] = timing.count_collectives(training.step)
    timing.profile(steps, args.trace)
    print_times(samples)
    measured = [{"name": name, **times} for name, times in samples.items()]
    return {"memory_bytes": memory, "candidates": measured}


def print_times(samples: dict[str, dict]) -> None:
    """The table: two rows per candidate, the optimizer's step alone and a whole one."""
    from common import report, setup

    rows = []
    for quantity in ("optimizer_seconds", "step_seconds"):
        for name, times in samples.items():
            row = [f"{quantity.removesuffix('_seconds')}: {name}"]
            row += report.milliseconds(times[quantity])
            for other in ("torch ZeRO", "torch ZeRO view"):
                row.append(report.ratio(times[quantity], samples.get(other, {}).get(quantity)))
            row.append(f"{max(times['optimizer_state_bytes']) / 2**20:.1f}")
            rows.append(row)
    header = ["ms", "p50", "p75", "p90", "p95", "/ZeRO", "/ZeRO view", "state MB"]
    report.print_table(header, rows)
    setup.say(LEGEND)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")
    args = setup.stage_arguments(__doc__, steps=10)
    optimizers = {"ShardedOptimizer": SHARDED_ADAMW}
    for name, mine in setup.users_class(args).items():
        optimizers[name] = lambda params, mine=mine, **options: mine(params, ADAMW, **options)
    with setup.process_group(args) as device:
        result = report.begin("06_sharded_optimizer", args, device)
        replicas = len(optimizers) if args.no_baseline else len(optimizers) + 3
        model = result["model"] = report.describe(LanguageModel, args, replicas)
        result["verify"] = None
        if not args.no_verify:
            for name in reversed(optimizers):  # this stage's last: it is saved
                if args.mine:
                    setup.say(f"verify: {name}")
                result["verify"] = verify(optimizers[name], args, device)
        batch_shape = model["batch_size"], model["context_length"]
        result |= benchmark(optimizers, args, device, batch_shape)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
