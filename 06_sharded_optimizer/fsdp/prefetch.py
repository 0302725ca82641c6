"""06, FSDP: a training step with and without prefetch on one time axis, on an emulated network.

    torchrun --standalone --nproc-per-node 2 01_allreduce/slow_network/slow_network.py 5gbit,1ms \
        06_sharded_optimizer/fsdp/prefetch.py --plot results/prefetch_5gbit.png

A step without communication and both ways train in turn in one process group. Of nine steps of each
the one of median length is drawn: what rank 0 computes, where it waits, and beneath it what the
network carries.
"""

import sys
import time
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
FOLDERS = [FOLDER, FOLDER.parent, ROOT / "05_bucketed" / "compare"]
FOLDERS += [ROOT / "01_allreduce" / "slow_network", ROOT]
sys.path[:0] = [str(folder) for folder in FOLDERS]

import slow_network
import timeline
from fsdp import FSDP
from timeline import Bar

from common import ladder, report, setup
from common.ladder import NO_COMMUNICATION, Way

WAYS = {
    NO_COMMUNICATION: Way(),
    "FSDP, no prefetch": Way(partial(FSDP, prefetch=False), waits_anywhere=True),
    "FSDP": Way(FSDP, waits_anywhere=True),
}
GATHER, REDUCE = ("all-gather", 1), ("reduce-scatter", 2)  # names of bars, and their rows
KINDS = {  # what collectives do, by their names on the network, of which torch has changed some
    "_allgather_base": GATHER,
    "all_gather_single": GATHER,
    "alltoall_base": REDUCE,
    "all_to_all_single": REDUCE,
    "allreduce": REDUCE,  # of biases and norms: the only one of its kind, and small
}
WAITS = []  # bars of a step
WAIT = slow_network.SlowWork.wait


def noting_wait(*arguments) -> bool:
    """Wait for a collective, and note when."""
    start = time.monotonic()
    is_done = WAIT(*arguments)
    WAITS.append(Bar("exposed communication", start, time.monotonic()))
    return is_done


def step(trainee: ladder.Trainee) -> dict:
    """Train; returns the seconds, and the bars of the step."""
    spans = slow_network.network.spans
    WAITS.clear()
    spans.clear()
    times = trainee.step()
    bars = WAITS.copy()
    for span in spans:
        kind, row = KINDS[span.name]
        bars.append(Bar(kind, span.begins, span.delivered, row))
    marks = trainee.watch.marks
    return times | {"bars": timeline.bars_of(marks, marks["sync ends"], bars)}


def main() -> None:
    args = timeline.read_arguments(__doc__, "prefetch.png")
    slow_network.SlowWork.wait = noting_wait
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("06_sharded_optimizer/fsdp", args, device)
        result["model"] = ladder.describe(args)
        candidates = {}
        for name, way in WAYS.items():
            candidates[name] = partial(step, ladder.language_trainee(way, args, device))
        steps = timeline.median_steps(candidates, args, result)
        report.write_json(args.json, result)
    labelled = {}
    for name, bars in steps.items():
        waits = sum(bar.end - bar.start for bar in bars if bar.name == "exposed communication")
        setup.say(f"{name}: {timeline.duration(bars):.0f} ms; it waits for {waits:.0f} of them")
        labelled[f"{name}\nwaits {waits:.0f} ms"] = bars
    if args.plot and setup.is_rank_0():
        timeline.draw(labelled, args.plot, 1.12 * max(map(timeline.duration, steps.values())))


if __name__ == "__main__":
    main()
