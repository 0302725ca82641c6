r"""07: the slowest rank sets the pace, and what to do about it.

Under DDP nobody ends a step before the slowest rank: if rank r computes for t_r, the step takes
max t_r and what is left of the all-reduce. One slow rank (--slow-rank, --slow-factor) so slows all.
Balanced shares, n_r images in proportion to a rank's speed, make the t_r equal again. Then DDP's
plain mean of the ranks' gradients is not the gradient any more: rank r's loss needs the weight
N * n_r / B, with B the images of all N ranks. Both are measured here.

    make 07_resnet_ddp/balance NPROC=2
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/balance/balance.py --slow-factor 2

Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2; the arithmetic is spelled out in
the README.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def balanced_shares(images: int, speeds: list[float]) -> list[int]:
    """Images for each rank in proportion to its speed, together `images`."""
    exact = [images * speed / sum(speeds) for speed in speeds]
    shares = [int(share) for share in exact]
    # Those that lost most by rounding down get what is missing.
    by_loss = sorted(range(len(speeds)), key=lambda rank: shares[rank] - exact[rank])
    for rank in by_loss[: images - sum(shares)]:
        shares[rank] += 1
    return shares


def weighted_loss(logits: torch.Tensor, labels: torch.Tensor, images: int) -> torch.Tensor:
    """This rank's part of the mean loss over the `images` of all ranks, for any shares.

    DDP averages gradients over N ranks: the mean of N * (sum of rank r) / images is the mean over
    all images. With equal shares it is F.cross_entropy's own mean.
    """
    return dist.get_world_size() * F.cross_entropy(logits, labels, reduction="sum") / images


def step(model: nn.Module, images, labels, share: int, total: int, synchronize: bool) -> None:
    """Forward and backward of DDP; only the first `share` of these images count, of `total`.

    The others are how a rank plays a slower one: it computes them, and their weight is zero.
    """
    model.zero_grad()
    communication = nullcontext() if synchronize else model.no_sync()
    with communication:
        logits = model(images)
        loss = weighted_loss(logits[:share], labels[:share], total)
        idle = 0 * logits[share:].sum()
        (loss + idle).backward()


# ==================================================================================================
# Below this line: the proof, the measurement, the command line.


def gradients(network: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])


def verify(shares: list[int]) -> tuple[float, float]:
    """Gradients of uneven shares against one device that has all images, in float64.

    Returns the largest deviation, relative to the largest gradient: with the weights, and without.
    """
    from torchvision.models import resnet18
    from torchvision.ops import FrozenBatchNorm2d  # live statistics are of a rank's own images

    torch.manual_seed(0)
    network = resnet18(num_classes=10, norm_layer=FrozenBatchNorm2d).double()
    images = torch.randn(sum(shares), 3, 32, 32, dtype=torch.float64)
    labels = torch.randint(10, (sum(shares),))
    F.cross_entropy(network(images), labels).backward()
    expected = gradients(network)
    model = DistributedDataParallel(network)
    first = sum(shares[: dist.get_rank()])
    mine = slice(first, first + shares[dist.get_rank()])
    deviations = []
    for weighted in (True, False):
        model.zero_grad()
        logits = model(images[mine])
        if weighted:
            loss = weighted_loss(logits, labels[mine], sum(shares))
        else:
            loss = F.cross_entropy(logits, labels[mine])
        loss.backward()
        deviation = (gradients(network) - expected).abs().max() / expected.abs().max()
        deviations.append(deviation.item())
    return tuple(deviations)


class Candidate(NamedTuple):
    """What is measured: by rank, the images that count and those that it computes."""

    name: str
    shares: list[int]
    computed: list[int]


def build_candidates(args) -> list[Candidate]:
    ranks = dist.get_world_size()
    slowness = [1.0] * ranks
    slowness[args.slow_rank] = args.slow_factor
    even = [args.global_batch // ranks] * ranks  # what remains is left out
    balanced = balanced_shares(sum(even), [1 / factor for factor in slowness])

    def slowed(shares: list[int]) -> list[int]:
        return [round(share * factor) for share, factor in zip(shares, slowness, strict=True)]

    return [
        Candidate("even, nobody is slow", even, even),
        Candidate("even", even, slowed(even)),
        Candidate("balanced", balanced, slowed(balanced)),
    ]


def measure(args, device) -> list[dict]:
    """The times of each candidate, with its all-reduce and without, all in turn."""
    from torchvision.models import resnet18

    from common import timing

    network = resnet18(num_classes=10).to(device)
    model = DistributedDataParallel(network, [device] if device.type == "cuda" else None)
    rank = dist.get_rank()

    def timed_step(images, labels, shares: list[int], synchronize: bool) -> dict:
        watch = timing.Stopwatch(device)
        watch.mark("start")
        step(model, images, labels, shares[rank], sum(shares), synchronize)
        watch.mark("end")
        return {"seconds": watch.seconds("start", "end")}

    candidates = build_candidates(args)
    steps = {}
    for name, shares, computed in candidates:
        images = torch.rand(computed[rank], 3, args.image_size, args.image_size, device=device)
        labels = torch.randint(10, (computed[rank],), device=device)
        steps[f"{name}, alone"] = partial(timed_step, images, labels, shares, False)
        steps[f"{name}, DDP"] = partial(timed_step, images, labels, shares, True)
    samples = timing.measure(steps, args.steps, args.warmup)
    found = []
    for candidate in candidates:
        times = {
            "alone_seconds": samples[f"{candidate.name}, alone"]["seconds"],
            "step_seconds": samples[f"{candidate.name}, DDP"]["seconds"],
        }
        found.append({**candidate._asdict(), **times})
    return found


def print_results(found: list[dict]) -> None:
    from common.report import percentiles, print_table
    from common.setup import say

    ranks = range(len(found[0]["shares"]))
    rows = []
    for candidate in found:
        alone = [1000 * percentiles(candidate["alone_seconds"][rank])[0] for rank in ranks]
        slowest = max(alone)
        together = 1000 * percentiles(candidate["step_seconds"])[0]
        images_per_second = 1000 * sum(candidate["shares"]) / together
        row = [candidate["name"], " + ".join(map(str, candidate["shares"]))]
        row += [f"{ms:.0f}" for ms in alone]
        row += [f"{slowest:.0f}", f"{together:.0f}", f"{together - slowest:.0f}"]
        row += [f"{images_per_second:.1f}"]
        rows.append(row)
    header = ["forward + backward, ms", "images", *[f"t of rank {rank}" for rank in ranks]]
    header += ["max", "DDP", "DDP - max", "images/s"]
    print_table(header, rows)
    alone = "t: a rank alone, without all-reduce; max: the slowest of them"
    say(f"medians. {alone}; DDP: all together;")
    say("DDP - max: what is left of the all-reduce. A slow rank computes more images than count.")


def add_arguments(parser) -> None:
    from common import setup

    add = parser.add_argument
    whole = setup.whole_number
    add("--slow-rank", type=whole(0), default=1, metavar="RANK", help="the one that is slow")
    factor = setup.checked(float, lambda number: 1 <= number <= 100, "a number from 1 to 100")
    add("--slow-factor", type=factor, default=1.5, help="how many times as long it takes")
    add("--global-batch", type=whole(2), default=64, help="images of all ranks together")
    add("--image-size", type=whole(32, 1024), default=64, help="pixels")
    add("--steps", type=whole(1), default=10, help="measured")
    add("--warmup", type=whole(0), default=2, help="steps before them, not measured")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_process_group_arguments(parser)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent), str(folder.parent.parent)]
    try:
        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ into {folder}")

    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    with setup.process_group(args) as device:
        ranks = dist.get_world_size()
        if args.slow_rank >= ranks:
            setup.fail(f"argument --slow-rank: '{args.slow_rank}' is not below {ranks}, the ranks")
        least = min(min(candidate.shares) for candidate in build_candidates(args))
        if least < 2:
            problem = f"leaves a rank {least} images, and BatchNorm needs at least two"
            setup.fail(f"argument --global-batch: '{args.global_batch}' {problem}")
        result = report.begin("07_resnet_ddp/balance", args, device)
        slow = f"rank {args.slow_rank} takes {args.slow_factor:g} times as long for an image"
        size = f"{args.image_size} pixels"
        setup.say(f"ResNet-18, {size}; {slow}; {args.steps} steps, after {args.warmup} to warm up")
        setup.progress("verify: uneven shares against one device")
        shares = [2 + 3 * rank for rank in range(ranks)]
        weighted, plain = verify(shares)
        if not weighted <= 1e-10:
            problem = f"gradients of uneven shares {weighted:.1e} away from one device"
            sys.exit(f"verify FAILED: {problem}")
        text = " + ".join(map(str, shares))
        setup.say(
            f"verify: passed, gradients of {text} images within {weighted:.1e} of one device's; "
            f"without the weights {plain:.2f} away (1: the largest gradient)\n"
        )
        result |= {"weighted_deviation": weighted, "plain_deviation": plain}
        result["candidates"] = measure(args, device)
        print_results(result["candidates"])
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
