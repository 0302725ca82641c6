"""05: stages 02 to 05 beside each other, in one process group, step by step in turn.

Stages that run one after the other meet the machine in different moods, minutes apart. Here all
train one model in turn (no communication, 02, 03, 04, 05, torch DDP, and again), so that they can
be compared. Two rows are controls: the calls of 04 and of 05, but all of them launched after
backward. What 04 and 05 gain over these is what overlap gains.

    make compare                                                        (see also ARGS="--help")
    make compare NETWORK=1gbit,1ms                  (on an emulated network, as slow as you like)
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
from rows import rows_of_stages, train_step
from users_class import FINISHES, users_rows

from common import ladder, report, setup
from common.ladder import NO_COMMUNICATION, Way


def measure(args, device, controls: bool) -> list[dict]:
    """Measure all ways in turn; return "rows" of the JSON.

    They share one model and one optimizer, but for the user's own class: its hooks may act at any
    time.
    """
    floor = ladder.language_trainee(Way(), train_step, args, device)
    trainees = {NO_COMMUNICATION: floor}
    ways = {name: Way(s.wrap) for name, s in rows_of_stages(args.bucket_size_mb, controls).items()}
    ways |= ladder.torch_ddp(args.bucket_size_mb)
    for name, way in ways.items():
        trainees[name] = ladder.language_trainee(way, train_step, args, device, beside=floor)
    for name, mine in users_rows(args.mine, args.bucket_size_mb).items():
        trainees[name] = ladder.language_trainee(Way(mine), train_step, args, device)
    steps = {name: trainee.step for name, trainee in trainees.items()}
    return ladder.benchmark(steps, args)


def main():
    many = int(os.environ.get("WORLD_SIZE", 2)) > 2
    parser = setup.Parser(__doc__)
    ladder.add_training_arguments(parser, steps=3 if many else 6, warmup=1 if many else 2)
    ladder.add_bucket_size(parser)
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    setup.add_plot_arguments(parser, "compare.png")
    label = "of the network in table and picture (default: its rate and delay)"
    parser.add_argument("--label", help=label)
    parser.set_defaults(json=str(ROOT / "results" / "compare.json"))
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("05_bucketed/compare", args, device)
        result["model"] = ladder.describe(args)
        result["rows"] = measure(args, device, controls=not many)
        ladder.print_steps(result)
        last = result["rows"][-1]
        if args.mine and not last["collectives"]:
            finishes = ", ".join(FINISHES)
            setup.say(f"{last['name']} made no collective: its finish may be {finishes}")
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
