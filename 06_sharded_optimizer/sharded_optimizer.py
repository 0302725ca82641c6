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
from collections import ChainMap
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_map_only


class ShardedOptimizer(torch.optim.Optimizer):
    """Act like `optimizer_cls(params, **options)`, with each parameter's state on one rank only.

        model = DDP(model)  # or another way to give all ranks the same values and gradients
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss_fn(model(x), y).backward()
        optimizer.step()  # with averaged gradients, on all ranks

    Parameters become views into flat buffers: move or cast the model before, not after. It works
    for optimizers that update each parameter from its own gradient alone.
    """

    def __init__(self, params, optimizer_cls, *, process_group=None, **options):
        check_can_be_sharded(optimizer_cls)
        self.process_group, self.rank = process_group, dist.get_rank(process_group)
        self.local = None  # later: an optimizer_cls with the same groups and state
        self.owners = {}  # parameter -> the rank that keeps its state and updates it
        self.loads = [0] * dist.get_world_size(process_group)  # bytes that each rank owns
        self.flats = []  # what is broadcast, on all ranks in this order
        super().__init__(params, {})  # calls add_param_group() for each group
        self.local = optimizer_cls(self.param_groups, **options)
        self.defaults, self.state = self.local.defaults, self.local.state
        self.param_groups = self.local.param_groups  # both have what a scheduler changes in them
        for parameter, owner in self.owners.items():
            if owner != self.rank:
                self.state.pop(parameter, None)  # Adagrad makes it at once

    def add_param_group(self, param_group: dict) -> None:
        """Assign owners to a new group, also in mid-training; older ones keep owner and state."""
        (self.local or super()).add_param_group(param_group)  # to the list that both have
        parameters = self.param_groups[-1]["params"]
        if any(hasattr(parameter, "is_shard") for parameter in parameters):
            self.param_groups.pop()  # what is refused leaves no trace
            raise ValueError("these are FSDP's shards: their state is split already")
        self._choose_owners(parameters)
        alike = {}  # what one buffer can hold; frozen ones, in their own, are not sent
        for p in parameters:
            alike.setdefault((self.owners[p], p.requires_grad, p.dtype, p.device), []).append(p)
        self.flats += [FlatBuffer(self.owners[each[0]], each) for each in alike.values()]

    def _choose_owners(self, parameters: list[nn.Parameter]) -> None:
        """Give the largest first, frozen ones last, to the rank with the fewest bytes."""
        largest_first = sorted(parameters, key=lambda p: (p.requires_grad, p.nbytes), reverse=True)
        for parameter in largest_first:
            owner = self.loads.index(min(self.loads))
            self.loads[owner] += parameter.nbytes
            self.owners[parameter] = owner

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's parameters, and send them. All ranks call a closure."""
        with torch.enable_grad():  # a closure runs backward
            loss = closure() if closure is not None else None
        for flat in self.flats:
            flat.check()
        hidden = {p: p.grad for p, owner in self.owners.items() if owner != self.rank}
        try:
            for parameter in hidden:
                parameter.grad = None  # the local optimizer skips it, and makes no state
            self.local.step()
        finally:
            for parameter, gradient in hidden.items():
                parameter.grad = gradient
        works = []
        for flat in self.flats:
            if any(p.requires_grad or p.grad is not None for p in flat.parameters):
                root = {"group": self.process_group, "group_src": flat.owner}
                works.append(dist.broadcast(flat.values, **root, async_op=True))
        for work in works:
            work.wait()
        return loss

    def _own(self, state: dict) -> dict:
        """Return what a state_dict has of this rank's parameters, which are numbers there."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {n: each for n, each in state.items() if self.owners[parameters[n]] == self.rank}

    def state_dict(self) -> dict:
        """Return the whole state on rank 0, on CPU, as without sharding; elsewhere the groups."""
        saved, of_ranks = self.local.state_dict(), [{} for _ in self.loads]
        own, received = on_cpu(self._own(saved["state"])), of_ranks if self.rank == 0 else None
        dist.gather_object(own, received, group=self.process_group, group_dst=0)
        return {**saved, "state": dict(sorted(ChainMap(*of_ranks).items()))}

    def load_state_dict(self, state_dict: dict | None) -> None:
        """Load what rank 0 passes: a whole state, saved at any world size or without sharding."""
        received = [on_cpu(state_dict)]
        dist.broadcast_object_list(received, group=self.process_group, group_src=0)
        self.local.load_state_dict({**received[0], "state": self._own(received[0]["state"])})
        self.param_groups, self.state = self.local.param_groups, self.local.state  # new ones


# ==================================================================================================
# Below this line: what is refused, flat buffers, the model, verify, the benchmark, main.


def check_can_be_sharded(optimizer_cls) -> None:
    """Raise ValueError, as far as one can tell, where a rank's part would be another optimizer."""
    if optimizer_cls is torch.optim.LBFGS:
        raise ValueError("LBFGS looks at all parameters at once: use it without sharding")
    if hasattr(optimizer_cls, "train"):
        raise ValueError("its train() and eval() would change the parameters of one rank alone")


class FlatBuffer:
    """Holds the values of alike parameters of one owner: they become views into it."""

    def __init__(self, owner: int, parameters: list[nn.Parameter]):
        self.owner, self.parameters = owner, parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.values = parameters[0].detach().new_empty(sum(sizes))
        for parameter, piece in zip(parameters, self.values.split(sizes), strict=True):
            strides = torch.empty_like(parameter, device="meta").stride()  # channels_last, too
            view = piece.as_strided(parameter.shape, strides)
            parameter.data = view.copy_(parameter.detach())

    def check(self) -> None:
        address = self.values.untyped_storage().data_ptr()
        if any(p.untyped_storage().data_ptr() != address for p in self.parameters):
            raise RuntimeError("a parameter has left its flat buffer: move or cast it before")


def on_cpu(state: dict) -> dict:
    """Return a copy of a state, with all tensors on the CPU."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


def of_adamw(mine, params, **options):
    """Shard AdamW by the user's own class, which takes it by position, as in `make check`."""
    return mine(params, ADAMW, **options)


ADAMW = torch.optim.AdamW
SHARDED_ADAMW = partial(ShardedOptimizer, optimizer_cls=ADAMW)

TOLERANCE = 1e-12  # of the weights in verify: the same updates by the same gradients give 0
LEGEND = """\
Percentiles over all steps of all ranks; {}
sent: by rank 0 to its sockets in a step; /: ratio of the p50s, below 1 is faster."""
EXPOSED = "exposed: p50 from the last gradient until all are averaged; optimizer: p50 of step();"


class LanguageModel(nn.Module):
    """Map tokens, int64 [batch, context], to logits [batch, context, vocabulary]: a transformer."""

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
    """Average all gradients as stage 03 does, with one all-reduce of one flat tensor."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = nn.utils.parameters_to_vector(gradients).div_(dist.get_world_size())
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, gradients)


def verify(name, make_sharded, args, device) -> dict:
    """Train a classifier with a sharded AdamW and a twin with AdamW; compare all their weights."""
    from common import ladder, setup

    setup.say(f"verify: {name}")
    data = ladder.load_equal_shares(args, device)
    twins = []
    for make_optimizer in (make_sharded, ADAMW):
        model = ladder.classifier(args.seed, data[0])
        twins.append((model, make_optimizer(model.parameters(), lr=1e-3), average_gradients))
    train_twins(twins, data, args.seed, args.log_every)
    weights, expected = [model.state_dict() for model, _, _ in twins]
    if args.save and dist.get_rank() == 0:
        torch.save(weights, args.save)
    return compare(weights, expected, TOLERANCE, "unsharded AdamW")


def train_twins(twins: list[tuple], data: list, seed: int, log_every: int = 0) -> None:
    """Train models on the same shares of data: (model, its optimizer, what averages gradients).

    With `log_every` it prints how the first one gets on.
    """
    from common import ladder, timing

    images, labels, *held_out = data
    rank, world_size = dist.get_rank(), dist.get_world_size()
    watch = timing.Stopwatch(images.device)
    log = ladder.TrainingLog(log_every, len(images), 64)
    shuffle = torch.Generator().manual_seed(seed)
    for epoch in (1, 2):
        order = torch.randperm(len(images), generator=shuffle)
        for union in order.split(64 * world_size):
            share = union[rank::world_size]
            for model, optimizer, average in twins:
                watch.mark("step starts")
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[share]), labels[share])
                loss.backward()
                watch.mark("sync starts")
                average(model)
                watch.mark("sync ends")
                optimizer.step()
                watch.mark("step ends")
                if model is twins[0][0]:
                    times = {"step_seconds": watch.seconds("step starts", "step ends")}
                    times["exposed_comm_seconds"] = watch.seconds("sync starts", "sync ends")
                    log.add(loss.detach(), times)
        ladder.evaluate(epoch, twins[0][0], *held_out)


def compare(weights: dict, expected: dict, tolerance: float, theirs: str) -> dict:
    """Say how far apart any weights are, on any rank; above the tolerance end the run."""
    from common import setup, timing

    distances = [(weights[name] - weight).abs().max() for name, weight in expected.items()]
    of_ranks = timing.gather(torch.stack(distances).max().item())
    worst = torch.tensor(of_ranks, dtype=torch.float64).max().item()  # which keeps a NaN
    if not worst <= tolerance:
        sys.exit(f"verify: FAILED, a weight is {worst:.1e} away from {theirs}")
    away = f"at most {worst:.1e} away from {theirs} (allowed: {tolerance:.0e})"
    setup.say(f"verify: passed, all ranks are {away}\n")
    return {"max_abs_diff": worst, "tolerance": tolerance, "passed": True}


class Trainee:
    """Train a language model with averaged gradients, and note what a step takes."""

    def __init__(self, args, device, batch, make_optimizer, wrap=None, finish=average_gradients):
        from common import ladder, timing

        self.watch = timing.Stopwatch(device)
        shape = ladder.SIZES[args.size][:5]
        torch.manual_seed(args.seed + dist.get_rank())
        self.tokens, self.targets = torch.randint(shape[-1], (2, *batch), device=device)
        torch.manual_seed(args.seed)
        with device:
            model = LanguageModel(*shape).to(getattr(torch, args.dtype))
            self.watch.mark_last_gradient(next(model.parameters()))
            self.model = wrap(model) if wrap else model
        self.optimizer = make_optimizer(self.model.parameters(), lr=1e-4, fused=True)
        self.is_wrapped, self.finish = wrap is not None, finish

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
        times = {
            "step_seconds": self.watch.seconds("forward starts", "optimizer ends"),
            "optimizer_seconds": self.watch.seconds("optimizer starts", "optimizer ends"),
        }
        if not self.is_wrapped:  # a wrapper may wait before the last gradient, and have others
            times["exposed_comm_seconds"] = self.watch.seconds("last gradient", "sync ends")
        return times

    def held_parts(self) -> list[int]:
        """Return the bytes that this rank holds: of parameters, gradients, optimizer state."""
        from common.report import held_bytes

        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = getattr(self.optimizer, "local", self.optimizer)  # a sharded one's own part
        state = [value for values in local.state.values() for value in values.values()]
        return [held_bytes(part) for part in (parameters, gradients, state)]


def sent_bytes(step) -> float:
    """Return what this rank writes in one more step, to sockets too; nan where no counter is."""
    counters = Path("/proc/self/io")  # on Linux; the second is of bytes that were written
    if not counters.exists():
        return float("nan")
    dist.barrier()
    before = int(counters.read_text().split()[3])
    step()
    return int(counters.read_text().split()[3]) - before


def print_memory(memory: dict[str, list], parts: list[str]) -> None:
    """Print {candidate: [rank][bytes of each part]}, of the rank that has most."""
    from common import report

    rows = []
    for name, all_ranks in memory.items():
        most = max(all_ranks, key=sum)
        rows.append([name, *[f"{part / 2**20:,.1f}" for part in [*most, sum(most)]]])
    report.print_table(["MB", *parts, "at most"], rows)


def benchmark(optimizers: dict, args, device, batch_shape) -> dict:
    """Measure unsharded AdamW, this stage, torch's ZeRO: what ranks hold, how long steps take."""
    from common import setup, timing

    if not args.no_baseline:
        optimizers = {"AdamW": ADAMW, **optimizers}
    new = partial(Trainee, args, device, batch_shape)
    candidates = {name: new(make_optimizer) for name, make_optimizer in optimizers.items()}
    memory = {}
    for name, trainee in candidates.items():
        trainee.step()  # the first one makes the state
        memory[name] = timing.gather(trainee.held_parts())
    print_memory(memory, ["parameters", "gradients", "optimizer state"])
    setup.say("MB: 2^20 bytes, of the rank that has most, after a step\n")
    if not args.no_baseline:
        candidates = {"no communication": new(ADAMW, finish=lambda _: None), **candidates}
        zero = partial(ZeroRedundancyOptimizer, optimizer_class=ADAMW)
        candidates["torch ZeRO"] = new(zero)
        candidates["torch ZeRO view"] = new(partial(zero, parameters_as_bucket_view=True))
    samples = measure_steps(candidates, args)
    rows = print_steps(samples, "torch ZeRO", "exposed", EXPOSED)
    return {"memory_bytes": memory, "candidates": rows}


def measure_steps(candidates: dict[str, Trainee], args) -> dict[str, dict]:
    """Measure their steps in turn: {candidate: {quantity: [rank][step]}}, as the JSON has them."""
    from common import ladder, timing

    steps = {name: trainee.step for name, trainee in candidates.items()}
    samples = timing.measure(steps, args.steps, args.warmup, ladder.pace_of(args))
    for name, step in steps.items():
        samples[name]["sent_bytes"] = sent_bytes(step)
    timing.profile(steps, args.trace)
    return samples


def print_steps(samples: dict[str, dict], baseline: str, exposed: str, legend: str) -> list[dict]:
    """Print a row per candidate; returns them for the JSON. `exposed`: the title of its column."""
    from common import report, setup

    theirs = samples.get(baseline, {}).get("step_seconds")
    rows = []
    for name, times in samples.items():
        row = [name, *report.milliseconds(times["step_seconds"])]
        row += report.milliseconds(times["exposed_comm_seconds"])[:1]
        row += report.milliseconds(times["optimizer_seconds"])[:1]
        sent = f"{times['sent_bytes'] / 2**20:.1f}"
        rows.append([*row, sent, report.ratio(times["step_seconds"], theirs)])
    header = ["step, ms", "p50", "p75", "p90", "p95", exposed, "optimizer", "sent MB"]
    report.print_table([*header, f"/{baseline}"], rows)
    setup.say(LEGEND.format(legend))
    return [{"name": name, **times} for name, times in samples.items()]


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import ladder, report, setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")
    parser = ladder.stage_parser(__doc__, steps=10)
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    args = parser.parse_args()
    optimizers = {"ShardedOptimizer": SHARDED_ADAMW}
    if args.mine:
        sys.path.append(str(folder.parent / "05_bucketed" / "compare"))
        from users_class import users_rows

        for name, mine in users_rows(args.mine).items():
            optimizers[name] = partial(of_adamw, mine)
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("06_sharded_optimizer", args, device)
        model = result["model"] = ladder.describe(LanguageModel, args)
        result["verify"] = {}
        if not args.no_verify:
            for name, make_optimizer in optimizers.items():
                result["verify"][name] = verify(name, make_optimizer, args, device)
        batch_shape = model["batch_size"], model["context_length"]
        result |= benchmark(optimizers, args, device, batch_shape)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
