r"""Run any script of torch.distributed over a network as slow as you like: it need not know.

    torchrun --standalone --nproc-per-node 2 slow_network.py 1gbit,1ms train.py [its flags]
    torchrun --standalone --nproc-per-node 2 slow_network.py 1gbit,1ms -m package.module
    python slow_network.py 1gbit,1ms train.py       # a script that starts its own ranks (mp.spawn)
    torchrun --standalone --nproc-per-node 2 slow_network.py 1gbit,1ms    # is it as slow as asked?
    torchrun --standalone --nproc-per-node 2 slow_network.py              # and what is there?
    make 02_naive_ddp NETWORK=1gbit,1ms             # a script of this repository

A network is a rate (mbit, gbit) and the delay of one way (us, ms, or 0). Every group over gloo is
slow then, however the script makes it. This file needs torch alone: copy it wherever you like.

The ranks of one machine send through its memory, so communication looks cheap. Here gloo makes
every call at once, and hands out its result when the network would have delivered it. Until then
the caller computes on, or sleeps in wait(). A group has one call under way at a time, as NCCL has
one stream.

The network's time can be stretched: with a stretch of 3 rate and delay are three times slower, and
who divides what a step took by 3 finds the proportions of machines that compute three times as
fast (time-dilated network emulation: Gupta et al., NSDI 2006). So it is where ranks share cores.

Source: torch.distributed, Backend.register_backend; how gloo sends was measured between hosts.
"""

import atexit
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "ms": 1e-3, "us": 1e-6}
DELAYS_PER_MESSAGE = 2  # gloo's receiver says first that it is ready; then the data comes
LEAST_STRETCH = 0.5  # below it the 0.3 ms that Python takes for a call would count as much more


class Speed(NamedTuple):
    """What a network carries: bytes per second, and seconds of one way."""

    rate: float
    delay: float


def read_network(text: str) -> Speed:
    """Read a text like 1gbit,1ms. ValueError for what is no rate and delay."""
    fields = re.fullmatch(r"(\d*\.?\d+)(mbit|gbit),(?:(\d*\.?\d+)(ms|us)|0)", text)
    if not fields or float(fields[1]) == 0:
        raise ValueError(f"{text!r} is no network: it takes a rate and a delay, as 1gbit,1ms")
    rate, rate_unit, delay, delay_unit = fields.groups()
    delay = float(delay) * UNITS[delay_unit] if delay else 0.0
    return Speed(float(rate) * UNITS[rate_unit], delay)


# What gloo sends in a call


class Messages(NamedTuple):
    """Rounds of messages, one after another, and which share of its tensor a rank sends in all."""

    rounds: int
    share: float


def ring_all_reduce(world_size: int) -> Messages:
    return Messages(2 * (world_size - 1), 2 * (world_size - 1) / world_size)


def ring_all_gather(world_size: int) -> Messages:
    return Messages(world_size - 1, (world_size - 1) / world_size)


def ring_broadcast(world_size: int) -> Messages:
    return Messages(world_size - 1, 2 * (world_size - 1) / world_size)


def one_round(world_size: int) -> Messages:
    return Messages(1, (world_size - 1) / world_size)


def one_message(world_size: int) -> Messages:
    return Messages(1, 1.0)


MESSAGES = {  # by gloo's names of its calls
    "allreduce": ring_all_reduce,
    "allreduce_coalesced": ring_all_reduce,
    "reduce": ring_all_reduce,
    "reduce_scatter": ring_all_reduce,  # gloo's is an all-reduce
    "_reduce_scatter_base": ring_all_reduce,
    "reduce_scatter_single": ring_all_reduce,
    "reduce_scatter_single_coalesced": ring_all_reduce,
    "allgather": ring_all_gather,
    "allgather_coalesced": ring_all_gather,
    "_allgather_base": ring_all_gather,
    "all_gather_single": ring_all_gather,
    "all_gather_single_coalesced": ring_all_gather,
    "alltoall": ring_all_gather,
    "alltoall_base": ring_all_gather,
    "all_to_all_single": ring_all_gather,
    "broadcast": ring_broadcast,
    "gather": one_round,
    "gather_single": one_round,
    "gather_into_tensor": one_round,
    "scatter": one_round,
    "barrier": one_round,
    "send": one_message,
    "recv": one_message,
}


# A backend over gloo


COMPLETING = deque(maxlen=100)  # threads that complete futures


@atexit.register
def join_completing() -> None:
    """Let threads end: Python is aborted if it ends while one of them is within torch's C++."""
    for thread in COMPLETING:
        thread.join(timeout=0.1)  # longer only if it waits for a rank that is gone


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

    # torch's C++ makes calls also within a compiled model, where torch.compile must not look in.

    @torch._disable_dynamo
    def reduce_scatter_tensor_coalesced(self, *arguments) -> dist.Work:
        return self.launch_each("_reduce_scatter_base", *arguments)

    @torch._disable_dynamo
    def allgather_into_tensor_coalesced(self, *arguments) -> dist.Work:
        return self.launch_each("_allgather_base", *arguments)

    def launch_each(self, name: str, outputs: list, inputs: list, *options) -> dist.Work:
        """Make a call for each tensor, as torch's C++ asks for a DTensor; return the last."""
        pairs = zip(outputs, inputs, strict=True)
        *others, last = [self.launch(name, *pair, *options) for pair in pairs]
        for work in others:
            work.wait()
        return last

    @torch._disable_dynamo
    def monitored_barrier(self, *arguments, **options) -> None:
        """Look for a missing rank, as gloo does."""
        self.gloo.monitored_barrier(*arguments, **options)


def launching(name: str) -> Callable[..., dist.Work]:
    """Return the method by which torch makes gloo's call of this name."""

    @torch._disable_dynamo
    def launch(group: ProcessGroupOverGloo, *arguments, **options) -> dist.Work:
        return group.launch(name, *arguments, **options)

    return launch


for name in [*MESSAGES, "recv_anysource"]:
    setattr(ProcessGroupOverGloo, name, launching(name))


def tensors_in(argument) -> list[torch.Tensor]:
    """Return all, however they are nested; none in the options of a call."""
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]


def torchs(owner, name: str) -> Callable:
    """Return a function of torch's that is replaced here; fail where it has none of this name."""
    if not hasattr(owner, name):
        fail(f"this torch has no {owner.__name__}.{name}: try torch 2.14")
    return getattr(owner, name)


def carry_gloo_by(name: str, group_class: type) -> Callable:
    """Let a class make every group over gloo from now on; scripts still read "gloo".

    torch looks up by one map which backend a device has, for groups of every kind: with a backend
    or without, subgroups, those of a device mesh. No public function reaches all of them, so the
    map is replaced. Returns torch's own.
    """
    torchs_map = torchs(distributed_c10d.BackendConfig, "get_device_backend_map")
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, group_class, devices=["cpu"])

    def get_device_backend_map(config) -> dict[str, str]:
        backends = torchs_map(config)
        if "nccl" in backends.values() and "gloo" not in backends.values():
            fail("an emulated network carries gloo's calls and not NCCL's: use gloo")
        return {device: name if of == "gloo" else of for device, of in backends.items()}

    distributed_c10d.BackendConfig.get_device_backend_map = get_device_backend_map
    return torchs_map


@contextmanager
def gloo_carried_by(name: str, group_class: type):
    """Let a class make every group over gloo within this context."""
    torchs_map = carry_gloo_by(name, group_class)
    try:
        yield
    finally:
        distributed_c10d.BackendConfig.get_device_backend_map = torchs_map


# The network


class SlowWork(DelayedWork):
    """A call on its way: gloo may have its result already, and the network not yet.

    The network can move data only when the last rank has launched, so ranks tell each other when
    they did. All clocks are one here.
    """

    def __init__(self, group, name: str, tensors: list, gloos_work: dist.Work, size_bytes: int):
        super().__init__()
        self.group = group
        self.number = network.calls
        self.name = name
        self.tensors = tensors
        self.gloos_work = gloos_work
        self.size_bytes = size_bytes
        self.transfer, self.delays = network.price(name, size_bytes, group.size())
        self.delivered_at = None
        self.launched_at = time.monotonic()
        self.is_collective = name not in ("send", "recv")
        self.launches = [torch.tensor([self.launched_at], dtype=torch.float64)]
        self.telling = []  # gloo's calls that exchange launches

    def tell_all(self) -> None:
        """Let the latest launch of all ranks take the place of this one's."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.telling = [self.group.control.allreduce(self.launches, options)]

    def tell_peer(self, peer: int, tag: int) -> None:
        """Exchange launches with one rank; the tags keep both directions apart."""
        to_peer, from_peer = 2 * tag, 2 * tag + 1
        if self.name == "recv":
            to_peer, from_peer = from_peer, to_peer
        theirs = torch.zeros(1, dtype=torch.float64)
        sending = self.group.control.send([self.launches[0].clone()], peer, to_peer)
        receiving = self.group.control.recv([theirs], peer, from_peer)
        self.telling = [sending, receiving]
        self.launches.append(theirs)

    def is_launched(self) -> bool:
        return all(work.is_completed() for work in self.telling)

    def last_launch(self) -> float:
        return max(launch.item() for launch in self.launches)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Sleep until the network has delivered the result; raise what gloo raises."""
        self.gloos_work.wait(timeout)
        for call in self.calls_before():
            for work in call.telling:
                work.wait()
        network.deliver()
        time.sleep(max(0.0, self.delivered_at - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        if all(call.is_launched() for call in self.calls_before()):
            network.deliver()
        is_here = self.delivered_at is not None and self.delivered_at <= time.monotonic()
        return is_here and self.gloos_work.is_completed()

    def calls_before(self) -> list:
        """Return the collectives of its group that have no delivery time yet, up to this one."""
        if not self.is_collective:
            return [self]
        of_group = [call for call in list(network.pending) if call.group is self.group]
        return [call for call in of_group if call.is_collective and call.number <= self.number]


class Span(NamedTuple):
    """A call that the network has carried; its moments are seconds of time.monotonic()."""

    name: str
    size_bytes: int
    launched: float
    begins: float
    delivered: float


class SlowNetwork:
    """What this rank sends through, one for all of its groups. It sends one call after another."""

    work = SlowWork  # what a call returns

    def __init__(self):
        self.text = None  # later: 1gbit,1ms
        self.speed = None  # and what that says
        self.is_slow = False  # True within `with network:`
        self.stretch_is_known = False  # `with network:` was used, or it was said
        self.calls = 0  # so many were launched, in all groups; torch's tools see none of them
        self.free_at = 0.0  # when the last byte of all calls so far has left; time.monotonic()
        self.pending = []  # calls that have no delivery time yet
        self.spans = deque(maxlen=100_000)
        self.lock = threading.Lock()
        self.set_stretch(1.0)

    def connect(self, text: str) -> None:
        """Be as slow as a text like 1gbit,1ms says, without a stretch."""
        self.text = text
        self.speed = read_network(text)
        self.set_stretch(1.0)

    def __enter__(self):
        self.is_slow = True
        self.stretch_is_known = True

    def __exit__(self, *error):
        self.is_slow = False

    # The stretch: so many seconds here are one of the network's

    def set_stretch(self, stretch: float) -> None:
        """Set the stretch, and forget how low and high it was."""
        self.stretch = stretch
        self.lowest_stretch = stretch
        self.highest_stretch = stretch

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
            self.lowest_stretch = min(self.lowest_stretch, self.stretch)
            self.highest_stretch = max(self.highest_stretch, self.stretch)
            return times

        for _ in range(4):
            dist.barrier()
            step()
        self.set_stretch(self.stretch)
        if dist.get_rank() == 0:
            counts = f"a step that sends nothing counts as {median(last) / self.stretch:.2g} s"
            print(f"One pace: {counts}; a second of the network takes {self.stretch:.2f} s here")
        return step

    def say_stretch(self, ranks: int) -> None:
        """Say once, on rank 0, by what to divide times that nobody else divides."""
        self.stretch_is_known = True
        if self.stretch > 1 and dist.get_rank() == 0:
            says = (
                f"{ranks} ranks share {cores():g} cores, so the network is {self.stretch:g} times"
            )
            divide = f"divide the times that the script prints by {self.stretch:g}"
            print(f"{says} slower: {divide}", file=sys.stderr, flush=True)

    # The calls

    def price(self, name: str, size_bytes: int, world_size: int) -> tuple[float, float]:
        """Return the seconds here that a call's bytes take, and those of its delays."""
        messages = MESSAGES[name](world_size)
        transfer = messages.share * size_bytes / self.speed.rate
        delays = DELAYS_PER_MESSAGE * messages.rounds * self.speed.delay
        return transfer * self.stretch, delays * self.stretch

    def deliver(self) -> None:
        """Find out when calls are delivered that all ranks have launched, in order of launch."""
        with self.lock:
            launched = [call for call in self.pending if call.is_launched()]
            for call in sorted(launched, key=SlowWork.last_launch):
                self.pending.remove(call)
                begins = call.last_launch()
                if call.is_collective:
                    begins = max(begins, call.group.free_at)
                if call.name != "recv":  # its bytes leave another rank
                    begins = max(begins, self.free_at)
                    self.free_at = begins + call.transfer
                call.delivered_at = begins + call.transfer + call.delays
                if call.is_collective:
                    call.group.free_at = call.delivered_at
                moments = call.launched_at, begins, call.delivered_at
                self.spans.append(Span(call.name, call.size_bytes, *moments))


network = SlowNetwork()


class SlowProcessGroup(ProcessGroupOverGloo):
    """gloo's calls, delivered when the network of this rank would have; for ranks of one host.

    A second group of gloo carries the times of launch.
    """

    network = network  # by which common/setup.py finds it

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        member = rank, world_size, timeout
        super().__init__(dist.PrefixStore("data", store), *member)
        self.control = dist.ProcessGroupGloo(dist.PrefixStore("launch times", store), *member)
        self.free_at = 0.0  # when its last collective so far is delivered; time.monotonic()
        if not dist.is_initialized():  # it is the group of all ranks
            network.set_stretch(max(1.0, world_size / cores()))

    def launch(self, name: str, *arguments, **options) -> dist.Work:
        """Make a call of gloo's, which takes its time while the network is slow."""
        if network.is_slow and name == "recv_anysource":
            fail("an emulated network does not carry recv without a source: name it")
        if network.is_slow and not network.stretch_is_known:
            network.say_stretch(dist.get_world_size())
        network.calls += 1
        work = getattr(self.gloo, name)(*arguments, **options)
        if not network.is_slow or self.size() == 1:
            return work
        tensors = [tensors_in(argument) for argument in arguments[:2]] or [[]]
        size_bytes = max(sum(tensor.nbytes for tensor in each) for each in tensors)
        slow = SlowWork(self, name, tensors[0], work, size_bytes)
        if slow.is_collective:
            slow.tell_all()
        else:
            slow.tell_peer(*arguments[1:])
        network.pending.append(slow)
        return slow


# The command


def fail(message: str):
    """Say in one line what is wrong, on rank 0 of torchrun's, and exit with status 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(10)  # a rank that ends makes torchrun end rank 0, which may not have said it yet
    sys.exit(2)


def cores() -> float:
    """Return the cores that this process may use, by its affinity and a container's quota."""
    found = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        found = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # "max" is no number: no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        found = min(found, int(quota) / int(period))
    return found


def begin(text: str, torchruns: int | None = None) -> None:
    """Let the groups that this process will make be slow.

    torchruns: the process that torchrun has started, if there is one.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is emulated are the calls of a CPU
    network.connect(text)
    network.is_slow = True  # scripts of this repository end that but where they measure
    carry_gloo_by("slow_network", SlowProcessGroup)
    torchs_rendezvous = torchs(distributed_c10d, "rendezvous")

    def rendezvous(*arguments, **options):
        """Meet the other ranks. What a rank of torchrun's has started might wait for ever."""
        if torchruns == os.getpid():  # it is a rank, and starts none
            CHILDREN.close()
        elif torchruns:
            try:
                fail("the script starts its own ranks, so start it by python and not by torchrun")
            finally:
                os.kill(torchruns, signal.SIGTERM)  # it may wait for ever, too
        return torchs_rendezvous(*arguments, **options)

    distributed_c10d.rendezvous = rendezvous


CHILDREN = ExitStack()  # closed, it leaves slow_children
SITECUSTOMIZE = """\
import sys
from importlib import machinery, util

if util.find_spec("torch") and "resource_tracker" not in sys.orig_argv[-1]:
    spec = util.spec_from_file_location("slow_network", {file!r})
    slow_network = sys.modules["slow_network"] = util.module_from_spec(spec)
    spec.loader.exec_module(slow_network)
    slow_network.begin({text!r}, {torchruns})
sys.path.remove({folder!r})
users_own = machinery.PathFinder.find_spec("sitecustomize")
if users_own:
    users_own.loader.exec_module(sys.modules["sitecustomize"])
"""


@contextmanager
def slow_children(text: str, torchruns: int | None):
    """Let every Python that this process starts within this context begin(), as this one does.

    Python imports a sitecustomize first, wherever PYTHONPATH has one. (Its helper that tracks
    resources has no use for torch.)
    """
    before = os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        values = {"file": __file__, "text": text, "torchruns": torchruns, "folder": folder}
        Path(folder, "sitecustomize.py").write_text(SITECUSTOMIZE.format(**values))
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}".rstrip(os.pathsep)
        yield
    os.environ["PYTHONPATH"] = before


def run(script: str, *flags: str) -> None:
    """Run a script, or -m and a module, as __main__ with its own arguments and search path."""
    if script == "-m":
        sys.argv = [*flags]
        sys.path[0] = os.getcwd()
        runpy.run_module(flags[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *flags]
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


SIZES = {"1 kB": 2**10, "1 MB": 2**20, "10 MB": 10 * 2**20}


def measure() -> None:
    """Print what an all-reduce takes, the median of five, and what it should on this network."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    network.is_slow = False
    if rank == 0:
        over = network.text or "the network that is there"
        print(f"torch {torch.__version__}, gloo, {world_size} ranks over {over}")
        print("all-reduce   p50, ms   requested, ms   ratio")
    for name, size_bytes in SIZES.items():
        tensor = torch.ones(size_bytes // 4)
        seconds = []
        for _ in range(6):
            dist.barrier()
            with network:
                start = time.perf_counter()
                dist.all_reduce(tensor)
                seconds.append((time.perf_counter() - start) / network.stretch)
        p50 = median(seconds[1:])
        cells = f"{name:10}{1000 * p50:10.2f}"
        if network.text and world_size > 1:
            requested = sum(network.price("allreduce", size_bytes, world_size)) / network.stretch
            cells += f"{1000 * requested:16.2f}{p50 / requested:8.3f}"
        if rank == 0:
            print(cells)
    dist.destroy_process_group()


def check(text: str) -> None:
    """Fail for what is no network, and for ranks on several hosts."""
    try:
        read_network(text)
    except ValueError as error:
        fail(str(error))
    ranks = os.environ.get("WORLD_SIZE")
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if "RANK" in os.environ and here != ranks:
        fail(f"all ranks have to be of this host, started by torchrun: {here} of {ranks} are")


def main() -> None:
    """Run a script over the network that the command line names, or measure that network."""
    text, *script = sys.argv[1:] or [""]
    if {"-h", "--help"} & {text, *script[:1]}:
        print(f"usage: {Path(__file__).name} RATE,DELAY [SCRIPT ... | -m MODULE ...]\n\n{__doc__}")
        return
    is_rank = "RANK" in os.environ  # torchrun has started it
    if script == ["-m"] or not (script or is_rank):
        fail("it needs a script, or torchrun: see --help")
    if text or script:
        check(text)
    if script:
        if script[0] != "-m" and not Path(script[0]).is_file():
            fail(f"there is no script {script[0]}")
        sys.modules["slow_network"] = sys.modules["__main__"]  # for a script that imports it
        torchruns = os.getpid() if is_rank else None
        with CHILDREN:
            CHILDREN.enter_context(slow_children(text, torchruns))
            begin(text, torchruns)
            run(*script)
    else:
        if text:
            begin(text)
        measure()


if __name__ == "__main__":
    main()
