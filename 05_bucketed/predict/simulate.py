"""05: a model that predicts a step of stages 02 to 05, event by event.

Given what a rank computes, what all-reduces cost, and how much the two slow each other: a step.

    from simulate import Network, Step, simulate
    simulate(Step(...), Network(...), "05", bucket_size_mb=25.0)

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
from dataclasses import dataclass


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

    @property
    def latency(self) -> float:
        """Seconds from the start of a call to that of its transfer."""
        return 2 * (self.ranks - 1) * self.hop

    @property
    def call_alone(self) -> float:
        """Seconds of a call that nothing is beside, without its bytes: stage 01's α."""
        return self.call + self.latency


class Call:
    """An all-reduce of so many bytes, which is launched and not over."""

    def __init__(self, network: Network, size: float):
        self.start = None  # when it goes into flight; None: it waits for its turn
        sending = 2 * (network.ranks - 1) / network.ranks * size / network.bandwidth
        self.seconds_left = network.call + sending  # if it has the network for itself
        # As fractions of the speeds alone: of compute beside it, of its transfer beside compute.
        self.compute_speed, self.transfer_speed = network.compute_speed, network.transfer_speed
        if self.seconds_left > 0:
            speeds = network.call_speeds or (network.compute_speed, network.transfer_speed)
            compute_beside_fixed, fixed_beside_compute = speeds
            fixed = network.call / fixed_beside_compute  # seconds beside compute
            sending /= network.transfer_speed
            computed = compute_beside_fixed * fixed + network.compute_speed * sending
            self.compute_speed = computed / (fixed + sending)
            self.transfer_speed = self.seconds_left / (fixed + sending)


class Rank:
    """Computes, launches all-reduces and waits for them; `now` is its clock, in seconds."""

    def __init__(self, network: Network):
        self.network = network
        self.now = 0.0
        self.calls = []  # launched and not over, in launch order

    def compute(self, seconds: float) -> None:
        """Work that takes so long alone, and longer beside calls in flight."""
        while seconds > 0:
            speeds = [call.compute_speed for call in self.in_flight()]
            speed = sum(speeds) / len(speeds) if speeds else 1.0
            passed = self.to_next_event(seconds / speed, computing=True)
            seconds = remaining(seconds, speed, passed)

    def launch(self, size: float) -> None:
        """An all-reduce of so many bytes, which itself takes the rank no time."""
        self.calls.append(Call(self.network, size))

    def wait(self) -> None:
        """Until no call is left."""
        while self.calls:
            self.to_next_event(math.inf, computing=False)

    def to_next_event(self, work: float, computing: bool) -> float:
        """Go on until the work, a transfer or a latency ends, because no speed changes before.

        Returns the seconds until then.
        """
        latency = self.network.latency
        in_flight = self.in_flight()
        sending = [call for call in in_flight if call.start + latency <= self.now]
        shares = {}  # of the network
        for call in sending:
            shares[call] = (call.transfer_speed if computing else 1.0) / len(sending)
        events = [work]
        events += [call.seconds_left / shares[call] for call in sending]
        events += [call.start + latency - self.now for call in in_flight if call not in shares]
        seconds = min(events)
        self.now += seconds
        for call in sending:
            call.seconds_left = remaining(call.seconds_left, shares[call], seconds)
            if call.seconds_left == 0:
                self.calls.remove(call)
        return seconds

    def in_flight(self) -> list[Call]:
        """The calls whose turn has come."""
        calls = self.calls[: self.network.calls_at_once]
        for call in calls:
            if call.start is None:
                call.start = self.now
        return calls


def remaining(work: float, speed: float, seconds: float) -> float:
    """Of so much work after so many seconds; exactly 0 when it is over, whatever the rounding."""
    return 0.0 if work / speed <= seconds else work - seconds * speed


def simulate(step: Step, network: Network, rung: str, bucket_size_mb: float | None = None) -> float:
    """Seconds of a step of the rung "02", "03", "04", or "05" with buckets of this size."""
    limits = {"02": 0, "03": math.inf, "04": 0}  # bytes that share a call
    limit = bucket_size_mb * 2**20 if rung == "05" else limits[rung]
    sizes = [size for size, _ in step.gradients]
    buckets = fill_buckets(sizes, limit)
    rank = Rank(network)
    rank.compute(step.forward)
    computed = 0.0  # seconds of backward
    if rung in ("04", "05"):
        ready = set()
        for index in sorted(range(len(sizes)), key=lambda index: step.gradients[index][1]):
            size, moment = step.gradients[index]
            rank.compute(moment - computed)
            computed = moment
            rank.compute(step.hook + size / step.copy_bandwidth)
            ready.add(index)
            while buckets and ready.issuperset(buckets[0]):  # launched after all before it
                rank.compute(step.launch)
                rank.launch(sum(sizes[member] for member in buckets.pop(0)))
    rank.compute(step.backward - computed)
    for bucket in buckets:  # of 02 and 03; of 04 and 05 none is left
        size = sum(sizes[member] for member in bucket)
        rank.compute(size / step.copy_bandwidth)  # scaled: by 02 in place, by 03 on its way
        rank.launch(size)
        rank.wait()
        if rung == "03":
            rank.compute(size / step.copy_bandwidth)  # copied back
    rank.wait()
    rank.compute(step.optimizer)
    return rank.now


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
