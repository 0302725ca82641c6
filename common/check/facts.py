"""What a step sends and needs, beside torch's DDP: facts, without a verdict."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from common.memory import peak_bytes
from common.report import percentiles
from common.setup import with_bucket_size
from common.timing import CollectiveCounter, Stopwatch, mark_last_gradient, measure

STEPS = 20


class NotedCollectives(CollectiveCounter):
    """Notes when the collectives within it start, and the bytes of what they fill."""

    def __init__(self):
        super().__init__()
        self.times = []
        self.bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        before = self.count
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if self.count > before:
            self.times.append(time.perf_counter())
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result


class Trained:
    """A wrapped model of 12 layers, 12 MB in float32, and its training step."""

    def __init__(self, wrap):
        torch.manual_seed(0)
        layers = [nn.Linear(512, 512) for _ in range(12)]
        self.watch = Stopwatch(torch.device("cpu"))
        mark_last_gradient(self.watch, layers[0].weight)
        self.model = with_bucket_size(wrap, 25.0)(nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(64, 512)

    def step(self) -> dict[str, float]:
        self.watch.mark("start")
        loss = self.model(self.inputs).square().mean()
        self.watch.mark("backward")
        self.watch.mark("last gradient")  # of FSDP nobody can tell
        loss.backward()
        if hasattr(self.model, "finish_gradient_synchronization"):
            self.model.finish_gradient_synchronization()
        self.watch.mark("synchronized")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.watch.mark("end")
        exposed = self.watch.seconds("last gradient", "synchronized")
        return {"step": self.watch.seconds("start", "end"), "exposed": exposed}

    def noted_step(self) -> NotedCollectives:
        for _ in range(2):  # torch's DDP arranges its buckets anew in its second step
            self.step()
        dist.barrier()
        with NotedCollectives() as noted:
            self.step()
        return noted


def calls_and_bytes(noted: NotedCollectives) -> str:
    if not noted.times:  # a backend in Python, whose calls torch does not see
        return f"{noted.count} calls"
    return f"{noted.count} calls, {noted.bytes / 2**20:.1f} MB in all"


def communication(mine):
    """a step of a model with 24 parameters, 12 MB"""
    noted = {wrap: Trained(wrap).noted_step() for wrap in (mine, DistributedDataParallel)}
    ours, theirs = map(calls_and_bytes, noted.values())
    return [f"{ours}; torch's DDP: {theirs}"]


def overlap(mine):
    """communication that is not hidden under backward"""
    trained = Trained(mine)
    noted = trained.noted_step()
    begin, end = trained.watch.marks["backward"], trained.watch.marks["last gradient"]
    early = sum(moment < end for moment in noted.times)
    facts = []
    if noted.times:
        facts.append(f"calls before the last gradient is there: {early} of {noted.count}")
    if early:
        waited = 100 * (noted.times[0] - begin) / (end - begin)
        facts.append(f"the first after {waited:.0f} % of backward")
    candidates = {"mine": trained.step, "torch's DDP": Trained(DistributedDataParallel).step}
    for name, times in measure(candidates, STEPS, warmup=2).items():
        share = percentiles(times["exposed"])[0] / percentiles(times["step"])[0]
        facts.append(f"{name} waits for it in {100 * share:.0f} % of a step")
    return facts


def memory(mine):
    """memory that a step takes for a while, beyond weights"""
    needed = []
    for wrap in (mine, DistributedDataParallel):
        trained = Trained(wrap)
        trained.step()
        needed.append(peak_bytes(trained.step, torch.device("cpu")) / 2**20)
    return ["{:.1f} MB; torch's DDP: {:.1f} MB".format(*needed)]
