r"""01: a network as slow as you like, on any machine: a backend of your own for torch.distributed.

The ranks of one machine send through its memory, so communication looks cheap. This backend hands
every collective to gloo, and its result out when a network of the given rate and delay would have
delivered it. Until then the caller computes on, or sleeps in wait(). torch's own DDP runs over it.

    import slow_network
    slow_network.wire.connect("1gbit,1ms")             # on every rank: rate, delay of one way
    dist.init_process_group("slow_network")            # or dist.new_group(backend="slow_network")

    make 01_allreduce/slow_network NPROC=2             (is an all-reduce as slow as was asked for?)
    make 05_bucketed NETWORK=1gbit,1ms                 (any stage on such a network)
    torchrun --standalone --nproc-per-node 2 01_allreduce/slow_network/slow_network.py

Source: torch.distributed, Backend.register_backend; how gloo sends was measured between hosts.
"""

import random
import re
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path

import torch
import torch.distributed as dist

UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "s": 1.0, "ms": 1e-3, "us": 1e-6, "0": 0.0}
SLOW = ("all", "broadcast", "reduce_scatter")  # all-reduce, all-gather, all-to-all
CALLS_AT_A_TIME = 2  # of a group: gloo has two threads
LONGEST_DELAY = 0.002  # seconds of a LateWork; each rank and call has its own, from 0 on
DELAYS_PER_STEP = 2  # gloo's receiver says first that it is ready; then the data comes


def read_network(text: str) -> tuple[float, float]:
    """1gbit,1ms: bytes per second and seconds. ValueError for what is no rate and delay."""
    numbers = re.fullmatch(r"(\d*\.?\d+)(mbit|gbit),(?:(\d*\.?\d+)(s|ms|us)|0)", text)
    if numbers:
        rate, rate_unit, delay, delay_unit = numbers.groups(default="0")
        rate, delay = float(rate) * UNITS[rate_unit], float(delay) * UNITS[delay_unit]
        if 0.1e6 <= rate <= 1e12 and delay <= 10:
            return rate, delay
    raise ValueError(f"{text!r} is not a rate and a delay, such as 1gbit,1ms or 100mbit,0")


class Wire:
    """What this rank sends through, one for all of its groups. It sends one call after another."""

    def __init__(self):
        self.is_slow = False  # as fast as gloo until connect()
        self.is_late = False  # True: every call is a LateWork, as `make check` wants it
        self.rate = self.delay = 0.0  # bytes per second, and seconds for one way
        self.free_at = 0.0  # when the last byte of all calls so far has left; time.monotonic()
        self.pending = []  # calls that have no delivery time yet
        self.spans = deque(maxlen=100_000)  # (name, bytes, launched, on the wire from, delivered)
        self.lock = threading.Lock()

    def connect(self, text: str) -> None:
        """Be as slow as a text like 1gbit,1ms says; on all ranks at the same place of a program."""
        self.rate, self.delay = read_network(text)
        self.is_slow = True

    def deliver(self) -> None:
        """Find out when calls are delivered that all ranks have launched, in order of launch."""
        with self.lock:
            launched = [call for call in self.pending if call.launch_times.is_completed()]
            for call in sorted(launched, key=lambda call: call.last_launch.item()):
                self.pending.remove(call)
                places = call.group.places
                begin = max(call.last_launch.item(), places.popleft())
                begin = max(begin, self.free_at)
                self.free_at = begin + call.bytes_sent / self.rate
                call.delivered_at = self.free_at + call.delays * self.delay
                places.append(call.delivered_at)
                span = call.name, call.bytes_sent, call.launched_at, begin, call.delivered_at
                self.spans.append(span)


wire = Wire()


class SlowWork(dist.Work):
    """A collective on its way: gloo may have its result already, and the network not yet."""

    def __init__(self, group, name: str, tensors, gloos_work: dist.Work, bytes_sent, delays):
        super().__init__()
        self.group = group
        self.number = group.collectives
        self.name = name
        self.tensors = tensors
        self.gloos_work = gloos_work
        self.bytes_sent = bytes_sent
        self.delays = delays
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
        sleep_until(self.delivered_at)
        return True

    def is_completed(self) -> bool:
        if not self.gloos_work.is_completed():
            return False
        if all(call.launch_times.is_completed() for call in self.pending_calls()):
            wire.deliver()
        return self.delivered_at is not None and self.delivered_at <= time.monotonic()

    def pending_calls(self) -> list:
        """Those of its group that have no delivery time yet, up to this one."""
        of_group = [call for call in list(wire.pending) if call.group is self.group]
        return [call for call in of_group if call.number <= self.number]

    def get_future(self) -> torch.futures.Future:
        """For DDP and its hooks. A thread of its own completes it: a hook may wait for more."""
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


class LateWork(SlowWork):
    """A collective that a program sees only if it waits for it: how a CPU shows what GPUs hide.

    gloo works on private copies. Until wait(), or a future, delivers, the outputs hold NaN
    (integers: their largest value). RuntimeError for a tensor that was written to meanwhile.
    """

    def __init__(self, group, name: str, arguments, options):
        dist.Work.__init__(self)
        given = [tensors_in(argument) for argument in arguments[:2]]
        root = getattr(arguments[-1], "rootRank", None)  # of broadcast, reduce, scatter, gather
        is_root = root == group.rank()
        if (
            name == "send"
            or (name == "broadcast" and is_root)
            or (name == "reduce" and not is_root)
        ):
            given = [[], given[0]]  # it is only read
        outputs, inputs = given
        copies = {id(tensor): copy_of(tensor) for tensor in outputs + inputs}
        of_copies = [with_copies(argument, copies) for argument in arguments]
        self.gloos_work = getattr(group.gloo, name)(*of_copies, **options)
        self.tensors = tensors_in(arguments[0])
        self.results = [(tensor, copies[id(tensor)]) for tensor in outputs]
        for tensor in outputs:
            if copies[id(tensor)] is not tensor:
                tensor.data.fill_(unread_value(tensor))  # .data: autograd's version stays
        in_flight = [each for each in outputs + inputs if copies[id(each)] is not each]
        self.in_flight = [(each, each.detach().clone(), each._version) for each in in_flight]
        self.launched_at = time.monotonic()
        self.delivered_at = self.launched_at + LONGEST_DELAY * group.delays.random()
        self.delivery = threading.Lock()  # a future may deliver while somebody waits

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.gloos_work.wait(timeout)
        sleep_until(self.delivered_at)
        with self.delivery:
            in_flight, self.in_flight = self.in_flight, []
            written = [each for each in in_flight if was_written(*each)]
            for tensor, result in self.results:
                tensor.data.copy_(result)
            self.results = []
        if written:
            shape = tuple(written[0][0].shape)
            raise RuntimeError(
                f"a tensor {shape} was written to while its collective was under way"
            )
        return True

    def is_completed(self) -> bool:
        """Who asks until it is True need not wait."""
        is_here = self.gloos_work.is_completed() and time.monotonic() >= self.delivered_at
        return is_here and self.wait()


class SlowProcessGroup(dist.ProcessGroup):
    """gloo's collectives, delivered when the wire of this rank would have; for ranks of one host.

    A second group of gloo carries the launch times. Barriers, send, receive, reduce, gather
    and scatter are gloo's own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        super().__init__(rank, world_size)
        member = rank, world_size, timeout
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("data", store), *member)
        self.control = dist.ProcessGroupGloo(dist.PrefixStore("launch times", store), *member)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)  # for what torch's C++ does without asking this class
        self._register_backend(torch.device("cpu"), kind, self.gloo)
        self.places = deque([0.0] * CALLS_AT_A_TIME)  # when each of them is free
        self.collectives = 0  # so many were launched; torch's tools see none of them
        self.delays = random.Random(rank)  # of the calls that are late

    @torch._disable_dynamo  # torch.compile must not look into a group that torch calls meanwhile
    def launch(self, name: str, *arguments, **options) -> dist.Work:
        """A call: gloo's, or one that takes its time.

        A rank sends what it sends in gloo's rings, 1/n of the tensor in each step; gloo's
        reduce-scatter is an all-reduce.
        """
        if not name.startswith(("send", "recv")):
            self.collectives += 1
        if wire.is_late and "barrier" not in name and name != "recv_anysource":
            return LateWork(self, name, arguments, options)
        work = getattr(self.gloo, name)(*arguments, **options)
        if not wire.is_slow or not name.removeprefix("_").startswith(SLOW):
            return work
        outputs, inputs = map(tensors_in, arguments[:2])
        size = max(sum(tensor.nbytes for tensor in each) for each in (outputs, inputs))
        others = self.size() - 1
        steps, sent = others, size * others / self.size()  # all-gather
        if "reduce" in name:
            steps, sent = 2 * steps, 2 * sent
        elif name == "broadcast" and others:
            steps, sent = 1, size
        return SlowWork(self, name, outputs, work, sent, DELAYS_PER_STEP * steps)

    def launch_each(self, name: str, outputs: list, inputs: list, *options) -> dist.Work:
        """What torch's C++ asks for a DTensor, nearly always of one tensor; returns the last."""
        pairs = zip(outputs, inputs, strict=True)
        *others, last = [self.launch(name, *pair, *options) for pair in pairs]
        for work in others:
            work.wait()
        return last


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def tensors_in(argument) -> list[torch.Tensor]:
    """A tensor, or all in a list or a list of lists; none in what else a call is given."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return sum(map(tensors_in, argument), []) if isinstance(argument, list | tuple) else []


def with_copies(argument, copies: dict):
    """The same, with the copy of each tensor in its place."""
    if isinstance(argument, torch.Tensor):
        return copies[id(argument)]
    is_list = isinstance(argument, list | tuple)
    return [with_copies(each, copies) for each in argument] if is_list else argument


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides; where that cannot be, the tensor itself, as gloo may refuse it."""
    copy = tensor.detach().clone()
    return copy if copy.stride() == tensor.stride() else tensor


def unread_value(tensor: torch.Tensor) -> float:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.nan
    return True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max


def was_written(tensor: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Since then. A NaN that is divided stays one; but for a part of a buffer versions say little,
    because they count what is written to any part."""
    is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    same = torch.equal(tensor.flatten().view(torch.uint8), before.flatten().view(torch.uint8))
    return not same or (is_whole and tensor._version != version)


# Every call of gloo, whatever this version of torch names it. (The methods of ProcessGroup would
# find gloo, too, but keep Python's lock while they wait for its threads: a deadlock.)
CALLS = (*SLOW, "barrier", "gather", "monitored", "recv", "reduce", "scatter", "send")
for method in set(dir(dist.ProcessGroup)) & set(dir(dist.ProcessGroupGloo)):
    if method.removeprefix("_").startswith(CALLS):
        setattr(SlowProcessGroup, method, partialmethod(SlowProcessGroup.launch, method))
# Gloo has these in C++ alone.
SlowProcessGroup.allgather_into_tensor_coalesced = partialmethod(
    SlowProcessGroup.launch_each, "_allgather_base"
)
SlowProcessGroup.reduce_scatter_tensor_coalesced = partialmethod(
    SlowProcessGroup.launch_each, "_reduce_scatter_base"
)

dist.Backend.register_backend("slow_network", SlowProcessGroup, devices=["cpu"])

# ==================================================================================================
# Below this line: is an all-reduce as slow as was asked for? The measurement, main.


def expected_seconds(size_bytes: float, calls: int, world_size: int) -> float:
    """Of all-reduces that are launched together: their bytes one after another on the wire, then
    the delays of the last; or the delays of all, two calls at a time, if these take longer."""
    steps = 2 * (world_size - 1)
    bytes_sent = steps / world_size * size_bytes / wire.rate
    delays = DELAYS_PER_STEP * steps * wire.delay
    turns = -(-calls // CALLS_AT_A_TIME)
    return max(calls * bytes_sent + delays, turns * (bytes_sent + delays))


def all_reduce_together(tensors: list[torch.Tensor]) -> dict[str, float]:
    """Launch all, then wait for all: the seconds, and how many elements are wrong."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for tensor in tensors:
        tensor.fill_(rank + 1)
    dist.barrier()
    start = time.perf_counter()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    seconds = time.perf_counter() - start
    total = world_size * (world_size + 1) / 2
    return {"seconds": seconds, "wrong": (torch.cat(tensors) != total).sum().item()}


def measure(megabytes: float, calls: int) -> dict:
    """Time all-reduces of a size, so many at a time: a row of the table."""
    from common import timing

    tensors = [torch.empty(int(megabytes * 2**18)) for _ in range(calls)]
    candidates = {"calls": partial(all_reduce_together, tensors)}
    samples = timing.measure(candidates, steps=5, warmup=1)["calls"]
    return {
        "size_mb": megabytes,
        "calls": calls,
        "seconds": samples["seconds"],
        "expected_seconds": expected_seconds(megabytes * 2**20, calls, dist.get_world_size()),
        "wrong": sum(map(sum, samples["wrong"])),
    }


def main():
    folder = Path(__file__).resolve().parent
    sys.path.insert(0, str(folder.parent.parent))
    sys.modules["slow_network"] = sys.modules[__name__]  # common is to use this wire
    try:
        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ two folders above this one")

    parser = setup.Parser(__doc__)
    json_help = "everything measured, raw"
    parser.add_argument("--json", type=setup.output_file, metavar="FILE", help=json_help)
    setup.add_process_group_arguments(parser)
    parser.set_defaults(network="1gbit,1ms", device="cpu")
    args = parser.parse_args()
    with setup.process_group(args) as device:
        result = report.begin("01_allreduce/slow_network", args, device)
        cases = [(0.001, 1), (0.001, 2), (0.001, 20), (1, 1), (1, 2), (10, 1), (10, 2)]
        result["rows"] = [measure(megabytes, calls) for megabytes, calls in cases]
        table = []
        for row in result["rows"]:
            p50 = report.percentiles(row["seconds"])[0]
            expected = row["expected_seconds"]
            cells = [f"{row['calls']} × {row['size_mb']:g} MB"]
            cells += [f"{1000 * p50:.2f}", f"{1000 * expected:.2f}", f"{p50 / expected:.3f}"]
            table.append([*cells, str(row["wrong"])])
        header = ["all-reduces", "p50, ms", "asked for, ms", "ratio", "#wrong"]
        report.print_table(header, table)
        setup.say("Launched together, waited for one after another; #wrong: elements, all calls.")
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
