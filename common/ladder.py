"""The harness of stages 02 to 06: ways to train a model, verified against one process, and timed.

ladder.run(NaiveDDP, __doc__)                         # a wrapper, like those of 02 to 05
ladder.main(args, {"ZeRO2": Way(ZeRO2)}, others)      # any ways, in one table
"""

import argparse
import copy
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from common import report, setup, timing

NO_COMMUNICATION = "no communication"  # the row of a step that sends nothing


class Size(NamedTuple):
    """A language model, and its batch: sequences per rank and step, and tokens in each."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    vocabulary: int
    batch_size: int
    context_length: int


SIZES = {
    "nano": Size(64, 256, 2, 2, 1_000, 4, 64),
    "mini": Size(192, 768, 16, 6, 1_000, 10, 64),
    "small": Size(768, 3072, 12, 12, 10_000, 4, 128),
    "medium": Size(1024, 4096, 24, 16, 10_000, 4, 128),
    "large": Size(1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": Size(1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": Size(2560, 10_240, 32, 32, 10_000, 4, 128),
    "xl-2026": Size(2560, 10_240, 32, 32, 10_000, 4, 512),
    "10b": Size(4608, 12_288, 50, 36, 10_000, 4, 512),
    "0.5b": Size(1024, 4096, 24, 16, 50_000, 2, 512),
}


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
        return self.head(self.layers(x, mask, is_causal=True)).float()


class Way(NamedTuple):
    """A way to train: what wraps the module, and what makes the optimizer of its parameters."""

    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    waits_anywhere: bool = False  # also within forward and backward, where no mark tells


class Trainee:
    """A module that is trained in one way, with an optimizer and a stopwatch of its own."""

    def __init__(self, way: Way, module: nn.Module, batch=None, **options):
        first = next(module.parameters())  # with its gradient all are there
        self.way, self.module, self.batch = way, module, batch
        self.watch = timing.Stopwatch(first.device)
        self.model = way.wrap(module)
        self.optimizer = way.optimizer(self.model.parameters(), **options)
        first.register_post_accumulate_grad_hook(lambda _: self.watch.mark("last gradient"))

    def in_wrapper(self, wrap) -> "Trainee":
        """Return one with the same weights, whose wrapper acts only from its forward to its finish.

        So several ways take the memory of one.
        """
        other = copy.copy(self)
        other.model = wrap(self.module)
        return other

    def compute_gradients(self, inputs, targets) -> torch.Tensor:
        """Return the loss."""
        with self.watch.phase("forward"):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())
        with self.watch.phase("backward"):
            loss.backward()
        with self.watch.phase("sync"):
            if hasattr(self.model, "finish_gradient_synchronization"):
                self.model.finish_gradient_synchronization()
        return loss.detach()

    def train(self, inputs, targets) -> tuple[torch.Tensor, dict[str, float]]:
        """Train on a batch; return the loss, and the seconds of the step and its parts."""
        loss = self.compute_gradients(inputs, targets)
        with self.watch.phase("optimizer"):
            self.optimizer.step()
        between = self.watch.seconds
        times = {"step_seconds": between("forward starts", "optimizer ends")}
        times["optimizer_seconds"] = between("optimizer starts", "optimizer ends")
        if not self.way.waits_anywhere:
            times["exposed_comm_seconds"] = between("last gradient", "sync ends")
        return loss, times

    def step(self) -> dict[str, float]:
        return self.train(*self.batch)[1]


def language_trainee(way: Way, args, device: torch.device, batch_shape=None) -> Trainee:
    """Return one that trains --size on random tokens, a batch of its own on each rank."""
    *shape, batch_size, context_length = SIZES[args.size]
    own = args.batch_size or batch_size, args.context_length or context_length
    torch.manual_seed(args.seed + dist.get_rank())
    batch = torch.randint(shape[-1], (2, *(batch_shape or own)), device=device)
    torch.manual_seed(args.seed)
    with device:
        module = LanguageModel(*shape).to(getattr(torch, args.dtype))
        return Trainee(way, module, batch, lr=1e-4, fused=True)


# The command line


def add_training_arguments(parser: setup.Parser, steps: int, warmup: int = 2) -> None:
    """Add the flags of scripts that train a language model, with defaults of two."""
    add, one = parser.add_argument, setup.whole_number(1)
    add("--size", choices=SIZES, default="mini", help="CS336 2025: xl, 2.7b; 2026: xl-2026, 10b")
    add("--batch-size", type=one, help="sequences per rank and step (default: the size's)")
    add("--context-length", type=one, help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--steps", type=one, default=steps, help="steps that are measured")
    add("--warmup", type=setup.whole_number(0), default=warmup, help="steps before them")
    add("--seed", type=setup.whole_number(0), default=0)
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    pace = "on an emulated network a step that sends nothing counts as so many seconds; 0: as it is"
    pace += " (default: 0.4 for mini with its own batch and dtype, else 0)"
    add("--pace", type=setup.checked(float, lambda n: 0 <= n <= 1e6, "0 to 1e6"), help=pace)
    parser.set_defaults(bucket_size_mb=5.0)  # the flag of 05; torch's DDP has the same everywhere
    setup.add_process_group_arguments(parser)


def stage_parser(description: str, steps=10, warmup=5, **options) -> setup.Parser:
    """Return the command line of stages 02 to 06; `options` are more flags, numbers above 0."""
    parser = setup.Parser(description)
    add = parser.add_argument
    add_training_arguments(parser, steps, warmup)
    for name, default in options.items():
        add("--" + name.replace("_", "-"), type=setup.positive_number, default=default)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--no-verify", action="store_true", help="only measure")
    save = "save the verified model: the plain module's state_dict, of rank 0"
    either.add_argument("--save", type=setup.output_file, metavar="FILE", help=save)
    add("--no-baseline", action="store_true", help="measure this stage alone, to save memory")
    add("--data", metavar="DIR", help="verify on MNIST from this folder instead of the digits")
    add("--download", action="store_true", help="fetch MNIST into --data first")
    trace = "Chrome trace of three more steps of each row, on rank 0; in this machine's time"
    add("--trace", type=setup.output_file, metavar="FILE", help=trace)
    every = "a line for so many batches while it trains; 0: none"
    add("--log-every", type=setup.whole_number(0), default=50, metavar="N", help=every)
    return parser


def describe(args) -> dict:
    """Print which model is measured, and how; return "model" of the JSON."""
    size = SIZES[args.size]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LanguageModel(*size[:5]).parameters())
    batch_size = args.batch_size or size.batch_size
    context_length = args.context_length or size.context_length
    setup.say(
        f"{args.size} model: {parameters / 1e6:.1f} million parameters, {args.dtype}, "
        f"{batch_size} × {context_length} tokens per rank; "
        f"{args.steps} steps are measured, after {args.warmup} to warm up"
    )
    model = {"size": args.size, "parameters": parameters, "dtype": args.dtype}
    return model | {"batch_size": batch_size, "context_length": context_length}


# Verify


def load_images(args: argparse.Namespace) -> list[torch.Tensor]:
    """Return images float64 [n, pixels] and labels int64 [n] to train on, and those to test on.

    MNIST from --data, or else our 1,797 digits: 297 held out, the others ten times.
    """
    if args.data is None:
        images, labels = setup.load_digits()
        images = images.double().flatten(1) - 8
        return [images[297:].repeat(10, 1), labels[297:].repeat(10), images[:297], labels[:297]]
    try:
        from torchvision.datasets import MNIST

        if args.download and os.environ["LOCAL_RANK"] == "0":  # on each host
            MNIST(args.data, download=True)
        dist.barrier()
        splits = MNIST(args.data, train=True), MNIST(args.data, train=False)
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not MNIST
        said = f"argument --data: {args.data!r} holds no readable MNIST"
        setup.fail(f"{said} ({error!r}): see --download")
    tensors = []
    for split in splits:
        tensors += [split.data.double().flatten(1) / 255, split.targets]
    return tensors


def classifier(seed: int, images: torch.Tensor) -> nn.Module:
    """Return the model that verify trains, for images of this size, dtype and device."""
    torch.manual_seed(seed)
    first = nn.Linear(images.shape[1], 50)
    layers = first, nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)
    return nn.Sequential(*layers).to(images)


def verify(name: str, way: Way, args, device: torch.device) -> dict:
    """Train a classifier on shares, and a twin in one process on their union; compare weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *held_out = [tensor.to(device) for tensor in load_images(args)]
    used = len(images) - len(images) % world_size  # equal shares
    trainee = Trainee(way, classifier(args.seed + rank, images), lr=1e-3)  # rank 0's has to win
    twin = Trainee(Way(), classifier(args.seed, images), lr=1e-3)
    says = f"verify: {name}: {world_size} ranks train on {used // world_size} samples each, in"
    setup.say(f"{says} batches of 64, together {64 * world_size}")
    shuffle = torch.Generator().manual_seed(args.seed)
    batches, log = 0, []
    for epoch in (1, 2):
        for union in torch.randperm(used, generator=shuffle).split(64 * world_size):
            share = union[rank::world_size]
            twin.train(images[union], labels[union])
            loss, times = trainee.train(images[share], labels[share])
            log.append([loss.item(), *times.values()])  # step, optimizer, exposed if it is known
            batches += 1
            if args.log_every and batches % args.log_every == 0:
                means = torch.tensor(timing.gather(log), dtype=torch.float64).mean((0, 1)).tolist()
                loss, step, _, *exposed = means
                said = f"verify: batch {batches}, loss {loss:.4f}, {1000 * step:.1f} ms a step"
                waits = [f", {1000 * each:.1f} of these in communication" for each in exposed]
                setup.say("".join([said, *waits]))
                log.clear()
        with torch.no_grad():
            logits = trainee.model(held_out[0])
        loss = F.cross_entropy(logits, held_out[1]).item()
        accuracy = (logits.argmax(1) == held_out[1]).double().mean().item()
        says = f"verify: epoch {epoch}, held-out loss {loss:.4f}, accuracy"
        setup.say(f"{says} {100 * accuracy:.2f} %")
    is_sharded = hasattr(trainee.model, "gather_full_params")
    module = trainee.module
    weights = trainee.model.gather_full_params() if is_sharded else module.state_dict()
    if args.save and rank == 0:
        torch.save(weights, args.save)
    return compare_weights(weights, twin.module.state_dict()) | {"accuracy": accuracy}


def compare_weights(weights: dict, expected: dict) -> dict:
    """End the run unless all ranks hold the same weights, and those of the twin; float64."""
    tolerance = 1e-10  # after hundreds of steps; rounding alone stays far below
    local = nn.utils.parameters_to_vector([weights[name] for name in expected])
    theirs = nn.utils.parameters_to_vector(expected.values())
    replicas = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, local)
    if not all(torch.equal(replica, local) for replica in replicas):
        sys.exit("verify: FAILED, the ranks hold different weights")
    worst = (local - theirs).abs().max().item()
    if not worst <= tolerance:
        sys.exit(f"verify: FAILED, a weight is {worst:.1e} away from single-process training")
    setup.say(
        f"verify: passed, the ranks are bitwise equal and at most {worst:.1e} away from "
        f"single-process training (allowed: {tolerance:.0e})\n"
    )
    return {"max_abs_diff": worst, "tolerance": tolerance, "passed": True}


# Measure


def at_one_pace(steps: dict[str, Callable[[], dict]], args) -> dict:
    """Let an emulated network follow this machine, if there is a step that sends nothing."""
    pace = args.pace
    if pace is None:
        own = args.batch_size or args.context_length or args.dtype != "float32"
        pace = 0.4 if args.size == "mini" and not own else 0.0
    if setup.network().text and pace and NO_COMMUNICATION in steps:
        return steps | {NO_COMMUNICATION: setup.network().paced(steps[NO_COMMUNICATION], pace)}
    return steps


def benchmark(steps: dict[str, Callable[[], dict]], args) -> list[dict]:
    """Measure steps in turn; return "candidates" of the JSON."""
    samples = timing.measure(at_one_pace(steps, args), args.steps, args.warmup)
    return [{"name": name, **times, **count(steps[name])} for name, times in samples.items()]


def count(step: Callable[[], object]) -> dict[str, float]:
    """Return how many collectives a step makes, and what this rank writes to sockets in it."""
    step()  # in its second step torch DDP arranges its buckets anew, with two broadcasts
    counters = Path("/proc/self/io")  # on Linux; the second is of bytes that were written
    dist.barrier()
    emulated = getattr(dist.group.WORLD, "collectives", 0)  # which torch's counter does not see
    with CommDebugMode() as counter:
        before = counters.read_text().split() if counters.exists() else [0, 0, 0, "nan"]
        step()
        after = counters.read_text().split() if counters.exists() else before
    calls = getattr(dist.group.WORLD, "collectives", 0) - emulated or counter.get_total_counts()
    return {"collectives_per_step": calls, "sent_bytes": float(after[3]) - float(before[3])}


LEGEND = """\
Percentiles over all steps of all ranks; tokens/s of all ranks; exposed: ms from the last gradient
until all are averaged (-: it waits elsewhere, too); share: exposed in per cent of the step;
optimizer: ms of its step; calls: collectives of a step; sent: MB (2^20 bytes) that rank 0 writes to
sockets in it; ÷: of the p50s, below 1 is faster."""


def print_steps(result: dict, baseline: str = "torch DDP", more: dict | None = None) -> None:
    """Print a row per candidate of the JSON; `more` columns: {title: {name: cell}}."""
    model, more = result["model"], more or {}
    tokens = model["batch_size"] * model["context_length"] * result["world_size"]
    seconds = {one["name"]: one["step_seconds"] for one in result["candidates"]}
    rows = []
    for one in result["candidates"]:
        step = report.percentiles(one["step_seconds"])[0]
        row = [one["name"], *report.milliseconds(one["step_seconds"]), f"{tokens / step:.0f}"]
        if "exposed_comm_seconds" in one:
            exposed = report.percentiles(one["exposed_comm_seconds"])[0]
            row += [f"{1000 * exposed:.1f}", f"{100 * exposed / step:.0f} %"]
        else:
            row += ["-", "-"]
        row += report.milliseconds(one["optimizer_seconds"])[:1]
        row += [str(one["collectives_per_step"]), f"{one['sent_bytes'] / 2**20:.1f}"]
        for other in (NO_COMMUNICATION, baseline):
            row.append(report.ratio(one["step_seconds"], seconds.get(other)))
        rows.append(row + [column[one["name"]] for column in more.values()])
    header = ["step, ms", "p50", "p75", "p90", "p95", "tokens/s", "exposed", "share", "optimizer"]
    header += ["calls", "sent", "÷ no comm.", f"÷ {baseline}", *more]
    report.print_table(header, rows)
    setup.say(LEGEND)


def users_rows(args) -> dict:
    """Return {name of its row: the user's own class} of --mine."""
    sys.path.append(str(setup.ROOT / "05_bucketed" / "compare"))
    from users_class import users_rows

    return users_rows(args.mine, args.bucket_size_mb)


def torch_ddp(args) -> dict[str, Way]:
    """Return torch's own, by name, with buckets of the same size as ours."""
    options = {"bucket_cap_mb": args.bucket_size_mb, "gradient_as_bucket_view": True}
    return {"torch DDP": Way(partial(DistributedDataParallel, **options))}


def main(args, ours: dict[str, Way], others: dict, baseline="torch DDP", account=None) -> None:
    """Verify ways, and measure them beside no communication and others; print it all.

    account(ways, args, device, result) may measure more, and return columns for the table.
    """
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin(setup.stage(), args, device)
        result["model"] = describe(args)
        result["verify"] = {}
        for name, way in ours.items() if not args.no_verify else ():
            result["verify"][name] = verify(name, way, args, device)
        ways = ours if args.no_baseline else {NO_COMMUNICATION: Way(), **ours, **others}
        more = account(ways, args, device, result) if account else {}
        steps = {name: language_trainee(way, args, device).step for name, way in ways.items()}
        result["candidates"] = benchmark(steps, args)
        timing.profile(steps, args.trace)
        print_steps(result, baseline, more)
        report.write_json(args.json, result)


def run(wrapper, description: str, **options) -> None:
    """Verify and measure a wrapper, as 02 to 05 have one; its `options` become flags."""
    args = stage_parser(description, **options).parse_args()
    wrap = partial(wrapper, **{name: getattr(args, name) for name in options})
    main(args, {wrapper.__name__: Way(wrap)}, torch_ddp(args))
