"""05: a model that predicts a step of stages 02 to 05, event by event.

Given what a rank computes, what all-reduces cost, and how much the two slow each other: a step.

    python 05_bucketed/simulate.py --ranks 8 --bucket-size-mb 5                  (see also --help)

It assumes that all ranks are alike and nothing else runs. An all-reduce of S bytes on n ranks takes
2(n-1) hops of latency, which pass beside those of other calls, then call + 2(n-1)/n · S/bandwidth
seconds of transfer; calls that transfer at the same time share the network equally. So k calls that
may be in flight together take 2(n-1)·hop + k·call + 2(n-1)/n · (bytes of all)/bandwidth. Compute is
slower beside a call in flight, and transfer beside compute. A pass over a gradient's memory takes
bytes/copy_bandwidth: 02 and 04 scale it, 05 scales it into its bucket, 03 packs, scales, unpacks.

Source: Li et al., "PyTorch Distributed", VLDB 2020; Stanford CS336, assignment 2, "DDP bucketed
benchmarking"; Echo, arXiv 2412.12487: compute and communication slow each other down.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Step:
    """What a rank computes, in seconds while nothing is communicated."""

    forward: float
    backward: float
    optimizer: float
    gradients: list[tuple[float, float]]  # in launch order: bytes, second of backward when ready
    copy_bandwidth: float = math.inf  # bytes per second of a pass over memory
    hook: float = 0.0  # seconds of Python in 04 and 05 for each gradient
    launch: float = 0.0  # and for each call


@dataclass(frozen=True)
class Network:
    """What all-reduces cost. Stage 01's α, of a call by itself, is call + 2(n-1)·hop seconds."""

    ranks: int
    hop: float  # seconds of latency from rank to rank; a call of two ranks has two hops
    bandwidth: float  # bytes per second that leave a rank: stage 01's β
    call: float = 0.0  # seconds that one more call in flight costs, however many ranks there are
    calls_at_once: int | None = 2  # gloo has two threads, NCCL one stream; None: no limit
    compute_speed: float = 1.0  # beside a call in flight, as a fraction of the speed alone
    transfer_speed: float = 1.0  # beside compute, likewise; none of the three may be 0
    call_speeds: tuple[float, float] | None = None  # both, for `call` in place of the bytes


class Result(NamedTuple):
    step_seconds: float
    exposed_seconds: float  # from the end of backward to the start of the optimizer
    timeline: list[tuple[str, float, float]]  # what, start, end; in the order of the ends


def program(step: Step, rung: str, bucket_size_mb: float):
    """What a rank does, in order: (what, seconds of work), or ("launch", bytes of a call)."""
    sizes = [size for size, _ in step.gradients]
    limits = {"02": 0, "03": math.inf, "04": 0, "05": bucket_size_mb * 2**20}
    buckets = fill_buckets(sizes, limits[rung])
    done, ready = 0.0, set()
    yield "forward", step.forward
    if rung in ("04", "05"):
        for index, (size, moment) in sorted(enumerate(step.gradients), key=lambda one: one[1][1]):
            yield "backward", moment - done
            yield "hook", step.hook + size / step.copy_bandwidth
            done = moment
            ready.add(index)
            while buckets and ready.issuperset(buckets[0]):  # launched after all before it
                yield "hook", step.launch
                yield "launch", sum(sizes[one] for one in buckets.pop(0))
    yield "backward", step.backward - done
    for bucket in buckets:  # 02 and 03; in 04 and 05 none is left
        size = sum(sizes[one] for one in bucket)
        yield "pack", (2 if rung == "03" else 1) * size / step.copy_bandwidth
        yield "launch", size
        yield "wait", math.inf
        yield "unpack", (1 if rung == "03" else 0) * size / step.copy_bandwidth
    yield "wait", math.inf  # until no call is left
    yield "optimizer", step.optimizer


def simulate(step: Step, network: Network, rung: str, bucket_size_mb: float = 25.0) -> Result:
    """Play a step of the rung "02", "03", "04", or "05" with buckets of this size (inf: one)."""
    hops = 2 * (network.ranks - 1)
    now, timeline = 0.0, []
    calls, speeds, starts, ends = {}, {}, {}, {}  # calls: not over, the seconds of transfer left
    for what, work in program(step, rung, bucket_size_mb):
        if what == "launch":
            if hops > 0:
                name = f"all-reduce {len(speeds) + 1}"
                calls[name], *speeds[name] = transfer(network, work)
            continue
        began, waiting = now, what == "wait"
        while work > 0 and (calls or not waiting):
            in_flight = list(calls)[: network.calls_at_once]
            starts |= {name: starts.get(name, now) for name in in_flight}
            arrivals = {name: starts[name] + hops * network.hop for name in in_flight}
            sending = [name for name in in_flight if arrivals[name] <= now]
            speed = sum(speeds[name][0] for name in in_flight) / len(in_flight) if in_flight else 1
            share = {name: (1 if waiting else speeds[name][1]) / len(sending) for name in sending}
            events = [work / speed, *(calls[name] / share[name] for name in sending)]
            events += [arrival - now for arrival in arrivals.values() if arrival > now]
            seconds = min(events)  # until then no speed changes
            now += seconds
            work = remaining(work, speed, seconds)
            for name in sending:
                calls[name] = remaining(calls[name], share[name], seconds)
                if calls[name] <= 0:
                    del calls[name]
                    timeline.append((name, starts[name], now))
        if now > began:
            timeline.append((what, began, now))
        ends[what] = now
    return Result(now, began - ends["backward"], timeline)


# ==================================================================================================
# Below this line: the bucket rule, what rounding needs, and the command line with an example.


def fill_buckets(sizes: list[float], limit: float) -> list[list[int]]:
    """Which gradients share a bucket of `limit` bytes: bucketed.py's rule, for a single dtype."""
    buckets = []
    room = -1.0
    for index, size in enumerate(sizes):
        if size > room:
            room = limit if buckets else limit / 25
            buckets.append([])
        room -= size
        buckets[-1].append(index)
    return buckets


def transfer(network: Network, size: float) -> tuple[float, float, float]:
    """Seconds that a call of so many bytes transfers alone; speeds of compute and of it beside."""
    sending = 2 * (network.ranks - 1) / network.ranks * size / network.bandwidth
    speeds = network.compute_speed, network.transfer_speed
    call_compute_speed, call_speed = network.call_speeds or speeds
    alone = network.call + sending
    if alone == 0:
        return 0.0, *speeds
    call, sending = network.call / call_speed, sending / network.transfer_speed  # beside compute
    compute = call_compute_speed * call + network.compute_speed * sending
    return alone, compute / (call + sending), alone / (call + sending)


def remaining(work: float, speed: float, seconds: float) -> float:
    """Of so much work after so many seconds; exactly 0 when it is over, whatever the rounding."""
    return 0.0 if work / speed <= seconds else work - seconds * speed


MARKS = {"forward": "f", "backward": "b", "hook": "c", "pack": "c", "unpack": "c"}
MARKS |= {"wait": ".", "optimizer": "o"}


def example() -> Step:
    """A step of 160 ms: backward computes 12 gradients of 8 MB, one every 8 ms."""
    gradients = [(8 * 2**20, 0.008 * (number + 1)) for number in range(12)]
    return Step(0.048, 0.096, 0.016, gradients, copy_bandwidth=10e9, hook=20e-6)


def lane(blocks: list[tuple[str, float, float]], column_seconds: float, columns: int) -> str:
    """Blocks (mark, start, end) as a line: the mark of the block in the middle of each column."""
    line = ""
    for column in range(columns):
        middle = (column + 0.5) * column_seconds
        line += next((mark for mark, start, end in blocks if start <= middle < end), " ")
    return line.rstrip()


def main():
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
    try:
        from common import setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")

    parser = setup.Parser(__doc__)
    add, whole, positive = parser.add_argument, setup.whole_number(1), setup.positive_number
    add("--ranks", type=whole, default=2)
    add("--bucket-size-mb", type=positive, default=25.0, help="of 05")
    add("--bandwidth", type=positive, default=2.0, metavar="GB/s", help="of what leaves a rank")
    add("--hop", type=whole, default=50, metavar="µs", help="latency from rank to rank")
    add("--calls-at-once", type=whole, default=2, help="in flight; the others wait for their turn")
    args = parser.parse_args()
    options = {"calls_at_once": args.calls_at_once, "compute_speed": 0.9, "transfer_speed": 0.9}
    network = Network(args.ranks, 1e-6 * args.hop, 1e9 * args.bandwidth, call=100e-6, **options)
    results = {}
    for rung in ("02", "03", "04", "05"):
        results[rung] = simulate(example(), network, rung, args.bucket_size_mb)
    column = max(result.step_seconds for result in results.values()) / 80
    for rung, (seconds, exposed, timeline) in results.items():
        computing = [(MARKS[what], *times) for what, *times in timeline if what in MARKS]
        sending = [(what[-1], *times) for what, *times in timeline if what not in MARKS]
        setup.say(f"{rung}: {1000 * seconds:.1f} ms, exposed {1000 * exposed:.1f} ms")
        setup.say(f"  compute  {lane(computing, column, 80)}")
        setup.say(f"  network  {lane(sending, column, 80)}")
    setup.say(f"A column is {1000 * column:.1f} ms. f: forward, b: backward, c: copies and hooks,")
    setup.say(". waiting, o: optimizer; digits: an all-reduce, the last digit of its number.")


if __name__ == "__main__":
    main()
