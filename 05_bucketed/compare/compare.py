"""05: stages 02 to 05 beside each other, in one process group, step by step in turn.

Stages that run one after the other meet the machine in different moods, minutes apart. Here all
train one model in turn (no communication, 02, 03, 04, 05, torch DDP, and again), so that they can
be compared. Two rows are controls: the calls of 04 and of 05, but all of them launched after
backward. What 04 and 05 gain over these is what overlap gains.

    make compare                                                        (see also ARGS="--help")
    make compare NETWORK=1gbit,1ms                  (on an emulated network, as slow as you like)
    make compare NETWORK=1gbit,1ms,2                    (two calls at once, as gloo's two threads)
    make compare NETWORK=1gbit,1ms NPROC=8                 (eight machines, emulated on your cores)
    make compare MINE=my_ddp.py:MyDDP                              (and a class of your own)
    torchrun --standalone --nproc-per-node 2 05_bucketed/compare/compare.py
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT), str(FOLDER), *(str(ROOT / stage) for stage in STAGES)]

import medians  # noqa: E402
from bucketed import BucketedDDP, LanguageModel, make_step, train_step  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from naive_ddp import NaiveDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402
from users_class import FINISHES, users_rows  # noqa: E402

from common import ladder, report, setup, timing  # noqa: E402


class OverlapAfterBackward(OverlapDDP):
    """The calls of 04, all launched when backward is over."""

    def _launch_ready(self):
        if not self.in_step:  # but in the finish
            super()._launch_ready()


class BucketedAfterBackward(BucketedDDP):
    """The calls of 05, all launched when backward is over; buckets are filled during backward."""

    def _launch_ready(self):
        if not self.in_step:
            super()._launch_ready()


class Strategy(NamedTuple):
    """A wrapper, and when it sends what."""

    wrap: Callable[[torch.nn.Module], torch.nn.Module]
    bucket_size_mb: float | None  # of a call; None: one call for all; 0: one for each gradient
    overlap: bool = False  # launched when the gradients are ready, and not after backward
    blocking: bool = False  # launched when the call before has arrived


def strategies(size: float, controls: bool = True) -> dict[str, Strategy]:
    """Return stages 02 to 05 by the names of their rows, each after its control.

    `size` is that of 05's buckets, in MB.
    """
    found = {
        "NaiveDDP": Strategy(NaiveDDP, 0, blocking=True),
        "FlatDDP": Strategy(FlatDDP, None),
        "OverlapDDP, after backward": Strategy(OverlapAfterBackward, 0),
        "OverlapDDP": Strategy(OverlapDDP, 0, overlap=True),
        "BucketedDDP, after backward": Strategy(
            partial(BucketedAfterBackward, bucket_size_mb=size), size
        ),
        "BucketedDDP": Strategy(partial(BucketedDDP, bucket_size_mb=size), size, overlap=True),
    }
    if not controls:
        del found["OverlapDDP, after backward"], found["BucketedDDP, after backward"]
    return found


def no_communication(module: torch.nn.Module) -> torch.nn.Module:
    return module


def shared_model(args, device: torch.device, described: dict):
    """Return a model, its stopwatch, and what trains it for a step in one of its wrappers.

    It may have several wrappers, because one acts only between its own forward and its finish.
    """
    size = ladder.SIZES[args.size]
    batch_shape = described["batch_size"], described["context_length"]
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(size.vocabulary, (2, *batch_shape), device=device)
    torch.manual_seed(args.seed)
    with device:
        model = LanguageModel(*size[:5]).to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = timing.Stopwatch(device)
    watch.mark_last_gradient(next(model.parameters()))  # torch's DDP waits within backward

    def step(wrapped: torch.nn.Module) -> dict[str, float]:
        return train_step(wrapped, optimizer, watch, tokens, targets)

    return model, watch, step


def main():
    many = int(os.environ.get("WORLD_SIZE", 2)) > 2
    parser = setup.Parser(__doc__)
    ladder.add_training_arguments(parser, steps=3 if many else 6)
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    setup.add_plot_arguments(parser, "compare.png")
    parser.add_argument(
        "--label", help="of the network in table and picture (default: its rate and delay)"
    )
    parser.set_defaults(warmup=1 if many else 2, json=str(ROOT / "results" / "compare.json"))
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("05_bucketed/compare", args, device)
        described = result["model"] = ladder.describe(LanguageModel, args)
        model, _, step = shared_model(args, device, described)
        steps = {timing.NO_COMMUNICATION: partial(step, model)}
        for name, strategy in strategies(args.bucket_size_mb, controls=not many).items():
            steps[name] = partial(step, strategy.wrap(model))
        for name, wrap in ladder.torch_ddp(args).items():
            steps[name] = partial(step, wrap(model))
        mine = users_rows(args.mine, args.bucket_size_mb)
        for name, wrap in mine.items():  # its hooks may act at any time
            steps[name] = make_step(wrap, args, device, described)
        result |= ladder.benchmark(steps, args, device)
        ladder.print_steps(result)
        for name in mine:
            if not result["candidates"][-1]["collectives_per_step"]:
                setup.say(f"{name} made no collective: its finish may be {', '.join(FINISHES)}")
        columns = {args.label or result["network"] or dist.get_backend(): [medians.p50s(result)]}
        setup.say()
        floor = timing.NO_COMMUNICATION
        medians.print_table(f"step ÷ {floor}", columns, medians.ratios, floor)
        ranks = dist.get_world_size()
        setup.say(f"One process needs {ranks} such steps for the samples of {ranks} ranks.")
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            medians.draw(columns, args.plot)


if __name__ == "__main__":
    main()
