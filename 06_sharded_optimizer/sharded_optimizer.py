"""06: split the optimizer's state over the ranks (ZeRO, stage 1).

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

import sys
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls(params, **kwargs)`, with the state of each parameter on one rank of the process group only.

    Use it as the optimizer that it stands for, on all ranks alike: the constructor, `add_param_group`, `step` and
    `state_dict` communicate. Parameters must come here with equal values on all ranks (the constructor of DDP sees to
    that) and with averaged gradients to `step`. They become views into flat buffers: move or cast the model before,
    not after. For every optimizer that updates each parameter by itself and needs no closure (all of torch but LBFGS).

    Raises ValueError on all ranks if their parameters differ.
    """

    def __init__(
        self,
        params,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        **kwargs,
    ):
        self.process_group = process_group
        self.rank, self.world_size = (
            dist.get_rank(process_group),
            dist.get_world_size(process_group),
        )
        self.optimizer_cls, self.kwargs = optimizer_cls, kwargs
        # The optimizer of this rank's shard. It starts with a stand-in, for a rank may own nothing and torch's
        # optimizers refuse an empty list; that also checks the arguments and gives the defaults.
        self.local = optimizer_cls([torch.empty(0)], **kwargs)
        self.local.state.clear()
        self.owners = {}  # parameter -> the rank that keeps its state and updates it
        self.loads = [0] * self.world_size  # bytes of parameters that each rank owns
        self.flats = []  # (owner, one flat buffer with the values of parameters that it owns)
        self.views = {}  # parameter -> its part of a flat buffer
        self.constructed = False
        self._register(super().__init__, params, self.local.defaults)
        self.constructed = True
        self.state = self.local.state

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, also in mid-training; what is there keeps its owner and its state. Call it on all ranks."""
        if self.constructed:
            self._register(super().add_param_group, param_group)
        else:
            super().add_param_group(
                param_group
            )  # called by the base class's constructor, once per group

    def _register(self, register, *arguments) -> None:
        """Let the base class check and append groups, and distribute them if all ranks have the same."""
        failure = None
        try:
            register(*arguments)
            mine = [
                f"{tuple(parameter.shape)} {parameter.dtype} strides={parameter.stride()} {parameter.device.type} "
                f"requires_grad={parameter.requires_grad} in group {number}"
                for number, group in enumerate(self.param_groups)
                for parameter in group["params"]
            ]
        except (
            Exception
        ) as error:  # the other ranks must hear of it, or they would wait for this one
            failure, mine = error, [f"{type(error).__name__}: {error}"]
        everyones = [None] * self.world_size
        dist.all_gather_object(everyones, mine, group=self.process_group)
        for rank, theirs in enumerate(everyones):
            for number, (expected, found) in enumerate(
                zip_longest(everyones[0], theirs, fillvalue="nothing")
            ):
                if expected != found:
                    raise ValueError(
                        f"the ranks' parameters differ: as number {number} rank 0 has {expected}, "
                        f"rank {rank} has {found}"
                    ) from failure
        if failure:
            raise failure
        self._distribute(
            dict.fromkeys(
                parameter
                for group in self.param_groups
                for parameter in group["params"]
                if parameter not in self.owners
            )
        )

    def _distribute(self, parameters) -> None:
        """Give each of these parameters an owner and make it a view into a flat buffer of its owner."""
        buckets = {}  # (owner, dtype, device) -> parameters; a flat buffer has one of each
        # Largest first to the rank that has least; frozen ones last, for they have no state to be shared out.
        for parameter in sorted(
            parameters, key=lambda p: (p.requires_grad, p.nbytes), reverse=True
        ):
            owner = self.loads.index(min(self.loads))
            self.loads[owner] += parameter.nbytes
            self.owners[parameter] = owner
            buckets.setdefault((owner, parameter.dtype, parameter.device), []).append(parameter)
        for (owner, _, _), members in buckets.items():
            sizes = [parameter.numel() for parameter in members]
            self.flats.append((owner, members[0].detach().new_empty(sum(sizes))))
            for parameter, piece in zip(members, self.flats[-1][1].split(sizes), strict=True):
                strides = torch.empty_like(
                    parameter, device="meta"
                ).stride()  # kept: channels_last, transposed
                self.views[parameter] = piece.as_strided(parameter.shape, strides).copy_(
                    parameter.detach()
                )
                parameter.data = self.views[parameter]
        if groups := self._own_groups(
            parameters
        ):  # some classes (Adagrad) make their state in the constructor
            self.local.state.update(self.optimizer_cls(groups, **self.kwargs).state)

    def _own_groups(self, parameters) -> list[dict]:
        """The groups, with their hyper-parameters of now, cut down to those of `parameters` that this rank owns."""
        groups = [
            {
                **group,
                "params": [
                    parameter
                    for parameter in group["params"]
                    if parameter in parameters and self.owners[parameter] == self.rank
                ],
            }
            for group in self.param_groups
        ]
        return [group for group in groups if group["params"]]

    @torch.no_grad()
    def step(self, closure=None, **kwargs):
        """Update the own shard and exchange the results: afterwards all ranks have all new values.

        Every rank calls the closure, if there is one; returns its loss. RuntimeError if the model was moved or cast.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, view in self.views.items():
            if parameter.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    "a parameter has left its flat buffer: move or cast the model before constructing "
                    "ShardedOptimizer, not after"
                )
        self.local.param_groups = self._own_groups(
            self.owners
        )  # whatever a scheduler or the user has changed
        if self.local.param_groups:
            self.local.step(**kwargs)
        works = [
            dist.broadcast(flat, group=self.process_group, group_src=owner, async_op=True)
            for owner, flat in self.flats
        ]
        for work in works:
            work.wait()
        return loss

    def state_dict(self) -> dict:
        """Collective. On rank 0 the whole state, on CPU, as `optimizer_cls` without sharding would give it.

        It is a copy, fetched parameter by parameter. On other ranks "state" is empty and "param_groups" complete.
        """
        full = super().state_dict()
        mine, full["state"] = full["state"], {}
        for index, parameter in self._numbered(full["param_groups"]):
            state = [
                {
                    key: value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value
                    for key, value in mine.get(index, {}).items()
                }
            ]
            owner = self.owners[parameter]
            if self.rank == owner != 0:
                dist.send_object_list(state, group=self.process_group, group_dst=0)
            elif self.rank == 0 != owner:
                dist.recv_object_list(state, group=self.process_group, group_src=owner)
            if self.rank == 0 and state[0]:
                full["state"][index] = state[0]
        return full

    def load_state_dict(self, state_dict: dict) -> None:
        """Take this rank's part of a whole state, saved at any world size or by `optimizer_cls` itself.

        Every rank must be given the whole: let all read the file, or send it with torch.distributed.broadcast_object_list.
        """
        own = [
            index
            for index, parameter in self._numbered(state_dict["param_groups"])
            if self.owners[parameter] == self.rank
        ]
        state = {index: state_dict["state"][index] for index in own if index in state_dict["state"]}
        super().load_state_dict({**state_dict, "state": state})
        self.local.__setstate__(
            {"state": self.state, "param_groups": self.param_groups}
        )  # adds what old files lack

    def _numbered(self, packed_groups: list[dict]) -> list[tuple[int, nn.Parameter]]:
        """All parameters with their numbers in a state_dict."""
        return [
            (index, parameter)
            for packed, group in zip(packed_groups, self.param_groups, strict=False)
            for index, parameter in zip(packed["params"], group["params"], strict=False)
        ]


# ==================================================================================================
# Below this line: the models, verify, the benchmark, main.

TOLERANCE = 1e-12  # of the weights in verify: the same updates by the same gradients give 0
ZERO = "torch ZeRO"
ZERO_VIEW = "torch ZeRO view"

SIZES = {  # d_model, d_ff, layers, heads, vocabulary, sequences per rank and step, tokens in each
    "tiny": (512, 2048, 4, 8, 10_000, 4, 64),
    "small": (768, 3072, 12, 12, 10_000, 4, 128),
    "medium": (1024, 4096, 24, 16, 10_000, 4, 128),
    "large": (1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": (1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": (2560, 10_240, 32, 32, 10_000, 4, 128),
    "0.5b": (1024, 4096, 24, 16, 50_000, 2, 512),
}


class LanguageModel(nn.Module):
    """A causal transformer: tokens int64 [batch, context] -> logits [batch, context, vocabulary].

    Pre-norm and without biases, as the course's; no position embedding: the tokens are random.
    """

    def __init__(self, d_model, d_ff, layers, heads, vocabulary):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                d_model, heads, d_ff, 0.0, F.gelu, batch_first=True, norm_first=True, bias=False
            )
            for _ in range(layers)
        )
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
    from common.images import load_images

    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = load_images(args.data, args.download)
    images, labels, test_images, test_labels = (part.to(device) for part in parts)

    def build(make_optimizer):
        torch.manual_seed(args.seed)
        hidden_layers = [nn.Linear(images.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()]
        model = nn.Sequential(*hidden_layers, nn.Linear(50, 10)).to(device, torch.float64)
        model[0].requires_grad_(False)
        optimizer = make_optimizer(model[1:].parameters(), lr=3e-3)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    sharded = build(partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW))
    plain = build(torch.optim.AdamW)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in range(1, 3):
        if epoch == 2:
            for model, optimizer, _ in (sharded, plain):
                first_layer = list(model[0].requires_grad_(True).parameters())
                optimizer.add_param_group({"params": first_layer, "lr": 1e-3})
        for union in torch.randperm(len(images), generator=shuffle).split(64 * world_size):
            if len(union) < 64 * world_size:
                break  # a last batch that does not fill every rank's 64
            shard = union[rank::world_size]
            for model, optimizer, scheduler in (sharded, plain):
                optimizer.zero_grad()
                F.cross_entropy(model(images[shard]), labels[shard]).backward()
                average_gradients(model)
                optimizer.step()
                scheduler.step()
        with torch.no_grad():
            logits = sharded[0](test_images)
        loss = F.cross_entropy(logits, test_labels).item()
        accuracy = (logits.argmax(1) == test_labels).double().mean().item()
        if rank == 0:
            line = f"held-out loss {loss:.4f}, accuracy {100 * accuracy:.2f} %"
            print(f"verify: epoch {epoch}, {line}", flush=True)

    pairs = zip(sharded[0].parameters(), plain[0].parameters(), strict=True)
    difference = torch.stack([(mine - other).abs().max() for mine, other in pairs]).max().detach()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)  # every rank holds its own replicas of both
    difference = difference.item()
    if not difference <= TOLERANCE:
        sys.exit(f"verify FAILED: a weight is {difference:.1e} away from unsharded training")
    if rank == 0:
        print(
            f"verify: passed, all ranks at most {difference:.1e} away from unsharded AdamW; "
            f"allowed: {TOLERANCE:.0e}",
            flush=True,
        )
    return {
        "max_abs_diff": difference,
        "tolerance": TOLERANCE,
        "passed": True,
        "accuracy": accuracy,
    }


def describe_model(args):
    """The language model of --size for the JSON. Fills in its batch and its context length."""
    *shape, batch_size, context_length = SIZES[args.size]
    args.batch_size = args.batch_size or batch_size
    args.context_length = args.context_length or context_length
    with torch.device("meta"):
        model = LanguageModel(*shape)
    return {
        "size": args.size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch_size": args.batch_size,
        "context_length": args.context_length,
        "dtype": args.dtype,
    }


def in_words(model):
    """What `describe_model` returns, for a headline."""
    return (
        f"{model['size']} model, {model['parameters'] / 1e6:.1f} million parameters, "
        f"{model['dtype']}, {dist.get_world_size()} ranks, "
        f"batch {model['batch_size']} × {model['context_length']} tokens per rank"
    )


def optimizers(args):
    """{candidate: function that makes its optimizer}."""
    adamw = torch.optim.AdamW
    options = {"lr": 1e-4, "fused": True}

    def unsharded(parameters):
        return adamw(parameters, **options)

    def sharded(parameters):
        return ShardedOptimizer(parameters, adamw, **options)

    def zero(parameters):
        return ZeroRedundancyOptimizer(parameters, adamw, **options)

    def zero_view(parameters):
        return ZeroRedundancyOptimizer(parameters, adamw, parameters_as_bucket_view=True, **options)

    if args.no_baseline:
        return {"ShardedOptimizer": sharded}
    return {"AdamW": unsharded, "ShardedOptimizer": sharded, ZERO: zero, ZERO_VIEW: zero_view}


def training(args, device, make_optimizer):
    """A language model of its own, its optimizer, and the function that computes gradients."""
    *shape, _, _ = SIZES[args.size]
    torch.manual_seed(args.seed)
    with device:
        model = LanguageModel(*shape)
    model = model.to(getattr(torch, args.dtype))
    torch.manual_seed(args.seed + dist.get_rank())
    batch = (args.batch_size, args.context_length)
    tokens, targets = torch.randint(shape[-1], (2, *batch), device=device)

    def backward():
        F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()).backward()

    return model, make_optimizer(model.parameters()), backward


def state_bytes(optimizer):
    """Bytes of optimizer state on each rank."""
    local = getattr(optimizer, "optim", optimizer)  # where ZeroRedundancyOptimizer keeps its shard
    mine = 0
    for state in local.state.values():
        mine += sum(value.nbytes for value in state.values() if torch.is_tensor(value))
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def candidate(make_optimizer, args, device):
    """An optimizer with its own model, and two functions to time: a training step, the update."""
    from common.timing import Stopwatch

    model, optimizer, backward = training(args, device, make_optimizer)
    watch = Stopwatch(device)

    def training_step():
        watch.mark("start")
        optimizer.zero_grad()
        backward()
        watch.mark("gradients are there")
        average_gradients(model)
        watch.mark("gradients are averaged")
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


def benchmark(args, device, what):
    """Time the optimizer step and the training step: AdamW unsharded, this stage, torch's ZeRO."""
    from common import report, timing

    optimizer_of, training_steps, updates = {}, {}, {}
    for name, make_optimizer in optimizers(args).items():
        optimizer_of[name], training_steps[name], updates[name] = candidate(
            make_optimizer, args, device
        )
    if dist.get_rank() == 0:
        print(f"\nbenchmark: {what};", flush=True)
        counts = f"{args.steps} training steps and {4 * args.steps} updates alone"
        print(f"{counts}, after {args.warmup} to warm up", flush=True)
    samples = timing.measure(training_steps, args.steps, args.warmup)
    of_updates = timing.measure(updates, 4 * args.steps, args.warmup)
    for name, times in samples.items():
        times |= of_updates[name]
        times["optimizer_state_bytes"] = state_bytes(optimizer_of[name])
        times["collectives_per_step"] = timing.count_collectives(training_steps[name])

    rows = []
    for quantity in ("optimizer_seconds", "step_seconds"):
        for name, times in samples.items():
            row = [f"{quantity.removesuffix('_seconds')}: {name}"]
            row += report.milliseconds(times[quantity])
            for other in (ZERO, ZERO_VIEW):
                row.append(report.ratio(times[quantity], samples.get(other, {}).get(quantity)))
            row.append(f"{max(times['optimizer_state_bytes']) / 2**20:.1f}")
            rows.append(row)
    if dist.get_rank() == 0:
        header = ["ms", "p50", "p75", "p90", "p95", "/ZeRO", "/ZeRO view", "state MB"]
        report.print_table(header, rows)
        print(
            "percentiles over all steps of all ranks; optimizer: optimizer.step() alone; step: all "
            "of a training step;\nZeRO: torch's ZeroRedundancyOptimizer, view: its "
            "parameters_as_bucket_view=True; /: ratio of the p50s, below\n1 is faster; state: "
            "optimizer state of the rank that has most",
            flush=True,
        )
    return [{"name": name, **times} for name, times in samples.items()]


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, SIZES, steps=10)
    args = parser.parse_args()

    with setup.process_group(args) as device:
        result = report.begin(folder.name, device)
        result["options"] = {}
        result["verify"] = None
        if not args.no_verify:
            result["verify"] = verify(args, device)
        result["model"] = describe_model(args)
        result["candidates"] = benchmark(args, device, in_words(result["model"]))
        if args.json and dist.get_rank() == 0:
            report.write_json(args.json, result)


if __name__ == "__main__":
    main()
