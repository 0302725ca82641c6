"""05: what simulate.py has to know about this machine, measured without running any rung.

predict.py and bucket_sweep.py let these experiments take turns with what they predict, because a
noisy machine is another one a few seconds later.

- alone: a step that sends nothing. How long are its parts, and when is each gradient ready?
- hooks: how much Python does a gradient cost, how much a call?
- large, blocking, in flight: all-reduces beside no compute. A large one; small ones, one after
  another; the same ones, all at once. What does a byte cost, what a call, what one more call?
- beside small, beside large: compute beside a queue of all-reduces. How much slower is each?
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT), *(str(ROOT / stage) for stage in STAGES)]

import bucketed  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from naive_ddp import NaiveDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402
from simulate import Network, Step  # noqa: E402

from common.setup import SIZES, fail, without_gloo_greeting  # noqa: E402
from common.timing import Stopwatch  # noqa: E402

MB = 2**20
SMALL_CALLS = [1024, 16 * 1024, 64 * 1024, 256 * 1024, MB] * 13  # bytes
LARGE_CALL = 25 * MB
BESIDE = {"small": 64 * 1024, "large": 4 * MB}  # bytes of a call beside compute


def refuse_one_rank() -> None:
    if dist.get_world_size() == 1:
        nproc = "torchrun's argument --nproc-per-node (NPROC of make)"
        fail(f"{nproc}: '1' rank sends nothing; allowed are 2 and more")


def wrap(model, rung: str, bucket_size_mb: float | None):
    """The model in the wrapper of the rung "02", "03", "04", or "05" with buckets of this size."""
    if rung == "05":
        return bucketed.BucketedDDP(model, bucket_size_mb)
    return {"02": NaiveDDP, "03": FlatDDP, "04": OverlapDDP}[rung](model)


class Training:
    """The model of bucketed.py, its optimizer and this rank's batch."""

    def __init__(self, args, batch_shape: tuple[int, int], device: torch.device):
        shape = SIZES[args.size][:5]
        torch.manual_seed(args.seed + dist.get_rank())
        self.tokens, self.targets = torch.randint(shape[-1], (2, *batch_shape), device=device)
        torch.manual_seed(args.seed)
        with device:
            self.model = bucketed.LanguageModel(*shape).to(getattr(torch, args.dtype))
        self.parameters = list(reversed(list(self.model.parameters())))  # as they become ready
        self.gradient_bytes = [parameter.nbytes for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.device = device
        self.watch = Stopwatch(device)

    def step(self, wrapped) -> dict:
        """A step as stages 02 to 05 measure it, of the model within a wrapper; returns its times.

        Several wrappers may share a model: only the one whose forward runs acts.
        """
        batch = self.tokens, self.targets
        _, times = bucketed.train_step(wrapped, self.optimizer, self.watch, *batch)
        return times

    def compute(self, hook: Callable | None = None) -> None:
        """Forward and backward; marks "start", and the end of each as "forward", "backward".

        Each parameter calls the hook, if there is one, once its gradient is ready.
        """
        hooked = self.parameters if hook else []
        handles = [p.register_post_accumulate_grad_hook(hook) for p in hooked]
        self.watch.mark("start")
        logits = self.model(self.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        self.watch.mark("forward")
        loss.backward()
        self.watch.mark("backward")
        for handle in handles:
            handle.remove()


class Experiments:
    """Each method runs an experiment once and returns its times, {quantity: seconds}."""

    def __init__(self, training: Training):
        self.training = training
        self.watch = training.watch
        with without_gloo_greeting():
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.group_of_one = groups[dist.get_rank()]  # its all-reduces send nothing
        self.flat = torch.cat([p.detach().flatten() for p in training.parameters])
        self.queues = dict.fromkeys(BESIDE, 100)  # calls, adapted after each run

    def step_alone(self) -> dict:
        """A step that sends nothing."""
        parameters, watch = self.training.parameters, self.watch
        self.training.compute(hook=watch.mark)
        self.training.optimizer.step()
        self.training.optimizer.zero_grad()
        return {
            "forward": watch.seconds("start", "forward"),
            "backward": watch.seconds("forward", "backward"),
            "ready": [watch.seconds("forward", parameter) for parameter in parameters],
        }

    def python_of_hooks(self) -> dict:
        """What a hook of 04 and 05 does, for each gradient; its all-reduces send nothing."""
        seconds = {"scale": 0.0, "launch": 0.0}
        works = []

        def hook(parameter):
            start = time.perf_counter()
            parameter.grad.view(-1)[:1].mul_(1 / dist.get_world_size())
            scaled = time.perf_counter()
            works.append(dist.all_reduce(parameter.grad, group=self.group_of_one, async_op=True))
            seconds["scale"] += scaled - start
            seconds["launch"] += time.perf_counter() - scaled

        self.training.compute(hook)
        start = time.perf_counter()
        wait(works)
        seconds["launch"] += time.perf_counter() - start
        self.training.optimizer.zero_grad()
        return {name: total / len(works) for name, total in seconds.items()}

    def calls(self, tensors: list[torch.Tensor], at_once: bool) -> dict:
        """All-reduces beside no compute."""
        self.watch.mark("start")
        works = [dist.all_reduce(tensor, async_op=at_once) for tensor in tensors]
        if at_once:
            wait(works)
        self.watch.mark("end")
        return {"seconds": self.watch.seconds("start", "end")}

    def beside(self, name: str, tensors: list[torch.Tensor]) -> dict:
        """Forward and backward beside a queue of all-reduces that lasts until their end.

        Afterwards, as in a step that sends: the optimizer, and stage 03's two passes over memory.
        """
        training, watch = self.training, self.watch
        works = []
        for number in range(self.queues[name]):
            works.append(dist.all_reduce(tensors[number % len(tensors)], async_op=True))
        done_before = sum(work.is_completed() for work in works)
        training.compute()
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        done = sum(work.is_completed() for work in works) - done_before
        wait(works)
        watch.mark("waited")
        training.optimizer.step()
        watch.mark("stepped")
        places = self.flat.split([parameter.numel() for parameter in training.parameters])
        for parameter, place in zip(training.parameters, places, strict=True):
            torch.mul(parameter.grad.flatten(), 0.5, out=place)
        for parameter, place in zip(training.parameters, places, strict=True):
            parameter.grad.copy_(place.view_as(parameter))
        watch.mark("copied")
        training.optimizer.zero_grad()
        next_queue = torch.tensor(1.5 * done + 8, device=training.device)
        dist.all_reduce(next_queue, dist.ReduceOp.MAX)  # the same on every rank
        self.queues[name] = int(next_queue)
        return {
            "seconds": watch.seconds("start", "backward"),
            "calls": done,
            "optimizer": watch.seconds("waited", "stepped"),
            "copies": watch.seconds("stepped", "copied"),
        }


def wait(works: list) -> None:
    for work in works:
        work.wait()


def with_experiments(rungs: dict, training: Training, every: int = 1) -> dict[str, Callable]:
    """Candidates for timing.measure: the experiments, and `rungs` (name -> step) among them.

    The small calls come again after every so many rungs.
    """

    def zeros(sizes):
        return [torch.zeros(size // 4, device=training.device) for size in sizes]

    run = Experiments(training)
    candidates = {"alone": run.step_alone, "hooks": run.python_of_hooks}
    candidates["large"] = partial(run.calls, zeros([LARGE_CALL]), False)
    for name, size in BESIDE.items():
        candidates[f"beside {name}"] = partial(run.beside, name, zeros([size] * 8))
    small = zeros(SMALL_CALLS)
    for number, (name, rung) in enumerate(rungs.items()):
        candidates[name] = rung
        if number % every == 0:  # often, because their latency scatters by a factor of three
            candidates[f"blocking, after {name}"] = partial(run.calls, small, False)
            candidates[f"in flight, after {name}"] = partial(run.calls, small, True)
    return candidates


# ==================================================================================================
# Below this line: from the times to the arguments of simulate.


def middle(samples) -> float:
    """The mean of the middle half of the samples; it needs fewer of them than the median does."""
    ordered = numpy.sort(numpy.ravel(samples))
    quarter = len(ordered) // 4
    return float(ordered[quarter : len(ordered) - quarter].mean())


def typical(samples: dict, experiment: str, quantity: str = "seconds") -> float:
    """Of each step the slower rank, because the other one waits for it; of these the middle."""
    names = [name for name in samples if name.startswith(experiment)]
    values = numpy.mean([samples[name][quantity] for name in names], axis=0)  # [rank][step]
    return middle(values.max(axis=0))


def solve(equations: list[list[float]], seconds: list[float]) -> list[float]:
    """What costs how much, from as many experiments; above 0, whatever the noise."""
    return numpy.linalg.solve(equations, seconds).clip(1e-15).tolist()


def step_of(samples: dict, gradient_bytes: list[int]) -> Step:
    """The step that the experiments say. No sample of a rung goes in, nor below.

    `samples`: {experiment: {quantity: [rank][step]}}, as timing.measure returns it;
    `gradient_bytes`: of the parameters from the last to the first.
    """
    backward = typical(samples, "alone", "backward")
    moments = numpy.median(samples["alone"]["ready"], axis=(0, 1))  # by gradient
    moments *= backward / max(moments.max(), backward)  # none after the end
    copies = typical(samples, "beside large", "copies")
    return Step(
        forward=typical(samples, "alone", "forward"),
        backward=backward,
        optimizer=typical(samples, "beside large", "optimizer"),
        gradients=list(zip(gradient_bytes, moments.tolist(), strict=True)),
        copy_bandwidth=2 * sum(gradient_bytes) / copies,
        hook=typical(samples, "hooks", "scale"),
        launch=typical(samples, "hooks", "launch"),
    )


def network_of(samples: dict, step: Step, ranks: int) -> Network:
    """The network that the experiments say."""
    # Beside no compute a call takes alpha + per_byte · bytes, and so does the first of several at
    # once; each of the others takes `call` in place of alpha.
    number, total = len(SMALL_CALLS), sum(SMALL_CALLS)
    equations = [[1, LARGE_CALL, 0], [number, total, 0], [1, total, number - 1]]
    seconds = [typical(samples, name) for name in ("large", "blocking", "in flight")]
    alpha, per_byte, call = solve(equations, seconds)
    call = min(call, alpha)

    # Beside compute each of a queue takes call_beside + per_byte_beside · bytes.
    beside = {size: samples[f"beside {name}"] for name, size in BESIDE.items()}
    seconds = []
    for experiment in beside.values():
        seconds.append(middle(experiment["seconds"] / numpy.maximum(experiment["calls"], 1)))
    call_beside, per_byte_beside = solve([[1, size] for size in beside], seconds)

    # Such a call spends a part of its time on its fixed cost and the rest on its bytes, and compute
    # beside it is slowed by the one and by the other.
    parts = []
    for size in beside:
        on_call = call_beside / (call_beside + per_byte_beside * size)
        parts.append([on_call, 1 - on_call])
    compute = step.forward + step.backward
    speeds = [compute / typical(samples, f"beside {name}") for name in BESIDE]
    beside_call, beside_bytes = numpy.linalg.solve(parts, speeds).clip(0.05, 1).tolist()
    return Network(
        ranks=ranks,
        hop=(alpha - call) / (2 * (ranks - 1)),
        bandwidth=2 * (ranks - 1) / ranks / per_byte,
        call=call,
        calls_at_once=None,  # their number is in `call`
        compute_speed=beside_bytes,
        transfer_speed=per_byte / per_byte_beside,
        call_speeds=(beside_call, call / call_beside),
    )
