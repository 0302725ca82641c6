"""A network as slow as you like, on any machine: a backend of your own for torch.distributed.

The ranks of one machine send through its memory, so communication looks cheap. This backend hands
every call to gloo, and its result out when a network of the given rate and delay would have
delivered it. Until then the caller computes on, or sleeps in wait(). torch's own DDP runs over it.

    with network.emulated("1gbit,1ms") as wire:      # on every rank: rate, and delay of one way
        dist.init_process_group("gloo")              # this group and all that follow are slow
        ...

over.py does that for any script, which need not know. A group has one call under way at a time, as
NCCL has one stream; a third field of 2 makes that two, as gloo has two threads ("1gbit,1ms,2").

The network's time can be stretched: with a stretch of 3 rate and delay are three times slower, and
who divides what a step took by 3 finds the proportions of machines that compute three times as
fast (time-dilated network emulation: Gupta et al., NSDI 2006). A step can set the pace.

Source: torch.distributed, Backend.register_backend; how gloo sends was measured between hosts.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "ms": 1e-3, "us": 1e-6}
DELAYS_PER_MESSAGE = 2  # gloo's receiver says first that it is ready; then the data comes
LEAST_STRETCH = 0.5  # below it the 0.3 ms that Python takes for a call would count as much more


class NotEmulated(RuntimeError):
    """What an emulated network cannot carry."""


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
    """A call that the wire has carried; its moments are seconds of time.monotonic()."""

    name: str
    size_bytes: int
    launched: float
    begins: float
    delivered: float


class Cost(NamedTuple):
    """What a rank of n does in a call of gloo: rounds of messages, one round after another, and
    share · (n−1)/n of the tensor. A ring has n−1 times as many rounds."""

    rounds: int
    share: int
    is_ring: bool = True


ALL_REDUCE = Cost(rounds=2, share=2)
ALL_GATHER = Cost(rounds=1, share=1)
ONE_ROUND = Cost(rounds=1, share=1, is_ring=False)
COSTS = {
    "allreduce": ALL_REDUCE,
    "allreduce_coalesced": ALL_REDUCE,
    "reduce": ALL_REDUCE,
    "reduce_scatter": ALL_REDUCE,  # gloo's is an all-reduce
    "_reduce_scatter_base": ALL_REDUCE,
    "reduce_scatter_single": ALL_REDUCE,
    "reduce_scatter_single_coalesced": ALL_REDUCE,
    "allgather": ALL_GATHER,
    "allgather_coalesced": ALL_GATHER,
    "_allgather_base": ALL_GATHER,
    "all_gather_single": ALL_GATHER,
    "all_gather_single_coalesced": ALL_GATHER,
    "alltoall": ALL_GATHER,
    "alltoall_base": ALL_GATHER,
    "all_to_all_single": ALL_GATHER,
    "broadcast": Cost(rounds=1, share=2),
    "gather": ONE_ROUND,
    "gather_single": ONE_ROUND,
    "gather_into_tensor": ONE_ROUND,
    "scatter": ONE_ROUND,
    "barrier": ONE_ROUND,
    "send": ONE_ROUND,
    "recv": ONE_ROUND,
}


class Wire:
    """What this rank sends through, one for all of its groups. It sends one call after another."""

    def __init__(self):
        self.is_slow = False  # True within `with wire:`
        self.text, self.network = None, None  # later: 1gbit,1ms and the Network
        self.stretch = 1.0  # seconds here for each of the network's
        self.free_at = 0.0  # when the last byte of all calls so far has left; time.monotonic()
        self.pending = []  # calls that have no delivery time yet
        self.spans = deque(maxlen=100_000)
        self.lock = threading.Lock()

    def connect(self, text: str, stretch: float = 1.0) -> None:
        """Be as slow as a text like 1gbit,1ms says, in time that is stretched so many times."""
        self.text, self.network = text, read_network(text)
        self.stretch = stretch

    def __enter__(self):
        self.is_slow = True

    def __exit__(self, *error):
        self.is_slow = False

    def paced(self, floor: Callable[[], dict], pace: float) -> Callable[[], dict]:
        """Return a step that sends nothing, and after which the network follows this machine.

        It is stretched so that the median of the last three such steps counts as `pace` seconds.
        All ranks agree, so all must call both.
        """
        last = deque(maxlen=3)

        def step() -> dict:
            times = floor()
            sum_of_ranks = torch.tensor([times["step_seconds"] * self.stretch])
            self.is_slow = False  # the step is over
            dist.all_reduce(sum_of_ranks)
            last.append(sum_of_ranks.item() / dist.get_world_size())
            self.stretch = max(LEAST_STRETCH, median(last) / pace)
            return times

        for _ in range(4):
            dist.barrier()
            step()
        counts = f"a step that sends nothing counts as {median(last) / self.stretch:.2g} s"
        say(f"One pace: {counts}; a second of the network takes {self.stretch:.2f} s here")
        return step

    # The calls

    def cost(self, name: str, size_bytes: int, world_size: int) -> tuple[float, float]:
        """Return the seconds here for which a call takes the wire, and those of its delays."""
        cost, others = COSTS[name], world_size - 1
        share = cost.share * others / world_size
        if name in ("send", "recv"):
            share = 1
        rounds = cost.rounds * (others if cost.is_ring else 1)
        transfer = share * size_bytes / self.network.rate
        delays = DELAYS_PER_MESSAGE * rounds * self.network.delay
        return transfer * self.stretch, delays * self.stretch

    def deliver(self) -> None:
        """Find out when calls are delivered that all ranks have launched, in order of launch."""
        with self.lock:
            launched = [call for call in self.pending if call.is_launched()]
            for call in sorted(launched, key=SlowWork.last_launch):
                self.pending.remove(call)
                begins = call.last_launch()
                if call.name != "recv":  # it takes the sender's wire
                    begins = max(begins, self.free_at, call.place_is_free_at())
                    self.free_at = begins + call.transfer
                call.delivered_at = begins + call.transfer + call.delays
                if not call.peer_only:
                    call.group.take_place(begins, call)
                moments = call.launched_at, begins, call.delivered_at
                self.spans.append(Span(call.name, call.size_bytes, *moments))


wire = Wire()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


COMPLETING = deque(maxlen=100)  # threads; Python is aborted if it ends while one calls torch's C++


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

        thread = threading.Thread(target=complete, daemon=True)
        COMPLETING.append(thread)
        thread.start()
        return future


class ProcessGroupOverGloo(dist.ProcessGroup):
    """A backend whose calls gloo makes; a subclass says in launch() what becomes of them.

    (The methods of ProcessGroup would find gloo, too, but keep Python's lock while they wait for
    its threads: a deadlock.)
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        super().__init__(rank, world_size)
        self.gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)  # for what torch's C++ does without asking this class
        self._register_backend(torch.device("cpu"), kind, self.gloo)
        self.collectives = 0  # so many were launched; torch's tools see none of them

    @torch._disable_dynamo  # torch.compile must not look into a group that torch calls meanwhile
    def call(self, name: str, *arguments, **options) -> dist.Work:
        """Launch a call by gloo's name of it."""
        self.collectives += name not in ("send", "recv", "recv_anysource")
        return self.launch(name, *arguments, **options)

    def call_each(self, name: str, outputs: list, inputs: list, *options) -> dist.Work:
        """Make a call for each tensor, as torch's C++ asks for a DTensor; return the last."""
        pairs = zip(outputs, inputs, strict=True)
        *others, last = [self.call(name, *pair, *options) for pair in pairs]
        for work in others:
            work.wait()
        return last

    def allreduce(self, *arguments):
        return self.call("allreduce", *arguments)

    def allreduce_coalesced(self, *arguments):
        return self.call("allreduce_coalesced", *arguments)

    def reduce(self, *arguments):
        return self.call("reduce", *arguments)

    def reduce_scatter(self, *arguments):
        return self.call("reduce_scatter", *arguments)

    def reduce_scatter_single(self, *arguments):
        return self.call("reduce_scatter_single", *arguments)

    def reduce_scatter_single_coalesced(self, *arguments):
        return self.call("reduce_scatter_single_coalesced", *arguments)

    def _reduce_scatter_base(self, *arguments):
        return self.call("_reduce_scatter_base", *arguments)

    def reduce_scatter_tensor_coalesced(self, *arguments):
        return self.call_each("_reduce_scatter_base", *arguments)

    def allgather(self, *arguments):
        return self.call("allgather", *arguments)

    def allgather_coalesced(self, *arguments):
        return self.call("allgather_coalesced", *arguments)

    def all_gather_single(self, *arguments):
        return self.call("all_gather_single", *arguments)

    def all_gather_single_coalesced(self, *arguments):
        return self.call("all_gather_single_coalesced", *arguments)

    def _allgather_base(self, *arguments):
        return self.call("_allgather_base", *arguments)

    def allgather_into_tensor_coalesced(self, *arguments):
        return self.call_each("_allgather_base", *arguments)

    def alltoall(self, *arguments):
        return self.call("alltoall", *arguments)

    def alltoall_base(self, *arguments):
        return self.call("alltoall_base", *arguments)

    def all_to_all_single(self, *arguments):
        return self.call("all_to_all_single", *arguments)

    def broadcast(self, *arguments):
        return self.call("broadcast", *arguments)

    def gather(self, *arguments):
        return self.call("gather", *arguments)

    def gather_single(self, *arguments):
        return self.call("gather_single", *arguments)

    def gather_into_tensor(self, *arguments):
        return self.call("gather_into_tensor", *arguments)

    def scatter(self, *arguments):
        return self.call("scatter", *arguments)

    def send(self, *arguments):
        return self.call("send", *arguments)

    def recv(self, *arguments):
        return self.call("recv", *arguments)

    def recv_anysource(self, *arguments):
        return self.call("recv_anysource", *arguments)

    def barrier(self, *arguments, **options):
        return self.call("barrier", *arguments, **options)

    def monitored_barrier(self, *arguments, **options):
        return self.gloo.monitored_barrier(*arguments, **options)  # it looks for a missing rank


# torch's C++ calls these also from within a compiled model, where torch.compile must not look in.
for method in [name for name in vars(ProcessGroupOverGloo) if not name.startswith("__")]:
    disabled = torch._disable_dynamo(getattr(ProcessGroupOverGloo, method))
    setattr(ProcessGroupOverGloo, method, disabled)


def tensors_in(argument) -> list[torch.Tensor]:
    """Return all, however they are nested; none in the options of a call."""
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]


@contextmanager
def gloo_carried_by(name: str, group_class: type):
    """Let a class make every group over gloo within this context; scripts still read "gloo".

    torch looks up by one map which backend a device has, for groups of every kind: with a backend
    or without, subgroups, those of a device mesh. No public function reaches all of them, so the
    map is replaced. NotEmulated for a group over NCCL.
    """
    torchs_map = getattr(distributed_c10d.BackendConfig, "get_device_backend_map", None)
    if torchs_map is None:
        raise NotEmulated("this torch has no BackendConfig.get_device_backend_map: try torch 2.14")
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, group_class, devices=["cpu"])

    def get_device_backend_map(config) -> dict[str, str]:
        backends = torchs_map(config)
        if "nccl" in backends.values() and "gloo" not in backends.values():
            raise NotEmulated("an emulated network carries gloo's calls and not NCCL's: use gloo")
        return {device: name if of == "gloo" else of for device, of in backends.items()}

    distributed_c10d.BackendConfig.get_device_backend_map = get_device_backend_map
    try:
        yield
    finally:
        distributed_c10d.BackendConfig.get_device_backend_map = torchs_map
        for thread in COMPLETING:
            thread.join(timeout=0.1)  # longer only if it waits for a rank that is gone


@contextmanager
def emulated(text: str, stretch: float = 1.0):
    """Within this context all groups over gloo are slow while the wire is, which is yielded."""
    wire.connect(text, stretch)
    with gloo_carried_by("slow_network", SlowProcessGroup):
        yield wire


class SlowWork(DelayedWork):
    """A call on its way: gloo may have its result already, and the network not yet.

    The network can move data only when the last rank has launched, so ranks tell each other when
    they did. All clocks are one here.
    """

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
        self.launched_at = time.monotonic()
        self.peer_only = name in ("send", "recv")
        self.launches = [torch.tensor(self.launched_at, dtype=torch.float64)]

    def tell_all(self) -> None:
        """Let the latest launch of all ranks take the place of this one's."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.telling = [self.group.control.allreduce(self.launches, options)]
        wire.pending.append(self)

    def tell_peer(self, peer: int, tag: int) -> None:
        """Exchange launches with one rank; the tags keep both directions apart."""
        theirs = torch.zeros(1, dtype=torch.float64)
        to_peer, from_peer = (2 * tag, 2 * tag + 1)[:: 1 if self.name == "send" else -1]
        sent = self.group.control.send([self.launches[0].clone().reshape(1)], peer, to_peer)
        self.telling = [sent, self.group.control.recv([theirs], peer, from_peer)]
        self.launches.append(theirs)
        wire.pending.append(self)

    def is_launched(self) -> bool:
        return all(work.is_completed() for work in self.telling)

    def last_launch(self) -> float:
        return max(launch.item() for launch in self.launches)

    def place_is_free_at(self) -> float:
        """Return when one of the group's places for calls is free; a message needs none."""
        if self.peer_only:
            return 0.0
        first = min(self.group.places)
        self.group.places.remove(first)
        return first

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Sleep until the network has delivered the result; raise what gloo raises."""
        self.gloos_work.wait(timeout)
        for call in self.calls_before():
            for work in call.telling:
                work.wait()
        wire.deliver()
        time.sleep(max(0.0, self.delivered_at - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        if all(call.is_launched() for call in self.calls_before()):
            wire.deliver()
        is_here = self.delivered_at is not None and self.delivered_at <= time.monotonic()
        return is_here and self.gloos_work.is_completed()

    def calls_before(self) -> list:
        """Return the collectives of its group that have no delivery time yet, up to this one."""
        if self.peer_only:
            return [self]
        of_group = [call for call in list(wire.pending) if call.group is self.group]
        return [call for call in of_group if not call.peer_only and call.number <= self.number]


class SlowProcessGroup(ProcessGroupOverGloo):
    """gloo's calls, delivered when the wire of this rank would have; for ranks of one host.

    A second group of gloo carries the times of launch.
    """

    network = wire  # by which common/setup.py finds it

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        member = rank, world_size, timeout
        super().__init__(dist.PrefixStore("data", store), *member)
        self.control = dist.ProcessGroupGloo(dist.PrefixStore("launch times", store), *member)
        self.places = [0.0] * wire.network.calls_at_once  # when each of them is free

    def take_place(self, begins: float, call: SlowWork) -> None:
        """Keep one of the places until a call is delivered, and the other for its bytes longer.

        What is under way in the other place sends its messages behind these bytes: over TCP two
        calls at once take their delays together, but each waits for the bytes of both.
        """
        for number, free_at in enumerate(self.places):
            if free_at > begins:
                self.places[number] = free_at + call.transfer
        self.places.append(call.delivered_at)

    def launch(self, name: str, *arguments, **options) -> dist.Work:
        """Make a call of gloo's, which takes its time while the wire is slow."""
        if wire.is_slow and name == "recv_anysource":
            raise NotEmulated("an emulated network does not carry recv without a source: name it")
        work = getattr(self.gloo, name)(*arguments, **options)
        if not wire.is_slow or self.size() == 1:
            return work
        outputs, inputs = [tensors_in(argument) for argument in (*arguments, (), ())[:2]]
        size_bytes = max(sum(tensor.nbytes for tensor in each) for each in (outputs, inputs))
        slow = SlowWork(self, name, outputs, work, size_bytes)
        if slow.peer_only:
            slow.tell_peer(*arguments[1:])
        else:
            slow.tell_all()
        return slow
