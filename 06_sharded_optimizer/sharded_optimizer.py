r"""06: split the optimizer's state over the ranks (ZeRO, stage 1).

Data-parallel ranks hold the same parameters and the same averaged gradients, so each of them would
keep the same optimizer state and compute the same update. Here every parameter has one owner: that
rank alone keeps its state (for Adam twice the parameter's bytes) and updates it, and then sends the
new values to all others.

    make 06_sharded_optimizer NPROC=2                                     (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/sharded_optimizer.py  (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/sharded_optimizer.py                       (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5.1 (P_os); Stanford CS336, assignment 2, "Optimizer state sharding".
"""

import hashlib
import sys
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls(params, **kwargs)`, with the state of each parameter on one rank only.

    Use it as the optimizer that it stands for, on all ranks alike: all but `zero_grad` communicate.
    Parameters must come here with equal values on all ranks (the constructor of DDP sees to that)
    and with averaged gradients to `step`. They become views into flat buffers: move or cast the
    model before, not after. For every optimizer that updates each parameter by itself: all of
    torch but LBFGS. Raises ValueError on all ranks if their parameters differ.
    """

    def __init__(self, params, optimizer_cls, *, process_group=None, **kwargs):
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this rank is not in process_group: make no ShardedOptimizer here")
        self.make_optimizer = partial(optimizer_cls, **kwargs)
        # The optimizer of this rank's shard. It has the same groups with only its parameters; none
        # at first, but that checks the arguments and gives the defaults.
        self.local = self.make_optimizer([{"params": []}])
        self.local.param_groups.clear()
        if isinstance(self.local, torch.optim.LBFGS):
            raise ValueError("LBFGS looks at all parameters at once: use it without sharding")
        self.owners = {}  # parameter -> the rank that keeps its state and updates it
        self.loads = [0] * self.world_size  # bytes of parameters that each rank owns
        self.flats = []  # (owner, one flat buffer with the values of parameters that it owns)
        self.views = {}  # parameter -> its part of a flat buffer
        # The base class would register group by group, and one rank may have more than another.
        # So it gets an empty one, and then all groups are registered at once.
        super().__init__([{"params": []}], self.local.defaults)
        self.param_groups.clear()
        self._register(params)
        self.state = self.local.state

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, also in mid-training; what is there keeps its owner and its state."""
        self._register([param_group])

    def _register(self, params) -> None:
        """Let the base class check and append groups; distribute them if all ranks agree."""
        before = len(self.param_groups)
        del self.local.param_groups[before:]  # groups that the user has taken out
        failure = None
        lines = []
        try:
            groups = torch.optim.Optimizer(params, self.defaults).param_groups  # whatever form
            for group in groups:
                super().add_param_group(group)
            for number, group in enumerate(self.param_groups):
                for parameter in group["params"]:
                    # If the class refuses it on one rank, all refuse.
                    self.make_optimizer([{**group, "params": [parameter]}])
                    kind = f"{layout(parameter)}, requires_grad={parameter.requires_grad}"
                    lines.append(f"{kind}, group {number}")
        except Exception as error:  # the other ranks must hear of it, or they would wait for us
            failure = error
            lines = [f"{type(error).__name__}: {error}"]
        difference = self._first_difference(lines)
        if difference:
            failure = ValueError(f"the ranks' parameters differ: {difference}")
        if failure:
            del self.param_groups[before:]  # what one rank refuses stays on none
            raise failure
        self._distribute(self.param_groups[before:])

    def _distribute(self, groups: list[dict]) -> None:
        """Give each parameter an owner and make it a view into a flat buffer of its owner."""
        unique = dict.fromkeys(chain.from_iterable(group["params"] for group in groups))
        parameters = [parameter for parameter in unique if parameter not in self.owners]
        # Largest first to the rank that has least; frozen ones last: they have no state to share.
        parameters.sort(key=lambda p: (p.requires_grad, p.nbytes), reverse=True)
        buckets = {}  # (owner, dtype, device) -> parameters; a flat buffer has one of each
        for parameter in parameters:
            owner = self.loads.index(min(self.loads))
            self.loads[owner] += parameter.nbytes
            self.owners[parameter] = owner
            buckets.setdefault((owner, parameter.dtype, parameter.device), []).append(parameter)
        for (owner, _, _), members in buckets.items():
            sizes = [parameter.numel() for parameter in members]
            flat = members[0].detach().new_empty(sum(sizes))
            self.flats.append((owner, flat))
            for parameter, piece in zip(members, flat.split(sizes), strict=True):
                # Without gaps, but else in the layout that it has (channels_last, transposed).
                dense = torch.empty_like(parameter, device="meta")
                view = piece.as_strided(dense.shape, dense.stride())
                self.views[parameter] = view.copy_(parameter.detach())
                parameter.data = view
        for group in groups:
            own = self._own(group)
            self.local.add_param_group(own)
            if own["params"]:  # some classes (Adagrad) make their state in the constructor
                self.local.state.update(self.make_optimizer([own]).state | self.local.state)

    def _own(self, group: dict) -> dict:
        """A group with its options of now, cut down to this rank's parameters."""
        own = [parameter for parameter in group["params"] if self.owners[parameter] == self.rank]
        return {**group, "params": own}

    @torch.no_grad()
    def step(self, closure=None, **kwargs):
        """Update this rank's shard and exchange the results: then all ranks have all new values.

        Every rank calls the closure, if there is one; returns its loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._return_to_buffers()
        del self.local.param_groups[len(self.param_groups) :]  # the user has taken groups out
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update(self._own(group))  # with what a scheduler or the user has changed
        self.local.state = self.state  # which the user may have reset
        self.local.step(**kwargs)
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            group.update({**local, "params": group["params"]})  # some classes count steps there
        send = partial(dist.broadcast, group=self.process_group, async_op=True)
        works = [send(flat, group_src=owner) for owner, flat in self.flats]
        for work in works:
            work.wait()
        return loss

    def _return_to_buffers(self) -> None:
        """Take the values of parameters that were given other memory (vector_to_parameters)."""
        for parameter, view in self.views.items():
            if parameter.data_ptr() == view.data_ptr():
                continue
            if layout(parameter) != layout(view) or parameter.device != view.device:
                raise RuntimeError(
                    f"a parameter has left its flat buffer, {layout(view)}, for {layout(parameter)}"
                    ": move or cast the model before constructing ShardedOptimizer, not after"
                )
            parameter.data = view.copy_(parameter)

    def state_dict(self) -> dict:
        """On rank 0 the whole state, on CPU, as `optimizer_cls` without sharding would give it.

        It is a copy, fetched parameter by parameter. On other ranks "state" is empty.
        """
        full = super().state_dict()
        mine = full["state"]
        full["state"] = {}
        for packed, index, parameter in self._numbered(full["param_groups"]):
            owner = self.owners[parameter]
            state = self._move(mine.get(index, {}), owner, 0)
            packed.update(self._move(packed, owner, 0))  # rank 0 may own nothing of this group
            if state and self.rank == 0:
                full["state"][index] = state
        if self.rank != 0:
            full["state_is_on_rank"] = 0
        return full

    def load_state_dict(self, state_dict: dict | None) -> None:
        """Load a whole state, saved at any world size or by `optimizer_cls` itself.

        The first rank that was given one hands it out; others may pass None or their own part.
        """
        if state_dict is None or "state_is_on_rank" in state_dict:
            state_dict = {"state": {}, "param_groups": None}
        of_ranks = self._gather(state_dict["param_groups"])
        givers = [rank for rank, groups in enumerate(of_ranks) if groups]
        if not givers:
            raise ValueError("no whole state was given: pass what state_dict() returns on rank 0")
        giver = givers[0]
        packed_groups = of_ranks[giver]
        state = {}
        for _, index, parameter in self._numbered(packed_groups):
            owner = self.owners[parameter]
            piece = self._move(state_dict["state"].get(index, {}), giver, owner)
            if piece and self.rank == owner:
                state[index] = piece
        super().load_state_dict({"state": state, "param_groups": packed_groups})
        # The class itself adds what old files lack.
        self.local.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self.local.param_groups = [self._own(group) for group in self.param_groups]

    def _numbered(self, packed_groups: list[dict]):
        """(packed group, number, parameter) for all parameters of a state_dict."""
        for packed, group in zip(packed_groups, self.param_groups, strict=False):
            for index, parameter in zip(packed["params"], group["params"], strict=False):
                yield packed, index, parameter

    def _gather(self, mine) -> list:
        """What all ranks have, by rank."""
        of_ranks = [None] * self.world_size
        dist.all_gather_object(of_ranks, mine, group=self.process_group)
        return of_ranks

    def _first_difference(self, mine: list[str]) -> str | None:
        """The first line in which a rank differs from rank 0, said in words."""
        digest = hashlib.sha256("\n".join(mine).encode()).digest()
        if len(set(self._gather(digest))) == 1:
            return None
        of_ranks = self._gather(mine)
        for rank, theirs in enumerate(of_ranks):
            pairs = zip_longest(of_ranks[0], theirs, fillvalue="nothing")
            for number, (expected, found) in enumerate(pairs):
                if expected != found:
                    return f"as number {number} rank 0 has {expected}, rank {rank} has {found}"
        return None

    def _move(self, values: dict, source: int, target: int) -> dict:
        """On rank `target` a copy, on CPU, of rank `source`'s values; elsewhere of its own."""
        copies = dict(values)
        for key, value in values.items():
            if torch.is_tensor(value):
                copies[key] = value.detach().to("cpu", copy=True)
        box = [copies]
        if self.rank == source != target:
            dist.send_object_list(box, group=self.process_group, group_dst=target)
        elif self.rank == target != source:
            dist.recv_object_list(box, group=self.process_group, group_src=source)
        return box[0]

    def __getstate__(self):
        raise RuntimeError("cannot be copied or pickled: save state_dict(), load it into another")


def layout(tensor: torch.Tensor) -> str:
    """What two tensors must share to hold the same values in the same places."""
    shape = tuple(tensor.shape)
    return f"{shape} {tensor.dtype} strides={tensor.stride()} {tensor.device.type}"


# ==================================================================================================
# Below this line: the models, verify, the benchmark, main.

ADAMW = torch.optim.AdamW
SHARDED_ADAMW = partial(ShardedOptimizer, optimizer_cls=ADAMW)
TOLERANCE = 1e-12  # of the weights in verify: the same updates by the same gradients give 0

LEGEND = [
    "Percentiles over all steps of all ranks; optimizer: optimizer.step() alone; step: all of a",
    "training step; ZeRO: torch's ZeroRedundancyOptimizer, view: with its option",
    "parameters_as_bucket_view; /: ratio of the p50s, below 1 is faster; state: optimizer state",
    "of the rank that has most.",
]

SIZES = {  # d_model, d_ff, layers, heads, vocabulary, sequences per rank and step, tokens in each
    "nano": (64, 256, 2, 2, 1_000, 4, 64),
    "tiny": (512, 2048, 4, 8, 10_000, 4, 64),
    "deep": (128, 512, 32, 4, 1_000, 4, 64),
    "small": (768, 3072, 12, 12, 10_000, 4, 128),
    "medium": (1024, 4096, 24, 16, 10_000, 4, 128),
    "large": (1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": (1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": (2560, 10_240, 32, 32, 10_000, 4, 128),
    "xl-2026": (2560, 10_240, 32, 32, 10_000, 4, 512),
    "10b": (4608, 12_288, 50, 36, 10_000, 4, 512),
    "0.5b": (1024, 4096, 24, 16, 50_000, 2, 512),
}


class LanguageModel(nn.Module):
    """A causal transformer: tokens int64 [batch, context] -> logits [batch, context, vocabulary].

    Pre-norm and without biases, as the course's; no position embedding: the tokens are random.
    """

    def __init__(self, d_model, d_ff, layers, heads, vocabulary):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, d_model)
        layer = partial(nn.TransformerEncoderLayer, batch_first=True, norm_first=True, bias=False)
        blocks = [layer(d_model, heads, d_ff, 0.0, F.gelu) for _ in range(layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token_embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(self.norm(x))


def average_gradients(model):
    """Stage 03's way: one all-reduce of one flat tensor."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(dist.get_world_size())
    dist.all_reduce(flat)
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, average in zip(gradients, pieces, strict=True):
        gradient.copy_(average.view(gradient.shape))


def verify(args, device):
    """Train a classifier with ShardedOptimizer and a twin with AdamW; compare all their weights.

    The first layer is frozen in epoch 1 and added as a group for epoch 2; a scheduler lowers the
    learning rates.
    """
    from common.setup import load_images, say
    from common.timing import Stopwatch

    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load_images(args.data, args.download, device)
    used = len(images) // world_size * world_size  # equal shards, in the last batch too
    if args.log_every or used < len(images):
        share = f"rank r takes images r, r + {world_size}, … of every {64 * world_size}"
        say(f"verify: {share}; {used} of {len(images)} are used")

    def build(make_optimizer):
        torch.manual_seed(args.seed)
        hidden_layers = [nn.Linear(images.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()]
        model = nn.Sequential(*hidden_layers, nn.Linear(50, 10)).to(device, torch.float64)
        model[0].requires_grad_(False)
        optimizer = make_optimizer(model[1:].parameters(), lr=3e-3)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    sharded = build(SHARDED_ADAMW)
    plain = build(ADAMW)
    watch = Stopwatch(device)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in range(1, 3):
        if epoch == 2:
            for model, optimizer, _ in (sharded, plain):
                first_layer = list(model[0].requires_grad_(True).parameters())
                optimizer.add_param_group({"params": first_layer, "lr": 1e-3})
        order = torch.randperm(len(images), generator=shuffle)[:used]
        for step, union in enumerate(order.split(64 * world_size), 1):
            shard = union[rank::world_size]
            times = []  # of the sharded optimizer's step, then of AdamW's
            for model, optimizer, scheduler in (sharded, plain):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images[shard]), labels[shard])
                loss.backward()
                average_gradients(model)
                watch.mark("averaged")
                optimizer.step()
                watch.mark("stepped")
                times.append(f"{1000 * watch.seconds('averaged', 'stepped'):.2f} ms")
                scheduler.step()
            if args.log_every and step % args.log_every == 0:
                optimizers = f"optimizer {times[0]}, AdamW {times[1]}"
                say(f"verify: epoch {epoch}, step {step}: loss {loss:.4f}, {optimizers}")
        with torch.no_grad():
            logits = sharded[0](test_images)
        loss = F.cross_entropy(logits, test_labels).item()
        accuracy = (logits.argmax(1) == test_labels).double().mean().item()
        say(f"verify: epoch {epoch}, held-out loss {loss:.4f}, accuracy {100 * accuracy:.2f} %")

    pairs = zip(sharded[0].parameters(), plain[0].parameters(), strict=True)
    difference = torch.stack([(mine - other).abs().max() for mine, other in pairs]).max().detach()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)  # every rank holds its own replicas of both
    difference = difference.item()
    if not difference <= TOLERANCE:
        sys.exit(f"verify FAILED: a weight is {difference:.1e} away from unsharded training")
    away = f"at most {difference:.1e} away from unsharded AdamW (allowed: {TOLERANCE:.0e})"
    say(f"verify: passed, all ranks are {away}\n")
    if args.save and rank == 0:
        torch.save(sharded[0].state_dict(), args.save)
        say(f"written: {args.save}")
    result = {"max_abs_diff": difference, "tolerance": TOLERANCE, "passed": True}
    return {**result, "accuracy": accuracy}


def own_state(optimizer) -> list:
    """This rank's tensors of optimizer state."""
    local = getattr(optimizer, "optim", optimizer)  # where ZeroRedundancyOptimizer keeps its shard
    values = [value for state in local.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value)]


def of_all_ranks(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def state_bytes(optimizer) -> list[int]:
    """Bytes of optimizer state on each rank."""
    return of_all_ranks(sum(value.nbytes for value in own_state(optimizer)))


def account(args, device, batch_shape):
    """What each rank holds around the second optimizer step (the first one makes the state).

    Returns {optimizer: {moment: [rank][bytes of parameters, gradients, optimizer state]}}.
    """
    optimizers = {"ShardedOptimizer": SHARDED_ADAMW}
    if not args.no_baseline:
        optimizers = {"AdamW": ADAMW} | optimizers
    memory = {}
    for name, make_optimizer in optimizers.items():
        model, optimizer, compute_gradients = training(args, device, batch_shape, make_optimizer)
        moments = {"model built": held_parts(model, optimizer)}
        compute_gradients()
        optimizer.step()
        compute_gradients()
        moments["before the step"] = held_parts(model, optimizer)
        optimizer.step()
        moments["after the step"] = held_parts(model, optimizer)
        memory[name] = moments
    return memory


def held_parts(model, optimizer) -> list:
    """[rank][bytes of parameters, gradients, optimizer state] at this moment."""
    from common.memory import held_bytes

    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parts = parameters, gradients, own_state(optimizer)
    return of_all_ranks([held_bytes(tensors) for tensors in parts])


def print_memory(memory):
    """The table: a row for each optimizer and moment, with the state of every rank."""
    from common import report
    from common.setup import say

    rows = []
    for name, moments in memory.items():
        for moment, of_ranks in moments.items():
            parameters, gradients, _ = of_ranks[0]  # all ranks have the same
            held = [parameters, gradients, *[state for _, _, state in of_ranks]]
            rows.append([f"{name}, {moment}", *[f"{part / 2**20:.1f}" for part in held]])
    ranks = [f"state, rank {rank}" for rank in range(dist.get_world_size())]
    report.print_table(["MB", "parameters", "gradients", *ranks], rows)
    say("MB: 2^20 bytes, held by a rank: whole parameters and gradients, its own optimizer state.")
    say()


def training(args, device, batch_shape, make_optimizer):
    """A model, its optimizer, and the function that computes averaged gradients anew."""
    shape = SIZES[args.size][:5]
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(shape[-1], (2, *batch_shape), device=device)
    torch.manual_seed(args.seed)
    with device:
        model = LanguageModel(*shape).to(getattr(torch, args.dtype))
    optimizer = make_optimizer(model.parameters(), lr=1e-4, fused=True)

    def compute_gradients(mark=lambda name: None):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        mark("gradients are there")
        average_gradients(model)
        mark("gradients are averaged")

    return model, optimizer, compute_gradients


def benchmark(args, device, batch_shape):
    """Time the optimizer step and the training step: AdamW unsharded, this stage, torch's ZeRO."""
    from common import report, timing
    from common.setup import say

    watch = timing.Stopwatch(device)

    def candidate(make_optimizer):
        """An optimizer with a model of its own, and two functions to time: a step, the update."""
        _, optimizer, compute_gradients = training(args, device, batch_shape, make_optimizer)

        def training_step():
            watch.mark("start")
            compute_gradients(watch.mark)
            optimizer.step()
            watch.mark("end")
            exposed = watch.seconds("gradients are there", "gradients are averaged")
            return {"step_seconds": watch.seconds("start", "end"), "exposed_comm_seconds": exposed}

        def update():
            watch.mark("start")
            optimizer.step()  # once more with the last gradients
            watch.mark("end")
            return {"optimizer_seconds": watch.seconds("start", "end")}

        return optimizer, training_step, update

    optimizers = {"ShardedOptimizer": SHARDED_ADAMW}
    if not args.no_baseline:
        zero = partial(ZeroRedundancyOptimizer, optimizer_class=ADAMW)
        optimizers = {"AdamW": ADAMW} | optimizers
        optimizers["torch ZeRO"] = zero
        optimizers["torch ZeRO view"] = partial(zero, parameters_as_bucket_view=True)
    candidates = {name: candidate(make) for name, make in optimizers.items()}
    training_steps = {name: step for name, (_, step, _) in candidates.items()}
    updates = {name: update for name, (_, _, update) in candidates.items()}
    samples = timing.measure(training_steps, args.steps, args.warmup)
    of_updates = timing.measure(updates, args.steps, args.warmup)
    for name, times in samples.items():
        times |= of_updates[name]
        times["optimizer_state_bytes"] = state_bytes(candidates[name][0])
        trace = args.trace if name == "ShardedOptimizer" else None
        times["collectives_per_step"] = timing.count_collectives(training_steps[name], trace)

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
    for line in LEGEND:
        say(line)
    return [{"name": name, **times} for name, times in samples.items()]


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, SIZES, steps=12)
    setup.add_verify_arguments(parser)
    args = parser.parse_args()
    if args.save and args.no_verify:
        parser.error("argument --save: not with --no-verify, which trains no classifier")

    with setup.process_group(args) as device:
        result = report.begin(folder.name, args, device)
        replicas = 1 if args.no_baseline else 4
        model = result["model"] = report.describe(LanguageModel, SIZES, args, replicas)
        result["verify"] = None if args.no_verify else verify(args, device)
        batch_shape = model["batch_size"], model["context_length"]
        result["memory_bytes"] = account(args, device, batch_shape)
        print_memory(result["memory_bytes"])
        result["candidates"] = benchmark(args, device, batch_shape)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
