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
from pathlib import Path

import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path[:0] = [str(ROOT), str(FOLDER)]

import medians
from strategies import strategies
from users_class import FINISHES

from common import ladder, report, setup
from common.ladder import NO_COMMUNICATION, Way


def main():
    many = int(os.environ.get("WORLD_SIZE", 2)) > 2
    parser = setup.Parser(__doc__)
    ladder.add_training_arguments(parser, steps=3 if many else 6, warmup=1 if many else 2)
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    megabytes = {"type": setup.positive_number, "default": 5.0, "metavar": "MB"}
    parser.add_argument("--bucket-size-mb", **megabytes, help="of 05 and of torch's DDP")
    setup.add_plot_arguments(parser, "compare.png")
    parser.add_argument(
        "--label", help="of the network in table and picture (default: its rate and delay)"
    )
    parser.set_defaults(json=str(ROOT / "results" / "compare.json"))
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("05_bucketed/compare", args, device)
        result["model"] = ladder.describe(args)
        shared = ladder.language_trainee(Way(), args, device)
        wraps = strategies(args.bucket_size_mb, controls=not many)
        ways = {name: strategy.wrap for name, strategy in wraps.items()}
        ways |= {name: way.wrap for name, way in ladder.torch_ddp(args).items()}
        steps = {name: shared.in_wrapper(wrap).step for name, wrap in ways.items()}
        mine = ladder.users_rows(args)
        for name, wrap in mine.items():  # its hooks may act at any time
            steps[name] = ladder.language_trainee(Way(wrap), args, device).step
        result["candidates"] = ladder.benchmark({NO_COMMUNICATION: shared.step, **steps}, args)
        ladder.print_steps(result)
        for name in mine:
            if not result["candidates"][-1]["collectives_per_step"]:
                setup.say(f"{name} made no collective: its finish may be {', '.join(FINISHES)}")
        columns = {args.label or result["network"] or dist.get_backend(): [medians.p50s(result)]}
        setup.say()
        medians.print_runs(f"step ÷ {NO_COMMUNICATION}", columns, medians.ratios, NO_COMMUNICATION)
        ranks = dist.get_world_size()
        setup.say(f"One process needs {ranks} such steps for the samples of {ranks} ranks.")
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            medians.draw(columns, args.plot)


if __name__ == "__main__":
    main()
