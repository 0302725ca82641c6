"""06: split the optimizer's state over the ranks (ZeRO, stage 1).

Data-parallel ranks hold the same parameters and the same averaged gradients, so each of them would keep the same
optimizer state and compute the same update. Here every parameter has one owner: that rank alone keeps its state (for
Adam twice the parameter's bytes) and updates it, and then sends the new values to all others.

    make 06_sharded_optimizer NPROC=2                                                   (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/sharded_optimizer.py  (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/sharded_optimizer.py                                       (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1
(P_os); Stanford CS336, assignment 2, "Optimizer state sharding".
"""

import argparse
import os
import resource
import sys
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


# ======================================================================================================================
# Below this line: the models, verify, the accounting of memory, the benchmark, main.

TOLERANCE = (
    1e-12  # of the weights in verify: the same updates by the same gradients, so 0 is expected
)
PARTS = {
    "parameters": "#56B4E9",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "rest": "#CCCCCC",
}  # and colours
ZERO, ZERO_VIEW = "torch ZeRO", "torch ZeRO view"

SIZES = {  # d_model, d_ff, layers, heads, vocabulary, sequences per rank and step, tokens per sequence
    "tiny": (512, 2048, 4, 8, 10_000, 4, 64),
    "small": (768, 3072, 12, 12, 10_000, 4, 128),
    "medium": (1024, 4096, 24, 16, 10_000, 4, 128),
    "large": (1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": (1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": (2560, 10_240, 32, 32, 10_000, 4, 128),
    "0.5b": (1024, 4096, 24, 16, 50_000, 2, 512),
}


class LanguageModel(nn.Module):
    """A causal transformer: token ids int64 [batch, context] -> logits [batch, context, vocabulary].

    Pre-norm and without biases, as the course's model; no position embedding, for the tokens are random.
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
    for gradient, average in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(average.view(gradient.shape))


def verify(args, device):
    """Train a classifier with ShardedOptimizer and, on the same gradients, one with AdamW itself; compare all weights.

    The first layer is frozen in epoch 1 and added as a group for epoch 2; a scheduler lowers the learning rates.
    """
    from common.images import load_images

    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = (
        part.to(device) for part in load_images(args.data, args.download)
    )
    trainings = []
    for optimizer_cls, options in (
        (ShardedOptimizer, {"optimizer_cls": torch.optim.AdamW}),
        (torch.optim.AdamW, {}),
    ):
        torch.manual_seed(args.seed)
        layers = (
            nn.Linear(images.shape[1], 50),
            nn.ReLU(),
            nn.Linear(50, 50),
            nn.ReLU(),
            nn.Linear(50, 10),
        )
        model = nn.Sequential(*layers).to(device, torch.float64)
        model[0].requires_grad_(False)
        optimizer = optimizer_cls(model[1:].parameters(), lr=3e-3, **options)
        trainings.append(
            (model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99))
        )
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in range(1, 3):
        for model, optimizer, _ in trainings if epoch == 2 else []:
            optimizer.add_param_group(
                {"params": list(model[0].requires_grad_(True).parameters()), "lr": 1e-3}
            )
        for union in torch.randperm(len(images), generator=shuffle).split(64 * world_size):
            shard = union[rank::world_size]
            if len(union) < 64 * world_size:
                break  # a last batch that does not fill every rank's 64
            for model, optimizer, scheduler in trainings:
                optimizer.zero_grad()
                F.cross_entropy(model(images[shard]), labels[shard]).backward()
                average_gradients(model)
                optimizer.step()
                scheduler.step()
        with torch.no_grad():
            logits = trainings[0][0](test_images)
        loss, accuracy = (
            F.cross_entropy(logits, test_labels).item(),
            (logits.argmax(1) == test_labels).double().mean(),
        )
        if rank == 0:
            print(
                f"verify: epoch {epoch}, held-out loss {loss:.4f}, accuracy {100 * accuracy:.2f} %",
                flush=True,
            )

    difference = (
        torch.stack(
            [
                (mine - plain).abs().max()
                for mine, plain in zip(
                    *(model.parameters() for model, *_ in trainings), strict=True
                )
            ]
        )
        .max()
        .detach()
    )
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)  # every rank holds its own replicas of both
    if not difference.item() <= TOLERANCE:
        sys.exit(f"verify FAILED: a weight is {difference.item():.1e} away from unsharded training")
    if rank == 0:
        print(
            f"verify: passed, all ranks at most {difference.item():.1e} away from unsharded AdamW; "
            f"allowed: {TOLERANCE:.0e}\n",
            flush=True,
        )
    return {
        "max_abs_diff": difference.item(),
        "tolerance": TOLERANCE,
        "passed": True,
        "accuracy": accuracy.item(),
    }


def optimizers(args):
    """{candidate: function that makes its optimizer}."""
    adamw, options = torch.optim.AdamW, {"lr": 1e-4, "fused": True}
    sharded = {
        "ShardedOptimizer": lambda parameters: ShardedOptimizer(parameters, adamw, **options)
    }
    if args.no_baseline:
        return sharded
    return (
        {"AdamW": lambda parameters: adamw(parameters, **options)}
        | sharded
        | {
            ZERO: lambda parameters: ZeroRedundancyOptimizer(parameters, adamw, **options),
            ZERO_VIEW: lambda parameters: ZeroRedundancyOptimizer(
                parameters, adamw, parameters_as_bucket_view=True, **options
            ),
        }
    )


def training(args, device, make_optimizer):
    """A language model of its own, its optimizer, and the function that computes averaged gradients."""
    d_model, d_ff, layers, heads, vocabulary, _, _ = SIZES[args.size]
    torch.manual_seed(args.seed)
    with device:
        model = LanguageModel(d_model, d_ff, layers, heads, vocabulary)
    model = model.to(getattr(torch, args.dtype))
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(
        vocabulary, (2, args.batch_size, args.context_length), device=device
    )

    def compute_gradients(backward_is_over=lambda: None):
        F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        backward_is_over()
        average_gradients(model)

    return model, make_optimizer(model.parameters()), compute_gradients


def state_bytes(optimizer):
    """Bytes of optimizer state on each rank."""
    local = getattr(optimizer, "optim", optimizer)  # where ZeroRedundancyOptimizer keeps its shard
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyones,
        sum(
            value.nbytes
            for state in local.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ),
    )
    return everyones


def peak_bytes(device):
    """The most memory since the last call: of CUDA's allocator, or this process's resident size on Linux. Elsewhere the
    resident size cannot be reset, and it is the most so far."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        words = Path("/proc/self/status").read_text().split()
        peak = int(words[words.index("VmHWM:") + 1]) * 1024
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    return peak


def account(args, device, make_optimizer):
    """Memory around the second optimizer step (the first one makes the state), in bytes:
    {moment: [rank][parameters, gradients, optimizer state, rest]}. The rest is the peak less the other three.
    """
    moments = {}

    def snapshot(moment):
        parts = [
            sum(parameter.nbytes for parameter in model.parameters()),
            sum(
                parameter.grad.nbytes
                for parameter in model.parameters()
                if parameter.grad is not None
            ),
            state_bytes(optimizer)[dist.get_rank()],
        ]
        moments[moment] = [None] * dist.get_world_size()
        dist.all_gather_object(moments[moment], [*parts, peak_bytes(device) - sum(parts)])

    peak_bytes(device)
    model, optimizer, compute_gradients = training(args, device, make_optimizer)
    snapshot("model built")
    compute_gradients()
    optimizer.step()
    optimizer.zero_grad()
    compute_gradients()
    snapshot("before the step")
    optimizer.step()
    snapshot("after the step")
    return moments


def report_memory(args, device, what):
    """Account without and with sharding; print it and draw it. Returns {candidate: what `account` returns}."""
    from matplotlib.figure import Figure

    from common.report import print_table

    # Sharded first: it needs less, so the other's peak stands out even where a peak cannot be reset.
    makers = optimizers(args)
    memory = {"sharded": account(args, device, makers["ShardedOptimizer"])}
    if not args.no_baseline:
        memory = {"unsharded": account(args, device, makers["AdamW"])} | memory
    if dist.get_rank() != 0:
        return memory
    print(f"memory: {what}")
    print_table(
        ["MB", "rank", *PARTS, "peak"],
        [
            [
                f"{name}, {moment}",
                str(rank),
                *(f"{part / 2**20:.1f}" for part in [*parts, sum(parts)]),
            ]
            for name, moments in memory.items()
            for moment, ranks in moments.items()
            for rank, parts in enumerate(ranks)
        ],
    )
    print(
        "MB: 2^20 bytes; peak since the moment before: "
        + (
            "of CUDA's allocator"
            if device.type == "cuda"
            else "resident size, with the interpreter and its libraries"
        )
        + ";\nrest: peak less the three before it",
        flush=True,
    )

    bars = [
        (name, rank)
        for name, moments in memory.items()
        for rank in range(len(moments["model built"]))
    ][::-1]
    figure = Figure(figsize=(10, 2 + 0.4 * len(bars)), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for panel, moment in zip(panels, memory["sharded"], strict=True):
        left = [0.0] * len(bars)
        for part, (label, color) in enumerate(PARTS.items()):
            widths = [memory[name][moment][rank][part] / 2**20 for name, rank in bars]
            drawn = panel.barh(
                [f"{name}, rank {rank}" for name, rank in bars],
                widths,
                left=left,
                color=color,
                label=label,
            )
            panel.bar_label(
                drawn,
                [f"{width:.0f}" if width > 0 else "" for width in widths],
                label_type="center",
                fontsize=8,
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        panel.set(title=moment, xlabel="MB")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(PARTS),
        frameon=False,
    )
    figure.suptitle(f"Peak memory of each rank, AdamW\n{what}", fontsize=11)
    figure.savefig(args.plot, dpi=150)
    return memory


def benchmark(args, device):
    """Time the optimizer step and the training step with AdamW unsharded, with this stage, and with torch's ZeRO."""
    from common.report import percentiles, print_table
    from common.timing import Stopwatch, measure

    def candidate(make_optimizer):
        """An optimizer with a model of its own, and two functions to time: a training step, and the update alone."""
        model, optimizer, compute_gradients = training(args, device, make_optimizer)
        watch = Stopwatch(device)

        def training_step():
            watch.mark("start")
            optimizer.zero_grad()
            compute_gradients(lambda: watch.mark("gradients are there"))
            watch.mark("gradients are averaged")
            optimizer.step()
            watch.mark("end")
            return {
                "step_seconds": watch.seconds("start", "end"),
                "exposed_comm_seconds": watch.seconds(
                    "gradients are there", "gradients are averaged"
                ),
            }

        def update():
            watch.mark("start")
            optimizer.step()  # once more with the last gradients
            watch.mark("end")
            return {"optimizer_seconds": watch.seconds("start", "end")}

        return optimizer, training_step, update

    candidates = {name: candidate(make) for name, make in optimizers(args).items()}
    if dist.get_rank() == 0:
        print(
            f"\nbenchmark: {args.steps} training steps and {4 * args.steps} updates alone, after {args.warmup} to warm up",
            flush=True,
        )
    samples = measure(
        {name: training_step for name, (_, training_step, _) in candidates.items()},
        args.steps,
        args.warmup,
    )
    updates = measure(
        {name: update for name, (_, _, update) in candidates.items()}, 4 * args.steps, args.warmup
    )
    for name, (optimizer, training_step, _) in candidates.items():
        with torch.profiler.profile() as profiler:
            training_step()
        calls = sum(
            event.count
            for event in profiler.key_averages()
            if event.key in ("c10d::allreduce_", "c10d::broadcast_")
        )
        samples[name] |= updates[name] | {
            "optimizer_state_bytes": state_bytes(optimizer),
            "collectives_per_step": calls,
        }
    rows = []
    for quantity in "optimizer_seconds", "step_seconds":
        p50 = {name: percentiles(times[quantity])[0] for name, times in samples.items()}
        for name, times in samples.items():
            milliseconds = (f"{1000 * seconds:.1f}" for seconds in percentiles(times[quantity]))
            rows.append(
                [
                    f"{quantity.removesuffix('_seconds')}: {name}",
                    *milliseconds,
                    *(
                        f"{p50[name] / p50[other]:.3f}" if other in p50 else "-"
                        for other in (ZERO, ZERO_VIEW)
                    ),
                    f"{max(times['optimizer_state_bytes']) / 2**20:.1f}",
                ]
            )
    if dist.get_rank() == 0:
        print_table(["ms", "p50", "p75", "p90", "p95", "/ZeRO", "/ZeRO view", "state MB"], rows)
        print(
            "percentiles over all steps of all ranks; optimizer: optimizer.step() alone; step: all of a training step;\n"
            "ZeRO: torch's ZeroRedundancyOptimizer, view: its parameters_as_bucket_view=True; /: ratio of the p50s, below\n"
            "1 is faster; state: optimizer state of the rank that has most",
            flush=True,
        )
    return [{"name": name, **times} for name, times in samples.items()]


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common.report import environment, write_json
        from common.setup import (
            Parser,
            add_process_group_arguments,
            output_file,
            process_group,
            whole_number,
        )
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the language model")
    parser.add_argument(
        "--batch-size",
        type=whole_number(1),
        help="sequences per rank and step (default: the size's)",
    )
    parser.add_argument(
        "--context-length", type=whole_number(1), help="tokens in a sequence (default: the size's)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--steps", type=whole_number(1), default=10, help="measured steps (default: 10)"
    )
    parser.add_argument(
        "--warmup", type=whole_number(0), default=5, help="steps before them (default: 5)"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0)
    parser.add_argument("--no-verify", action="store_true", help="only measure")
    parser.add_argument(
        "--no-baseline",
        action="store_true",
        help="measure ShardedOptimizer alone, which saves memory",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="verify on MNIST from this folder instead of the digits"
    )
    parser.add_argument("--download", action="store_true", help="fetch MNIST into --data first")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="everything measured, raw")
    results = folder.parent / "results"
    if os.access(results.parent, os.W_OK):
        results.mkdir(exist_ok=True)
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        default=str(results / "06_memory.png"),
        help="the picture of the memory, PNG (default: results/06_memory.png)",
    )
    add_process_group_arguments(parser)
    args = parser.parse_args()
    args.batch_size, args.context_length = (
        args.batch_size or SIZES[args.size][5],
        args.context_length or SIZES[args.size][6],
    )

    with process_group(args) as device:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        result = {"stage": folder.name, **environment(device), "options": {}}
        if rank == 0:
            print(
                "{stage}: torch {torch}, {backend} on {device}, {world_size} ranks, {threads_per_rank} threads per rank".format(
                    **result
                ),
                flush=True,
            )
        result["verify"] = None if args.no_verify else verify(args, device)

        with torch.device("meta"):
            model = LanguageModel(*SIZES[args.size][:5])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        what = (
            f"{args.size} model, {parameters / 1e6:.1f} million parameters, {args.dtype}, {world_size} ranks, "
            f"batch {args.batch_size} × {args.context_length} tokens per rank"
        )
        result["memory_bytes"] = report_memory(args, device, what)
        result |= {
            "model": {
                "size": args.size,
                "parameters": parameters,
                "batch_size": args.batch_size,
                "context_length": args.context_length,
                "dtype": args.dtype,
            }
        }
        result["candidates"] = benchmark(args, device)
        if args.json and rank == 0:
            write_json(args.json, result)


if __name__ == "__main__":
    main()
