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
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path[:0] = [str(ROOT), str(FOLDER)]

import medians
from bucketed import LanguageModel, make_step, train_step
from strategies import strategies
from users_class import FINISHES, users_rows

from common import ladder, report, setup, timing


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
        train_step(wrapped, optimizer, watch, tokens, targets)
        return watch.times()

    return model, watch, step


def main():
    many = int(os.environ.get("WORLD_SIZE", 2)) > 2
    parser = setup.Parser(__doc__)
    ladder.add_training_arguments(parser, steps=3 if many else 6)
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    megabytes = {"type": setup.positive_number, "default": 5.0, "metavar": "MB"}
    parser.add_argument("--bucket-size-mb", **megabytes, help="of 05 and of torch's DDP")
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
        medians.print_runs(f"step ÷ {floor}", columns, medians.ratios, floor)
        ranks = dist.get_world_size()
        setup.say(f"One process needs {ranks} such steps for the samples of {ranks} ranks.")
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            medians.draw(columns, args.plot)


if __name__ == "__main__":
    main()
