r"""06, ZeRO2: two training steps after each other on one time axis, on an emulated network.

    torchrun --standalone --nproc-per-node 2 01_allreduce/slow_network/slow_network.py 1gbit,1ms \
        06_sharded_optimizer/zero2/two_steps.py

No communication, stage 05 and ZeRO2 train in turn in one process group, two steps each time. Of
nine such pairs the one of median length is drawn: what rank 0 computes, where it waits, and beneath
it what the network carries.
"""

import sys
import time
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
FOLDERS = [FOLDER, ROOT / "05_bucketed", ROOT / "05_bucketed" / "compare"]
FOLDERS += [ROOT / "01_allreduce" / "slow_network", ROOT]
sys.path[:0] = [str(folder) for folder in FOLDERS]

import slow_network
import timeline
import zero2
from bucketed import BucketedDDP
from timeline import Bar

from common import ladder, report, setup
from common.ladder import NO_COMMUNICATION, Way

GATHER, REDUCE = ("all-gather", 1), ("reduce-scatter", 2)  # names of bars, and their rows
KINDS = {  # what collectives do, by their names on the network, of which torch has changed some
    "_allgather_base": GATHER,
    "all_gather_single": GATHER,
    "alltoall_base": REDUCE,
    "all_to_all_single": REDUCE,
    "allreduce": ("all-reduce", 1),
}
WAITS = []  # bars of two steps
WAIT = slow_network.SlowWork.wait


def noting_wait(*arguments) -> bool:
    """Wait for a collective, and note when."""
    start = time.monotonic()
    is_done = WAIT(*arguments)
    WAITS.append(Bar("exposed communication", start, time.monotonic()))
    return is_done


def two_steps(trainee: ladder.Trainee) -> dict:
    """Train; return the seconds of a step, and the bars of two, in ms."""
    watch = trainee.watch
    slow_network.network.spans.clear()
    WAITS.clear()
    bars, seconds = [], []
    for _ in range(2):
        seconds.append(trainee.step()["step_seconds"])
        for phase in ("forward", "backward", "optimizer"):
            bars.append(Bar(phase, watch.marks[f"{phase} starts"], watch.marks[f"{phase} ends"]))
    bars += WAITS
    for span in slow_network.network.spans:
        kind, row = KINDS[span.name]
        bars.append(Bar(kind, span.begins, span.delivered, row))
    begin, stretch = bars[0].start, slow_network.network.stretch
    in_ms = [1000 * (moment - begin) / stretch for bar in bars for moment in (bar.start, bar.end)]
    ends = zip(in_ms[::2], in_ms[1::2], strict=True)
    bars = [bar._replace(start=s, end=e) for bar, (s, e) in zip(bars, ends, strict=True)]
    return {"step_seconds": sum(seconds) / 2, "bars": bars}


def main() -> None:
    args = timeline.read_arguments(__doc__, "zero2.png")
    slow_network.SlowWork.wait = noting_wait
    options = {"bucket_size_mb": args.bucket_size_mb}
    ways = {
        NO_COMMUNICATION: Way(),
        "BucketedDDP": Way(partial(BucketedDDP, **options)),
        "ZeRO2": Way(partial(zero2.ZeRO2, **options), waits_anywhere=True),
    }
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("06_sharded_optimizer/zero2", args, device)
        result["model"] = ladder.describe(args)
        candidates = {}
        for name, way in ways.items():
            trainee = ladder.language_trainee(way, args, device)
            candidates[name] = partial(two_steps, trainee)
        drawn = timeline.median_steps(candidates, args, result)
        report.write_json(args.json, result)
    labelled = {}
    for name, bars in drawn.items():
        waits = sum(bar.end - bar.start for bar in bars if bar.name == "exposed communication")
        setup.say(
            f"{name}: two steps take {timeline.duration(bars):.0f} ms; it waits for {waits:.0f}"
        )
        labelled[f"{name}\nwaits {waits:.0f} ms"] = bars
    if args.plot and setup.is_rank_0():
        timeline.draw(labelled, args.plot, 1.12 * max(map(timeline.duration, drawn.values())))


if __name__ == "__main__":
    main()
