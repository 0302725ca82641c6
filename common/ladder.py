"""The harness of stages 02 to 06: ways to train a model, verified against one process, and timed.

ladder.run(NaiveDDP, train_step, __doc__)                       # a wrapper, as 02 to 05 have one
ladder.main(args, train_step, {"ZeRO2": Way(ZeRO2)}, others)    # any ways, in one table
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from common import report, setup, timing
from common.setup import network

# Rows that several scripts have.
NO_COMMUNICATION = "no communication"
TORCH_DDP = "torch DDP"

BUCKET_SIZE_MB = 5.0
MOST_DRIFT = 1.5  # of the machine's speed while it is measured


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

    wrap: Callable[[nn.Module], nn.Module] = nn.Sequential  # it calls the module, and sends nothing
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    waits_noted: Callable = nullcontext  # for one that waits within forward and backward, too


class Trainee:
    """A module that is trained in one way by a stage's `train_step`, and a stopwatch.

    The stopwatch has marks where a step, its forward, its finish and its optimizer start and end,
    and where the last gradient is there. With `beside` the optimizer is that of another trainee of
    the same module: then the wrapper must act only from its forward to its finish.
    """

    def __init__(self, way: Way, module: nn.Module, train_step: Callable, beside=None, **options):
        first = next(module.parameters())  # with its gradient all are there
        self.way = way
        self.module = module
        self.watch = timing.Stopwatch(first.device)
        # Before the wrapper's own hooks, which may launch the last all-reduce.
        first.register_post_accumulate_grad_hook(partial(self.watch.mark, "last gradient"))
        self.model = way.wrap(module)
        if beside:
            self.optimizer = beside.optimizer
        else:
            self.optimizer = way.optimizer(self.model.parameters(), **options)
        marked = self.watch.marked
        self.train_step = marked("step", train_step)
        self.model.forward = marked("forward", self.model.forward)
        # Without communication, and in torch's DDP, there is nothing to finish.
        finish = getattr(self.model, "finish_gradient_synchronization", lambda: None)
        self.model.finish_gradient_synchronization = marked("finish", finish)
        self.optimizer.step = marked("optimizer", self.optimizer.step)

    def train(self, inputs, targets) -> tuple[torch.Tensor, dict[str, float]]:
        """Train on a batch; return the loss, and the seconds of the step and of its parts."""
        with self.way.waits_noted() as waits:
            loss = self.train_step(self.model, self.optimizer, inputs, targets)
        times = {
            "step_seconds": self.watch.seconds("step starts", "step ends"),
            "optimizer_seconds": self.watch.seconds("optimizer starts", "optimizer ends"),
        }
        if waits is None:
            times["exposed_comm_seconds"] = self.watch.seconds("last gradient", "finish ends")
        else:
            seconds = sum(end - start for start, end in waits)
            times["waits_seconds"] = seconds / network().stretch
        return loss, times

    def step(self) -> dict[str, float]:
        """Train on the batch that it has; return the seconds of the step and of its parts."""
        return self.train(*self.batch)[1]


def size_of(args) -> Size:
    """Return that of --size, with --batch-size and --context-length."""
    size = SIZES[args.size]
    return size._replace(
        batch_size=args.batch_size or size.batch_size,
        context_length=args.context_length or size.context_length,
    )


def language_trainee(way: Way, train_step, args, device, beside: Trainee | None = None) -> Trainee:
    """Return one that trains the model of --size, or that of another trainee, on random tokens.

    Each rank has a batch of its own: int64 [inputs and targets, batch, context].
    """
    size = size_of(args)
    torch.manual_seed(args.seed)
    with device:
        if beside:
            trainee = Trainee(way, beside.module, train_step, beside)
        else:
            module = LanguageModel(*size[:5]).to(getattr(torch, args.dtype))
            trainee = Trainee(way, module, train_step, lr=1e-4, fused=True)
        torch.manual_seed(args.seed + dist.get_rank())
        shape = 2, size.batch_size, size.context_length
        trainee.batch = torch.randint(size.vocabulary, shape)
    return trainee


# The command line


def add_training_arguments(parser: setup.Parser, steps: int, warmup: int = 2) -> None:
    """Add the flags of scripts that train a language model; of two of them the defaults."""
    add = parser.add_argument
    one = setup.whole_number(1)
    add("--size", choices=SIZES, default="mini", help="CS336 2025: xl, 2.7b; 2026: xl-2026, 10b")
    add("--batch-size", type=one, help="sequences per rank and step (default: the size's)")
    add("--context-length", type=one, help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--steps", type=one, default=steps, help="steps that are measured")
    add("--warmup", type=setup.whole_number(0), default=warmup, help="steps before them")
    add("--seed", type=setup.whole_number(0), default=0)
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_process_group_arguments(parser)


def add_bucket_size(parser: setup.Parser) -> None:
    """Add the flag for the size of buckets."""
    size = {"type": setup.positive_number, "default": BUCKET_SIZE_MB, "metavar": "MB"}
    parser.add_argument("--bucket-size-mb", **size, help="of ours and of torch's DDP")


def stage_parser(description: str, steps: int = 10, warmup: int = 5) -> setup.Parser:
    """Return the command line of stages 02 to 06."""
    parser = setup.Parser(description)
    add = parser.add_argument
    add_training_arguments(parser, steps, warmup)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--no-verify", action="store_true", help="only measure")
    save = "save the verified model: the plain module's state_dict, of rank 0"
    either.add_argument("--save", type=setup.output_file, metavar="FILE", help=save)
    add("--no-baseline", action="store_true", help="measure this stage alone, to save memory")
    add("--data", metavar="DIR", help="verify on MNIST from this folder instead of the digits")
    add("--download", action="store_true", help="fetch MNIST into --data first")
    trace = "Chrome traces of three more steps of each row: FILE.rank0, …; in this machine's time"
    add("--trace", type=setup.output_file, metavar="FILE", help=trace)
    every = "a line for so many batches while it trains; 0: none"
    add("--log-every", type=setup.whole_number(0), default=50, metavar="N", help=every)
    return parser


def describe(args) -> dict:
    """Print which model is measured, and how; return "model" of the JSON."""
    size = size_of(args)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LanguageModel(*size[:5]).parameters())
    setup.say(
        f"{args.size} model: {parameters / 1e6:.1f} million parameters, {args.dtype}, "
        f"{size.batch_size} × {size.context_length} tokens per rank; "
        f"{args.steps} steps are measured, after {args.warmup} to warm up"
    )
    return {"size": args.size, "parameters": parameters, "dtype": args.dtype, **size._asdict()}


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

        if args.download:
            # Rank 0 first: if its folder is that of all hosts, the others find everything there.
            for number in ("RANK", "LOCAL_RANK"):
                if os.environ[number] == "0":
                    MNIST(args.data, download=True)
                dist.barrier()
        splits = MNIST(args.data, train=True), MNIST(args.data, train=False)
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not MNIST
        what = f"{args.data!r} holds no readable MNIST ({error!r})"
        setup.fail(f"argument --data: {what}: see --download")
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


def verify(name: str, way: Way, train_step, args, device: torch.device) -> dict:
    """Train a classifier on shares, and a twin in one process on their union; compare weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *held_out = [tensor.to(device) for tensor in load_images(args)]
    used = len(images) - len(images) % world_size  # equal shares
    module = classifier(args.seed + rank, images)  # rank 0's weights must win
    trainee = Trainee(way, module, train_step, lr=1e-3)
    twin = Trainee(Way(), classifier(args.seed, images), train_step, lr=1e-3)
    setup.say(
        f"verify: {name}: {world_size} ranks train on {used // world_size} samples each, "
        f"in batches of 64, together {64 * world_size}"
    )
    shuffle = torch.Generator().manual_seed(args.seed)
    batches = 0
    log = []  # since the last line
    for epoch in (1, 2):
        for union in torch.randperm(used, generator=shuffle).split(64 * world_size):
            share = union[rank::world_size]
            twin.train(images[union], labels[union])
            loss, times = trainee.train(images[share], labels[share])
            log.append({"loss": loss.item(), **times})
            batches += 1
            if args.log_every and batches % args.log_every == 0:
                say_progress(batches, log)
                log.clear()
        accuracy = evaluate(epoch, trainee.model, *held_out)
    is_sharded = hasattr(trainee.model, "gather_full_params")
    weights = trainee.model.gather_full_params() if is_sharded else module.state_dict()
    if args.save and rank == 0:
        torch.save(weights, args.save)
    return compare_weights(weights, twin.module.state_dict()) | {"accuracy": accuracy}


def say_progress(batches: int, log: list[dict]) -> None:
    """Print the means of all ranks since the last line: the loss, and how long a step takes."""
    of_ranks = sum(timing.gather(log), [])
    means = {name: numpy.mean([each[name] for each in of_ranks]) for name in log[0]}
    line = (
        f"batch {batches}, loss {means['loss']:.4f}, {1000 * means['step_seconds']:.1f} ms a step"
    )
    if "exposed_comm_seconds" in means:
        line += f", {1000 * means['exposed_comm_seconds']:.1f} of these in communication"
    setup.say(f"verify: {line}")


def evaluate(epoch: int, model, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Print loss and accuracy of a classifier after an epoch; return its accuracy."""
    with torch.no_grad():
        logits = model(images)
    loss = F.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    setup.say(f"verify: epoch {epoch}, held-out loss {loss:.4f}, accuracy {100 * accuracy:.2f} %")
    return accuracy


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


def pace_of(args) -> float:
    """Return the seconds that a step of `mini` without communication counts as; 0: as it is."""
    has_own = args.batch_size or args.context_length or args.dtype != "float32"
    return 0.4 if args.size == "mini" and not has_own else 0.0


def at_one_pace(steps: dict[str, Callable], pace: float) -> dict[str, Callable]:
    """Let an emulated network follow this machine, if a step is one without communication."""
    floor = steps.get(NO_COMMUNICATION)
    if not (network().text and pace and floor):
        return steps
    return steps | {NO_COMMUNICATION: network().paced(floor, pace)}


def warn_of_drift() -> None:
    """Warn if the machine's speed has changed by too much while it was measured."""
    lowest, highest = network().lowest_stretch, network().highest_stretch
    if highest > MOST_DRIFT * lowest:
        seconds = f"{lowest:.2f} to {highest:.2f} s here"
        setup.say(f"warning: a second of the network took {seconds}: leave the machine alone")


def benchmark(steps: dict[str, Callable[[], dict]], args) -> list[dict]:
    """Measure steps in turn; return "rows" of the JSON."""
    samples = timing.measure(at_one_pace(steps, pace_of(args)), args.steps, args.warmup)
    warn_of_drift()
    rows = []
    for name, times in samples.items():
        rows.append({"name": name, **times, "collectives": count_collectives(steps[name])})
    return rows


def count_collectives(step: Callable[[], object]) -> int:
    """Return how many collectives one more step makes."""
    step()  # in its second step torch DDP arranges its buckets anew, with two broadcasts
    dist.barrier()
    if network().text:  # CommDebugMode sees none of these, and a wait within it may crash
        before = network().calls
        step()
        return network().calls - before
    with CommDebugMode() as counter:
        step()
    return counter.get_total_counts()


def split_exposed(exposed: list[list[float]]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Split [rank][step] into the network's part [step] and waiting for others [rank][step].

    Whose last gradient comes last waits for nobody, so what that rank waits for is the network.
    """
    of_network = numpy.min(exposed, axis=0)
    return of_network, exposed - of_network


def who_is_late(waiting: numpy.ndarray, step_seconds: float) -> str:
    """Say which rank the others wait for, if it is the same one in most of ten steps or more."""
    last = waiting.argmin(axis=0)  # [step]: the rank that waits least
    rank = numpy.bincount(last).argmax()
    others = numpy.delete(waiting, rank, axis=0)[:, last == rank]
    late = numpy.median(others.min(axis=0)) if len(others) else 0.0
    if len(last) < 10 or (last == rank).mean() < 0.8 or late < 0.05 * step_seconds:
        return ""
    return f"rank {rank} is late by {1000 * late:.1f} ms a step; the others wait for it"


LEGEND = """\
Percentiles over all steps of all ranks; tokens/s of all ranks; exposed: ms from a rank's last
gradient until all are averaged (ZeRO2, FSDP: all that a rank waits in a step); share: that in per
cent of the step. Of it, network: the least of all ranks in a step; waiting: the mean wait for a
rank that comes later. calls: collectives of a step; ÷ torch DDP: below 1 is faster."""


def print_steps(result: dict, has_optimizer: bool = False) -> None:
    """Print the rows of the JSON, perhaps with the ms of the optimizer's step."""
    model = result["model"]
    tokens = model["batch_size"] * model["context_length"] * result["world_size"]
    seconds = {row["name"]: row["step_seconds"] for row in result["rows"]}
    table, late = [], []
    for row in result["rows"]:
        step = report.percentiles(row["step_seconds"])[0]
        cells = [row["name"], *report.milliseconds(row["step_seconds"]), f"{tokens / step:.0f}"]
        exposed = row.get("exposed_comm_seconds")
        median = report.percentiles(exposed or row["waits_seconds"])[0]
        cells += [f"{1000 * median:.1f}", f"{100 * median / step:.0f} %"]
        if exposed and row["name"] != NO_COMMUNICATION:
            of_network, waiting = split_exposed(exposed)
            cells += [f"{1000 * numpy.median(of_network):.1f}", f"{1000 * waiting.mean():.1f}"]
            if sentence := who_is_late(waiting, step):
                late.append(f"{row['name']}: {sentence}.")
        else:
            cells += ["-", "-"]
        cells.append(str(row["collectives"]))
        if has_optimizer:
            cells += report.milliseconds(row["optimizer_seconds"])[:1]
        table.append([*cells, report.ratio(row["step_seconds"], seconds.get(TORCH_DDP))])
    header = ["step, ms", "p50", "p75", "p90", "p95", "tokens/s"]
    header += ["exposed", "share", "network", "waiting", "calls"]
    header += ["optimizer"] if has_optimizer else []
    report.print_table([*header, f"÷ {TORCH_DDP}"], table)
    for sentence in late:
        setup.say(sentence)
    setup.say(LEGEND)


def torch_ddp(bucket_size_mb: float = BUCKET_SIZE_MB) -> dict[str, Way]:
    """Return torch's own, by the name of its row, with buckets of the same size as ours."""
    options = {"bucket_cap_mb": bucket_size_mb, "gradient_as_bucket_view": True}
    return {TORCH_DDP: Way(partial(DistributedDataParallel, **options))}


def main(args, train_step, ours: dict[str, Way], others: dict[str, Way], account=None) -> None:
    """Verify our ways; then measure them in turn with no communication and others. Print it all.

    `account(ways, train_step, args, device, result)` measures and prints what ranks hold.
    """
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin(setup.stage(), args, device)
        result["model"] = describe(args)
        result["verify"] = {}
        for name, way in ours.items() if not args.no_verify else []:
            result["verify"][name] = verify(name, way, train_step, args, device)
        ways = ours if args.no_baseline else {NO_COMMUNICATION: Way(), **ours, **others}
        if account:
            account(ways, train_step, args, device, result)
        steps = {}
        for name, way in ways.items():
            steps[name] = language_trainee(way, train_step, args, device).step
        result["rows"] = benchmark(steps, args)
        timing.profile(steps, args.trace)
        print_steps(result, has_optimizer=account is not None)
        report.write_json(args.json, result)


def run(wrapper, train_step, description: str, has_buckets: bool = False) -> None:
    """Verify and measure a wrapper, as 02 to 05 have one; with buckets it gets a flag for them."""
    parser = stage_parser(description)
    if has_buckets:
        add_bucket_size(parser)
    args = parser.parse_args()
    wrap, others = wrapper, torch_ddp()
    if has_buckets:
        wrap = partial(wrapper, bucket_size_mb=args.bucket_size_mb)
        others = torch_ddp(args.bucket_size_mb)
    main(args, train_step, {wrapper.__name__: Way(wrap)}, others)
