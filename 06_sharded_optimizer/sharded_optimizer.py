r"""06: split the optimizer's state over the ranks (ZeRO, stage 1).

Data-parallel ranks hold the same parameters and the same averaged gradients, so each of them would
keep the same optimizer state and compute the same update. Here every parameter has one owner: that
rank alone keeps its state (for Adam twice the parameter's bytes) and updates it, and then sends the
new values to all others. Gradients are averaged as before, by any of stages 02 to 05.

    make 06_sharded_optimizer NPROC=2                                     (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/sharded_optimizer.py  (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/sharded_optimizer.py                       (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO", SC 2020, section 5.1 (P_os); Stanford CS336, assignment 2.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_map


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls(params, **options)`, with the state of each parameter on one rank only.

        model = DDP(model)  # or another way to give all ranks the same values and gradients
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss_fn(model(x), y).backward()
        optimizer.step()  # with averaged gradients, on all ranks

    Parameters become views into flat buffers: move or cast the model before, not after. It works
    for optimizers that update each parameter by its own gradient alone.
    """

    def __init__(self, params, optimizer_cls, *, process_group=None, **options):
        self.optimizer_cls, self.options = optimizer_cls, options
        self.process_group, self.rank = process_group, dist.get_rank(process_group)
        self.local = None  # the optimizer of those parameters that this rank owns
        self.owners = {}  # parameter -> the rank that keeps its state and updates it
        self.loads = [0] * dist.get_world_size(process_group)  # bytes that each rank owns
        self.flats = []  # (owner, one flat buffer with the values of parameters that it owns)
        self.views = {}  # parameter -> its part of a flat buffer
        super().__init__(params, {})  # calls add_param_group() for each group
        self._shard(self.param_groups)
        self.defaults, self.state = self.local.defaults, self.local.state

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, also in mid-training; what is there keeps its owner and its state."""
        super().add_param_group(param_group)
        if self.local is not None:
            self._sync_to_local()
            self._shard(self.param_groups[-1:])

    def _shard(self, groups: list[dict]) -> None:
        """These new groups have all parameters; give `local` those of this rank."""
        parameters = [parameter for group in groups for parameter in group["params"]]
        check_can_be_sharded(parameters, self.optimizer_cls)
        self._choose_owners(parameters)
        self._flatten(parameters)
        own_groups = []
        for group in groups:
            own = [p for p in group["params"] if self.owners[p] == self.rank]  # maybe none
            own_groups.append({**group, "params": own})
        if self.local is None:
            self.local = self.optimizer_cls(own_groups, **self.options)
        else:
            self.local.add_param_group(*own_groups)
        self._sync_from_local()  # the options that they did not say

    def _choose_owners(self, parameters: list[nn.Parameter]) -> None:
        """Largest first (frozen ones last), to the rank that has least; alike on all ranks."""
        largest_first = sorted(parameters, key=lambda p: (p.requires_grad, p.nbytes), reverse=True)
        for parameter in largest_first:
            owner = self.loads.index(min(self.loads))
            self.loads[owner] += parameter.nbytes
            self.owners[parameter] = owner

    def _flatten(self, parameters: list[nn.Parameter]) -> None:
        """Make parameters of one owner views into one buffer, so that one broadcast sends them."""
        alike = {}  # (owner, dtype, device) -> the parameters of a flat buffer
        for parameter in parameters:
            kind = self.owners[parameter], parameter.dtype, parameter.device
            alike.setdefault(kind, []).append(parameter)
        for (owner, _, _), members in alike.items():
            sizes = [parameter.numel() for parameter in members]
            flat = members[0].detach().new_empty(sum(sizes))
            self.flats.append((owner, flat))
            for parameter, piece in zip(members, flat.split(sizes), strict=True):
                self.views[parameter] = in_layout_of(parameter, piece).copy_(parameter.detach())
                parameter.data = self.views[parameter]

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's parameters, and exchange. All ranks call a closure."""
        with torch.enable_grad():  # a closure runs backward
            loss = closure() if closure is not None else None
        self._sync_to_local()
        self.local.step()
        self._sync_from_local()
        send = partial(dist.broadcast, group=self.process_group, async_op=True)
        works = [send(flat, group_src=owner) for owner, flat in self.flats]  # alike on all ranks
        for work in works:
            work.wait()
        return loss

    def _sync_to_local(self) -> None:
        """Take over what was changed, such as a learning rate by a scheduler, or loaded."""
        check_views(self.views)
        for group, local in zip(self.param_groups, self.local.param_groups, strict=False):
            local.update({**group, "params": local["params"]})
        self.local.state = self.state

    def _sync_from_local(self) -> None:
        """Show in all groups what the local optimizer has in its own, such as a step counter."""
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            group.update({**local, "params": group["params"]})

    def state_dict(self) -> dict:
        """On rank 0 the whole state, on CPU, as without sharding; on others the groups alone."""
        return gather_state(self, super().state_dict())

    def load_state_dict(self, state_dict: dict | None) -> None:
        """Load what rank 0 passes: a whole state, saved at any world size or without sharding."""
        super().load_state_dict(scatter_state(self, state_dict))


# ==================================================================================================
# Below this line: what is refused, saving, the models, verify, the benchmark, main.


def check_can_be_sharded(parameters: list[nn.Parameter], optimizer_cls) -> None:
    """ValueError, as far as one can tell, where a rank's part would be another optimizer."""
    if any(hasattr(parameter, "is_shard") for parameter in parameters):
        raise ValueError("these are FSDP's shards: their state is split already")
    if optimizer_cls is torch.optim.LBFGS:
        raise ValueError("LBFGS looks at all parameters at once: use it without sharding")
    if hasattr(optimizer_cls, "train"):
        raise ValueError("its train() and eval() would change the parameters of one rank alone")


def check_views(views: dict) -> None:
    for parameter, view in views.items():
        if parameter.data_ptr() != view.data_ptr():
            todo = "move or cast the model before, and change values by parameter.copy_()"
            raise RuntimeError(f"a parameter has left its flat buffer: {todo}")


def in_layout_of(parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor:
    """Flat memory, seen in a parameter's shape and strides (channels_last, transposed)."""
    strides = torch.empty_like(parameter, device="meta").stride()  # meta: nothing is allocated
    return flat.as_strided(parameter.shape, strides)


def gather_state(sharded: ShardedOptimizer, whole: dict) -> dict:
    """Replace this rank's state by that of all, on rank 0."""
    mine, whole["state"] = whole["state"], {}
    for index, parameter in numbered(sharded, whole["param_groups"]):
        state = from_rank(sharded.owners[parameter], mine.get(index), sharded.process_group)
        if state and sharded.rank == 0:
            whole["state"][index] = state
    return whole


def scatter_state(sharded: ShardedOptimizer, whole: dict | None) -> dict:
    """This rank's part of the whole state that rank 0 has."""
    given = whole["state"] if sharded.rank == 0 else {}
    packed_groups = from_rank(0, whole and whole["param_groups"], sharded.process_group)
    state = {}
    for index, parameter in numbered(sharded, packed_groups):
        piece = from_rank(0, given.get(index), sharded.process_group)
        if piece and sharded.owners[parameter] == sharded.rank:
            state[index] = piece
    return {"state": state, "param_groups": packed_groups}


def numbered(sharded: ShardedOptimizer, packed_groups: list[dict]) -> list[tuple]:
    """(number in a state_dict, parameter), of all."""
    numbers = [number for packed in packed_groups for number in packed["params"]]
    parameters = [parameter for group in sharded.param_groups for parameter in group["params"]]
    return list(zip(numbers, parameters, strict=False))


def from_rank(source: int, values, process_group):
    """On all ranks a copy, on CPU, of rank `source`'s values, however they are nested."""
    box = [tree_map(copy_to_cpu, values)]
    dist.broadcast_object_list(box, group=process_group, group_src=source)
    return box[0]


def copy_to_cpu(value):
    return value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value


def gather_objects(mine) -> list:
    """What all ranks have, by rank."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


ADAMW = torch.optim.AdamW
SHARDED_ADAMW = partial(ShardedOptimizer, optimizer_cls=ADAMW)
TOLERANCE = 1e-12  # of the weights in verify: the same updates by the same gradients give 0
MEMORY_LEGEND = "MB: 2^20 bytes, held: whole parameters and gradients, this rank's own state\n"
LEGEND = """\
Percentiles over all steps of all ranks; optimizer: optimizer.step() alone, sync: the average of
gradients before it (ZeRO1 takes it within), both p50; sent: by rank 0 to its sockets in a step;
ZeRO: torch's ZeroRedundancyOptimizer, view: with its option parameters_as_bucket_view;
/: ratio of the steps' p50s, below 1 is faster."""


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

    Its first layer is frozen in epoch 1 and a new group in epoch 2; a scheduler lowers the rates.
    """
    from common import report, setup, timing

    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *held_out = setup.load_equal_shares(args, device)
    twins = []
    for make_optimizer in (make_sharded, ADAMW):
        model = setup.classifier(args.seed, images)
        model[0].requires_grad_(False)
        optimizer = make_optimizer(model[1:].parameters(), lr=3e-3)
        twins.append((model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)))
    watch = timing.Stopwatch(device)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in (1, 2):
        if epoch == 2:
            for model, optimizer, _ in twins:
                first_layer = list(model[0].requires_grad_(True).parameters())
                optimizer.add_param_group({"params": first_layer, "lr": 1e-3})
        order = torch.randperm(len(images), generator=shuffle)
        for step, union in enumerate(order.split(64 * world_size), 1):
            shard = union[rank::world_size]
            watch.mark("start")
            for model, optimizer, scheduler in twins:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[shard]), labels[shard])
                loss.backward()
                average_gradients(model)
                optimizer.step()
                scheduler.step()
            watch.mark("end")
            times = {"step of both": watch.seconds("start", "end")}
            report.log_step(args, epoch, step, loss, times)
        accuracy = report.evaluate(epoch, twins[0][0], *held_out)
    weights, expected = [model.state_dict() for model, _, _ in twins]
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
        from common.report import held_bytes

        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [held_bytes(part) for part in (parameters, gradients, state_of(self.optimizer))]


def state_of(optimizer) -> list[torch.Tensor]:
    """Its tensors on this rank: sharded ones keep the optimizer that has them as local or optim."""
    optimizer = getattr(optimizer, "local", getattr(optimizer, "optim", optimizer))
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if torch.is_tensor(value)]


def sent_bytes(step) -> int | None:
    """What this rank writes in one more step, to sockets too; None where the system is silent."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return None
    written = []
    for call in (dist.barrier, step):
        call()
        written.append(int(counters.read_text().partition("wchar: ")[2].split()[0]))
    return written[1] - written[0]


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
    from zero1 import ZeRO1

    from common import setup, timing

    measured = optimizers
    if not args.no_baseline:
        zero = partial(ZeroRedundancyOptimizer, optimizer_class=ADAMW)
        view = partial(zero, parameters_as_bucket_view=True)
        optimizers = {"AdamW": ADAMW, **optimizers}
        measured = {**optimizers, "torch ZeRO": zero, "torch ZeRO view": view}
    candidates = {}
    for name, make_optimizer in measured.items():
        candidates[name] = Training(args, device, batch_shape, make_optimizer)
    memory = {name: account(candidates[name]) for name in optimizers}
    print_memory(memory)
    zero1 = partial(ZeRO1, optimizer_cls=ADAMW)  # it averages gradients itself
    candidates["ZeRO1"] = Training(args, device, batch_shape, zero1, finish=lambda _: None)

    steps = {name: training.step for name, training in candidates.items()}
    samples = timing.measure(steps, args.steps, args.warmup, setup.wire())
    for name, step in steps.items():
        samples[name]["sent_bytes"] = sent_bytes(step)
        samples[name]["collectives_per_step"] = timing.count_collectives(step)
    timing.profile(steps, args.trace)
    print_times(samples, setup.wire().dilation if setup.wire() else 1.0)
    rows = [{"name": name, **times} for name, times in samples.items()]
    return {"memory_bytes": memory, "candidates": rows}


def print_times(samples: dict[str, dict], dilation: float) -> None:
    """The table: a row per candidate; its times are ÷ dilation."""
    from common import report, setup

    rows = []
    for name, times in samples.items():
        row = [name, *report.milliseconds(torch.tensor(times["step_seconds"]) / dilation)]
        for part in ("optimizer_seconds", "exposed_comm_seconds"):
            row.append(f"{1000 * report.percentiles(times[part])[0] / dilation:.1f}")
        for other in ("torch ZeRO", "torch ZeRO view"):
            theirs = samples.get(other, {}).get("step_seconds")
            row.append(report.ratio(times["step_seconds"], theirs))
        sent = times["sent_bytes"]
        rows.append([*row, "-" if sent is None else f"{sent / 2**20:.1f}"])
    header = ["step, ms", "p50", "p75", "p90", "p95", "optimizer", "sync"]
    report.print_table([*header, "/ZeRO", "/ZeRO view", "sent MB"], rows)
    setup.say(LEGEND)


def of_adamw(sharded):
    """A class of the user's own, called as the others are."""

    def make_optimizer(params, **options):
        return sharded(params, ADAMW, **options)

    return make_optimizer


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
        optimizers[name] = of_adamw(mine)
    with setup.process_group(args.device, args.backend, args.timeout, args.network) as device:
        result = report.begin("06_sharded_optimizer", args, device)
        replicas = len(optimizers) if args.no_baseline else len(optimizers) + 4
        model = result["model"] = report.describe(LanguageModel, args, replicas)
        result["verify"] = None
        if not args.no_verify:
            for name in reversed(optimizers):
                if args.mine:
                    setup.say(f"verify: {name}")
                result["verify"] = verify(optimizers[name], args, device)
        batch_shape = model["batch_size"], model["context_length"]
        result |= benchmark(optimizers, args, device, batch_shape)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
