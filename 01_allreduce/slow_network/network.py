"""A network as slow as you like, on any machine: a backend of your own for torch.distributed.

The ranks of one machine send through its memory, so communication looks cheap. This backend hands
every collective to gloo, and its result out when a network of the given rate and delay would have
delivered it. Until then the caller computes on, or sleeps in wait(). torch's own DDP runs over it.

    from network import wire
    wire.connect("1gbit,1ms")                        # on every rank: rate, and delay of one way
    dist.init_process_group("slow_network")          # or dist.new_group(backend="slow_network")
    with wire:                                       # within it calls are slow
        ...

A group has one call under way at a time, as NCCL has one stream; a third field of 2 makes that two,
as gloo has two threads ("1gbit,1ms,2").

The network's time can be stretched: with a stretch of 3 rate and delay are three times slower, and
who divides what a step took by 3 finds the proportions of machines that compute three times as
fast (time-dilated network emulation: Gupta et al., NSDI 2006). `wire.keep_pace` lets the stretch
follow the speed of this machine. over.py runs any script on such a network; those of this
repository find the `wire` at their process group.

Source: torch.distributed, Backend.register_backend; how gloo sends was measured between hosts.
"""

import re
import threading
import time
from collections import deque
from datetime import timedelta
from functools import partialmethod
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "ms": 1e-3, "us": 1e-6}
DELAYS_PER_STEP = 2  # gloo's receiver says first that it is ready; then the data comes
MOST_DRIFT = 1.5  # of the machine's speed while it measures


class Network(NamedTuple):
    """Bytes per second, seconds of one way, and how many calls of a group are under way at once."""

    rate: float
    delay: float
    calls_at_once: int


def read_network(text: str) -> Network:
    """Read 1gbit,1ms or 1gbit,1ms,2. ValueError for what is no rate and delay."""
    form = r"(\d*\.?\d+)(mbit|gbit),(?:(\d*\.?\d+)(ms|us)|0)(?:,([12]))?"
    fields = re.fullmatch(form, text)
    if not fields or float(fields[1]) == 0:
        raise ValueError(f"{text!r} is not a rate, a delay and perhaps 1 or 2 calls: 1gbit,1ms,2")
    rate, rate_unit, delay, delay_unit, calls_at_once = fields.groups()
    delay = float(delay) * UNITS[delay_unit] if delay else 0.0
    return Network(float(rate) * UNITS[rate_unit], delay, int(calls_at_once or 1))


class Span(NamedTuple):
    """A collective that the wire has carried; its moments are seconds of time.monotonic()."""

    name: str
    size_bytes: int
    launched: float
    begins: float
    delivered: float


class Cost(NamedTuple):
    """What a rank of n does in a collective of gloo: steps · (n−1) messages, one after another,
    and share · (n−1)/n of the tensor."""

    steps: int
    share: int


ALL_REDUCES = ["allreduce", "allreduce_coalesced", "reduce", "reduce_scatter"]
ALL_REDUCES += ["_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"]
ALL_GATHERS = ["allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"]
ALL_GATHERS += ["all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"]
COSTS = {
    **dict.fromkeys(ALL_REDUCES, Cost(steps=2, share=2)),  # gloo's reduce-scatter is an all-reduce
    **dict.fromkeys(ALL_GATHERS, Cost(steps=1, share=1)),
    "broadcast": Cost(steps=1, share=2),
}
AS_GLOO = ["gather", "gather_single", "gather_into_tensor", "scatter", "send", "recv"]
AS_GLOO += ["recv_anysource", "barrier", "monitored_barrier"]


class Wire:
    """What this rank sends through, one for all of its groups. It sends one call after another."""

    def __init__(self):
        self.is_slow = False  # True within `with wire:`
        self.text, self.network = None, None  # later: 1gbit,1ms, and the Network
        self.stretch = 1.0  # seconds here for each of the network's
        self.drift = 1.0, 1.0  # the lowest and the highest since begin()
        self.pace = 0.0  # what a step without communication counts as, in seconds; 0: as it is
        self.last_steps = deque(maxlen=3)  # how long the last such steps took here
        self.free_at = 0.0  # when the last byte of all calls so far has left; time.monotonic()
        self.pending = []  # calls that have no delivery time yet
        self.spans = deque(maxlen=100_000)
        self.lock = threading.Lock()

    def connect(self, text: str, stretch: float = 1.0) -> None:
        """Be as slow as a text like 1gbit,1ms says, in time that is stretched so many times."""
        self.text, self.network = text, read_network(text)
        self.stretch, self.pace = stretch, 0.0
        self.last_steps.clear()

    def keep_pace(self, seconds: float) -> None:
        """Follow this machine's speed, after a step without communication that took so long here.

        From now on the median of the last three counts as `pace` seconds. All ranks agree on it, so
        all must call this, outside of `with wire:`.
        """
        sum_of_ranks = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(sum_of_ranks)
        self.last_steps.append(sum_of_ranks.item() / dist.get_world_size())
        self.stretch = median(self.last_steps) / self.pace

    def begin(self, floor, pace: float) -> None:
        """Let a step that sends nothing count as `pace` seconds; with 0 the stretch stays.

        None: there is no such step. A few of them tell this machine's speed. All ranks must call.
        """
        self.pace = pace if floor else 0.0
        for _ in range(4 if self.pace else 0):
            dist.barrier()
            self.keep_pace(floor()["step_seconds"] * self.stretch)
        self.drift = self.stretch, self.stretch
        if floor:
            counts = f"a step without communication counts as {pace:g} s" if pace else "no pace"
            say(f"One pace: {counts}; a second of the network takes {self.stretch:.2f} s here")

    def note(self, times: dict | None) -> dict | None:
        """Add to a step's times what it met: its collectives, and the stretch.

        A step without collectives tells how fast this machine is now.
        """
        if times is None:
            return None
        low, high = self.drift
        self.drift = min(low, self.stretch), max(high, self.stretch)
        collectives = dist.group.WORLD.collectives - self.collectives
        noted = times | {"collectives": collectives, "stretch": self.stretch}
        if self.pace and not collectives:
            self.keep_pace(times["step_seconds"] * self.stretch)
        return noted

    def end(self) -> None:
        """Warn if the machine's speed has changed by too much since begin()."""
        low, high = self.drift
        if high > MOST_DRIFT * low:
            seconds = f"a second of the network took {low:.2f} to {high:.2f} s here"
            say(f"warning: {seconds}: leave the machine alone, and run again")

    def __enter__(self):
        self.is_slow = True
        self.collectives = getattr(dist.group.WORLD, "collectives", 0)  # until now

    def __exit__(self, *error):
        self.is_slow = False

    def cost(self, name: str, size_bytes: int, world_size: int) -> tuple[float, float]:
        """Return the seconds here for which a call takes the wire, and those of its delays."""
        steps, share = COSTS[name]
        others = world_size - 1
        transfer = share * others / world_size * size_bytes / self.network.rate
        delays = DELAYS_PER_STEP * steps * others * self.network.delay
        return transfer * self.stretch, delays * self.stretch

    def deliver(self) -> None:
        """Find out when calls are delivered that all ranks have launched, in order of launch."""
        with self.lock:
            launched = [call for call in self.pending if call.launch_times.is_completed()]
            for call in sorted(launched, key=lambda call: call.last_launch.item()):
                self.pending.remove(call)
                places = call.group.places
                begin = max(call.last_launch.item(), places.popleft(), self.free_at)
                self.free_at = begin + call.transfer
                call.delivered_at = self.free_at + call.delays
                places.append(call.delivered_at)
                moments = call.launched_at, begin, call.delivered_at
                self.spans.append(Span(call.name, call.size_bytes, *moments))


wire = Wire()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


class DelayedWork(dist.Work):
    """A call of gloo's whose result comes later; a subclass says in wait() when."""

    def get_future(self) -> torch.futures.Future:
        """Return a future for DDP and its hooks, which a thread completes: a hook may wait."""
        future = torch.futures.Future()

        def complete():
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self.tensors)

        threading.Thread(target=complete, daemon=True).start()
        return future


class ProcessGroupOverGloo(dist.ProcessGroup):
    """A backend whose calls gloo makes; a subclass says in launch() what becomes of them."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        super().__init__(rank, world_size)
        self.gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)  # for what torch's C++ does without asking this class
        self._register_backend(torch.device("cpu"), kind, self.gloo)
        self.collectives = 0  # so many were launched; torch's tools see none of them
        dist.get_backend = get_backend  # new_group() asks torch's own, and so keeps its backend

    @torch._disable_dynamo  # torch.compile must not look into a group that torch calls meanwhile
    def call(self, name: str, *arguments, **options) -> dist.Work:
        """Launch a collective, or a call of another kind, by gloo's name of it."""
        self.collectives += name not in ("send", "recv", "recv_anysource")
        return self.launch(name, *arguments, **options)


# (The methods of ProcessGroup would find gloo, too, but keep Python's lock while they wait for its
# threads: a deadlock.)
for method in (*COSTS, *AS_GLOO):
    setattr(ProcessGroupOverGloo, method, partialmethod(ProcessGroupOverGloo.call, method))


def tensors_in(argument) -> list[torch.Tensor]:
    """Return all, however they are nested; none in the options of a call."""
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]


torchs_get_backend = dist.get_backend
OVER_GLOO = set()  # names of backends


def get_backend(group: dist.ProcessGroup | None = None) -> str:
    """Return torch's answer, but "gloo" for a backend over gloo: classes ask for it by its name."""
    name = torchs_get_backend(group)
    return "gloo" if name in OVER_GLOO else name


def register_over_gloo(name: str, group_class: type) -> None:
    """Register a backend for init_process_group() and new_group()."""
    dist.Backend.register_backend(name, group_class, devices=["cpu"])
    OVER_GLOO.add(name)


class SlowWork(DelayedWork):
    """A collective on its way: gloo may have its result already, and the network not yet."""

    def __init__(self, group, name: str, tensors: list, gloos_work: dist.Work, size_bytes: int):
        super().__init__()
        self.group = group
        self.number = group.collectives
        self.name = name
        self.tensors = tensors
        self.gloos_work = gloos_work
        self.size_bytes = size_bytes
        self.transfer, self.delays = wire.cost(name, size_bytes, group.size())
        self.delivered_at = None
        # The network can move data only when the last rank has launched. All clocks are one here.
        self.launched_at = time.monotonic()
        self.last_launch = torch.tensor(self.launched_at, dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.launch_times = group.control.allreduce([self.last_launch], options)
        wire.pending.append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Sleep until the network has delivered the result; raise what gloo raises."""
        self.gloos_work.wait(timeout)
        for call in self.pending_calls():
            call.launch_times.wait()
        wire.deliver()
        time.sleep(max(0.0, self.delivered_at - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        if all(call.launch_times.is_completed() for call in self.pending_calls()):
            wire.deliver()
        is_here = self.delivered_at is not None and self.delivered_at <= time.monotonic()
        return is_here and self.gloos_work.is_completed()

    def pending_calls(self) -> list:
        """Those of its group that have no delivery time yet, up to this one."""
        of_group = [call for call in list(wire.pending) if call.group is self.group]
        return [call for call in of_group if call.number <= self.number]


class SlowProcessGroup(ProcessGroupOverGloo):
    """gloo's collectives, delivered when the wire of this rank would have; for ranks of one host.

    A second group of gloo carries the launch times. What has no row in COSTS is gloo's own.
    """

    wire = wire  # by which common/setup.py finds it

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        member = rank, world_size, timeout
        super().__init__(dist.PrefixStore("data", store), *member)
        self.control = dist.ProcessGroupGloo(dist.PrefixStore("launch times", store), *member)
        self.places = deque([0.0] * wire.network.calls_at_once)  # when each of them is free

    def launch(self, name: str, *arguments, **options) -> dist.Work:
        """Make a call of gloo's, which takes its time while the wire is slow."""
        work = getattr(self.gloo, name)(*arguments, **options)
        if not wire.is_slow or name not in COSTS or self.size() == 1:
            return work
        outputs, inputs = map(tensors_in, arguments[:2])
        size_bytes = max(sum(tensor.nbytes for tensor in each) for each in (outputs, inputs))
        return SlowWork(self, name, outputs, work, size_bytes)


register_over_gloo("slow_network", SlowProcessGroup)
