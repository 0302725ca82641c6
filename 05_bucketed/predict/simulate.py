"""05: a model that predicts a step of stages 02 to 05, event by event.

Given what a rank computes, what all-reduces cost, and how much the two slow each other: a step.

    python 05_bucketed/predict/simulate.py --ranks 8 --bucket-size-mb 5          (see also --help)

It assumes that all ranks are alike and nothing else runs. An all-reduce of S bytes on n ranks takes
2(n-1) hops of latency, which pass beside those of other calls, then call + 2(n-1)/n · S/bandwidth
seconds of transfer; calls that transfer at the same time share the network equally. So k calls that
may be in flight together take 2(n-1)·hop + k·call + 2(n-1)/n · (bytes of all)/bandwidth. Compute is
slower beside a call in flight, and transfer beside compute. A pass over a gradient's memory takes
bytes/copy_bandwidth: 02 and 04 scale it, 05 scales it into its bucket, 03 scales it into its flat
tensor and, a second pass, copies it back.

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

    @property
    def seconds_alone(self) -> float:
        """A step that sends nothing."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Network:
    """What all-reduces cost."""

    ranks: int
    hop: float  # seconds of latency from rank to rank; a call of two ranks has two hops
    bandwidth: float  # bytes per second that leave a rank: stage 01's β
    call: float = 0.0  # seconds that one more call in flight costs, however many ranks there are
    calls_at_once: int | None = 2  # gloo has two threads, NCCL one stream; None: no limit
    compute_speed: float = 1.0  # beside a call in flight, as a fraction of the speed alone
    transfer_speed: float = 1.0  # beside compute, likewise; none of the three may be 0
    call_speeds: tuple[float, float] | None = None  # both, for `call` in place of the bytes

    def call_alone(self) -> float:
        """Seconds of a call that nothing is beside, without its bytes: stage 01's α."""
        return self.call + 2 * (self.ranks - 1) * self.hop


class Result(NamedTuple):
    step_seconds: float
    exposed_seconds: float  # from the end of backward to the start of the optimizer
    timeline: list[tuple[str, float, float]]  # what, start, end; in the order of the ends


@dataclass(eq=False)
class Call:
    """An all-reduce that is launched and not over."""

    name: str
    seconds_left: float  # of its transfer, if it had the network for itself
    compute_speed: float  # of compute beside it, as a fraction of the speed alone
    transfer_speed: float  # of its transfer beside compute, likewise
    start: float | None = None  # when it goes into flight; None: it waits for its turn


def program(step: Step, rung: str, bucket_size_mb: float):
    """What a rank does, in order: (what, seconds of work), or ("launch", bytes of a call)."""
    sizes = [size for size, _ in step.gradients]
    limits = {"02": 0, "03": math.inf, "04": 0, "05": bucket_size_mb * 2**20}
    buckets = fill_buckets(sizes, limits[rung])
    yield "forward", step.forward
    computed = 0.0  # seconds of backward
    if rung in ("04", "05"):
        ready = set()
        by_moment = sorted(range(len(sizes)), key=lambda index: step.gradients[index][1])
        for index in by_moment:
            size, moment = step.gradients[index]
            yield "backward", moment - computed
            yield "hook", step.hook + size / step.copy_bandwidth
            computed = moment
            ready.add(index)
            while buckets and ready.issuperset(buckets[0]):  # launched after all before it
                bucket = buckets.pop(0)
                yield "hook", step.launch
                yield "launch", sum(sizes[member] for member in bucket)
    yield "backward", step.backward - computed
    for bucket in buckets:  # of 02 and 03; of 04 and 05 none is left
        size = sum(sizes[member] for member in bucket)
        yield "pack", size / step.copy_bandwidth  # scaled: by 02 in place, by 03 on its way
        yield "launch", size
        yield "wait", math.inf
        if rung == "03":
            yield "unpack", size / step.copy_bandwidth
    yield "wait", math.inf  # until no call is left
    yield "optimizer", step.optimizer


def simulate(step: Step, network: Network, rung: str, bucket_size_mb: float = 25.0) -> Result:
    """Play a step of the rung "02", "03", "04", or "05" with buckets of this size (inf: one)."""
    latency = 2 * (network.ranks - 1) * network.hop
    now = 0.0
    timeline = []
    launched = 0
    calls = []  # those that are not over, in launch order
    ends = {}  # of what the rank does, the end of the last time
    for what, work in program(step, rung, bucket_size_mb):
        if what == "launch":
            if network.ranks > 1:
                launched += 1
                calls.append(new_call(network, f"all-reduce {launched}", work))
            continue
        began = now
        waiting = what == "wait"
        while work > 0 and (calls or not waiting):
            in_flight = calls[: network.calls_at_once]
            for call in in_flight:
                if call.start is None:
                    call.start = now
            sending = [call for call in in_flight if call.start + latency <= now]
            speed = mean_compute_speed(in_flight)
            shares = {}  # of the network
            for call in sending:
                shares[call] = (1.0 if waiting else call.transfer_speed) / len(sending)
            # To the next event, because no speed changes before it: the end of this work, of a
            # transfer or of a latency.
            events = [work / speed]
            events += [call.seconds_left / shares[call] for call in sending]
            events += [call.start + latency - now for call in in_flight if call not in shares]
            seconds = min(events)
            now += seconds
            work = remaining(work, speed, seconds)
            for call in sending:
                call.seconds_left = remaining(call.seconds_left, shares[call], seconds)
                if call.seconds_left == 0:
                    calls.remove(call)
                    timeline.append((call.name, call.start, now))
        if now > began:
            timeline.append((what, began, now))
        ends[what] = now
    return Result(now, ends["wait"] - ends["backward"], timeline)


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


def new_call(network: Network, name: str, size: float) -> Call:
    """An all-reduce of so many bytes. A part of its transfer is the fixed cost of a call."""
    speeds = network.compute_speed, network.transfer_speed
    compute_beside_fixed, fixed_beside_compute = network.call_speeds or speeds
    sending = 2 * (network.ranks - 1) / network.ranks * size / network.bandwidth
    alone = network.call + sending
    if alone == 0:
        return Call(name, 0.0, *speeds)
    fixed_seconds = network.call / fixed_beside_compute  # beside compute
    sending_seconds = sending / network.transfer_speed
    seconds = fixed_seconds + sending_seconds
    computed = compute_beside_fixed * fixed_seconds + network.compute_speed * sending_seconds
    return Call(name, alone, compute_speed=computed / seconds, transfer_speed=alone / seconds)


def mean_compute_speed(in_flight: list[Call]) -> float:
    if not in_flight:
        return 1.0
    return sum(call.compute_speed for call in in_flight) / len(in_flight)


def remaining(work: float, speed: float, seconds: float) -> float:
    """Of so much work after so many seconds; exactly 0 when it is over, whatever the rounding."""
    return 0.0 if work / speed <= seconds else work - seconds * speed


COLUMNS = 80
MARKS = {"forward": "f", "backward": "b", "hook": "c", "pack": "c", "unpack": "c"}
MARKS |= {"wait": ".", "optimizer": "o"}


def example() -> Step:
    """A step of 160 ms: backward computes 12 gradients of 8 MB, one every 8 ms."""
    gradients = [(8 * 2**20, 0.008 * (number + 1)) for number in range(12)]
    return Step(0.048, 0.096, 0.016, gradients, copy_bandwidth=10e9, hook=20e-6)


def lane(blocks: list[tuple[str, float, float]], column_seconds: float) -> str:
    """Blocks (mark, start, end) as a line: the mark of the block in the middle of each column."""
    line = ""
    for column in range(COLUMNS):
        middle = (column + 0.5) * column_seconds
        line += next((mark for mark, start, end in blocks if start <= middle < end), " ")
    return line.rstrip()


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent.parent)]
    try:
        from common import setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")

    parser = setup.Parser(__doc__)
    add = parser.add_argument
    whole = setup.whole_number(1)
    positive = setup.positive_number
    add("--ranks", type=whole, default=2)
    add("--bucket-size-mb", type=positive, default=25.0, help="of 05")
    add("--bandwidth", type=positive, default=2.0, metavar="GB/s", help="of what leaves a rank")
    add("--hop", type=whole, default=50, metavar="µs", help="latency from rank to rank")
    args = parser.parse_args()
    network = Network(
        ranks=args.ranks,
        hop=1e-6 * args.hop,
        bandwidth=1e9 * args.bandwidth,
        call=100e-6,
        compute_speed=0.9,
        transfer_speed=0.9,
    )
    results = {}
    for rung in ("02", "03", "04", "05"):
        results[rung] = simulate(example(), network, rung, args.bucket_size_mb)
    column = max(result.step_seconds for result in results.values()) / COLUMNS
    for rung, result in results.items():
        computing = []
        sending = []
        for what, start, end in result.timeline:
            if what in MARKS:
                computing.append((MARKS[what], start, end))
            else:
                sending.append((what[-1], start, end))
        exposed = f"exposed {1000 * result.exposed_seconds:.1f} ms"
        setup.say(f"{rung}: {1000 * result.step_seconds:.1f} ms, {exposed}")
        setup.say(f"  compute  {lane(computing, column)}")
        setup.say(f"  network  {lane(sending, column)}")
    setup.say(f"A column is {1000 * column:.1f} ms. f: forward, b: backward, c: copies and hooks,")
    setup.say(". waiting, o: optimizer; digits: an all-reduce, the last digit of its number.")


if __name__ == "__main__":
    main()
