"""05: what simulate.py has to know about this machine, measured without running any rung.

predict.py and bucket_sweep.py let these experiments take turns with what they predict, because a
noisy machine is another one a few seconds later.

- alone: a step that sends nothing. How long are its parts, and when is each gradient ready?
- hooks: how much Python does a gradient cost, how much a call?
- large, blocking, in flight: all-reduces beside no compute. A large one; small ones, one after
  another; the same ones, all at once. What does a byte cost, what a call, what one more call?
- beside small, beside large: compute beside a queue of all-reduces. How much slower is each?

They print nothing: `make 05_bucketed/predict` does.
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
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.device = device
        self.watch = Stopwatch(device)

    def compute(self) -> None:
        """Forward and backward; marks "start", and the end of each as "forward", "backward"."""
        self.watch.mark("start")
        logits = self.model(self.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        self.watch.mark("forward")
        loss.backward()
        self.watch.mark("backward")

    def step(self, wrapped) -> dict:
        """A step as stages 02 to 05 measure it, of the model within a wrapper; returns its times.

        Several wrappers may share a model: only the one whose forward runs acts.
        """
        batch = self.tokens, self.targets
        _, times = bucketed.train_step(wrapped, self.optimizer, self.watch, *batch)
        return times

    def compute_with_hooks(self, hook: Callable) -> None:
        """The same, with a hook that each parameter calls once its gradient is ready."""
        handles = [p.register_post_accumulate_grad_hook(hook) for p in self.parameters]
        self.compute()
        for handle in handles:
            handle.remove()


def step_alone(training: Training) -> dict:
    """A step that sends nothing."""
    watch = training.watch
    training.compute_with_hooks(watch.mark)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return {
        "forward": watch.seconds("start", "forward"),
        "backward": watch.seconds("forward", "backward"),
        "ready": [watch.seconds("forward", parameter) for parameter in training.parameters],
    }


def python_of_hooks(training: Training) -> Callable[[], dict]:
    """What a hook of 04 and 05 does, with all-reduces of a single rank, which send nothing."""
    world_size = dist.get_world_size()
    with without_gloo_greeting():
        groups = [dist.new_group([rank]) for rank in range(world_size)]
    group = groups[dist.get_rank()]

    def hooks():
        seconds = {"scale": 0.0, "launch": 0.0}
        works = []

        def launch(parameter):
            start = time.perf_counter()
            parameter.grad.view(-1)[:1].mul_(1 / world_size)
            scaled = time.perf_counter()
            works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
            launched = time.perf_counter()
            seconds["scale"] += scaled - start
            seconds["launch"] += launched - scaled

        training.compute_with_hooks(launch)
        start = time.perf_counter()
        wait(works)
        seconds["launch"] += time.perf_counter() - start
        training.optimizer.zero_grad()
        return {name: total / len(training.parameters) for name, total in seconds.items()}

    return hooks


def calls(sizes: list[int], at_once: bool, training: Training) -> Callable[[], dict]:
    """All-reduces of these sizes in bytes, beside no compute."""
    watch = training.watch
    tensors = [torch.zeros(size // 4, device=training.device) for size in sizes]

    def run():
        watch.mark("start")
        works = [dist.all_reduce(tensor, async_op=at_once) for tensor in tensors]
        if at_once:
            wait(works)
        watch.mark("end")
        return {"seconds": watch.seconds("start", "end")}

    return run


def beside(size: int, training: Training) -> Callable[[], dict]:
    """Forward and backward beside a queue of all-reduces that lasts until their end."""
    watch = training.watch
    buffers = [torch.zeros(size // 4, device=training.device) for _ in range(8)]
    flat = torch.cat([parameter.detach().flatten() for parameter in training.parameters])
    queue = 100

    def run():
        nonlocal queue
        works = []
        for number in range(queue):
            works.append(dist.all_reduce(buffers[number % len(buffers)], async_op=True))
        done_before = sum(work.is_completed() for work in works)
        training.compute()
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        done = sum(work.is_completed() for work in works) - done_before
        wait(works)
        watch.mark("waited")
        training.optimizer.step()
        watch.mark("over")
        copies = two_passes([parameter.grad for parameter in training.parameters], flat, watch)
        training.optimizer.zero_grad()
        next_queue = torch.tensor(1.5 * done + 8, device=training.device)
        dist.all_reduce(next_queue, dist.ReduceOp.MAX)  # the same on every rank
        queue = int(next_queue)
        return {
            "seconds": watch.seconds("start", "backward"),
            "calls": done,
            "copies": copies,
            "optimizer": watch.seconds("waited", "over"),
        }

    return run


def two_passes(gradients: list[torch.Tensor], flat: torch.Tensor, watch) -> float:
    """Seconds of two passes over the gradients' memory: pack and scale, unpack, as in stage 03."""
    watch.mark("gradients")
    places = flat.split([gradient.numel() for gradient in gradients])
    for gradient, place in zip(gradients, places, strict=True):
        torch.mul(gradient.flatten(), 0.5, out=place)
    for gradient, place in zip(gradients, places, strict=True):
        gradient.copy_(place.view_as(gradient))
    watch.mark("copied")
    return watch.seconds("gradients", "copied")


def wait(works: list) -> None:
    for work in works:
        work.wait()


def with_experiments(rungs: dict, training: Training, every: int = 1) -> dict[str, Callable]:
    """Candidates for timing.measure: the experiments, and `rungs` (name -> step) among them.

    The small calls come again after every so many rungs.
    """
    candidates = {"alone": partial(step_alone, training), "hooks": python_of_hooks(training)}
    candidates["large"] = calls([LARGE_CALL], False, training)
    for name, size in BESIDE.items():
        candidates[f"beside {name}"] = beside(size, training)
    blocking = calls(SMALL_CALLS, False, training)
    in_flight = calls(SMALL_CALLS, True, training)
    for number, (name, rung) in enumerate(rungs.items()):
        candidates[name] = rung
        if number % every == 0:  # often, because their latency scatters by a factor of three
            candidates[f"blocking, after {name}"] = blocking
            candidates[f"in flight, after {name}"] = in_flight
    return candidates


# ==================================================================================================
# Below this line: from the times to the arguments of simulate.

SMALLEST = 1e-9  # seconds: no cost comes out below it, whatever the noise


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


def step_and_network(samples: dict, gradient_bytes: list[int], ranks: int) -> tuple[Step, Network]:
    """The (Step, Network) that the experiments say. No sample of a rung goes in.

    `samples`: {experiment: {quantity: [rank][step]}}, as timing.measure returns it;
    `gradient_bytes`: of the parameters from the last to the first.
    """
    step = step_of(samples, gradient_bytes)
    return step, network_of(samples, step.forward + step.backward, ranks)


def step_of(samples: dict, gradient_bytes: list[int]) -> Step:
    backward = typical(samples, "alone", "backward")
    moments = numpy.median(numpy.array(samples["alone"]["ready"]), axis=(0, 1))  # by gradient
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


def network_of(samples: dict, compute_seconds: float, ranks: int) -> Network:
    alpha, per_byte, call = costs_alone(samples)
    call_beside, per_byte_beside = costs_beside_compute(samples)
    # A call of a size spends a part of its time on its fixed cost and the rest on its bytes, and
    # compute beside it is slowed by the one and by the other. Two sizes give two equations.
    parts = []
    speeds = []
    for name, size in BESIDE.items():
        on_call = call_beside / (call_beside + per_byte_beside * size)
        parts.append([on_call, 1 - on_call])
        speeds.append(compute_seconds / typical(samples, f"beside {name}"))
    beside_call, beside_bytes = numpy.linalg.solve(parts, speeds).clip(0.05, 1)
    return Network(
        ranks=ranks,
        hop=(alpha - call) / (2 * (ranks - 1)),
        bandwidth=2 * (ranks - 1) / ranks / per_byte,
        call=call,
        calls_at_once=None,  # their number is in `call`
        compute_speed=float(beside_bytes),
        transfer_speed=per_byte / per_byte_beside,
        call_speeds=(float(beside_call), call / call_beside),
    )


def costs_alone(samples: dict) -> tuple[float, float, float]:
    """Seconds beside no compute: of a call by itself, of a byte, of one more call in flight.

    A call takes alpha + per_byte · bytes; of several at once each takes `call` instead of alpha.
    """
    number = len(SMALL_CALLS)
    total = sum(SMALL_CALLS)
    small = typical(samples, "blocking") / number
    per_byte = max(typical(samples, "large") - small, SMALLEST) / (LARGE_CALL - total / number)
    alpha = max(small - per_byte * total / number, SMALLEST)
    call = (typical(samples, "in flight") - alpha - per_byte * total) / (number - 1)
    return alpha, per_byte, min(max(call, SMALLEST), alpha)


def costs_beside_compute(samples: dict) -> tuple[float, float]:
    """Seconds beside compute: of one more call in flight, of a byte."""
    seconds = {}  # of a call of each size
    for name in BESIDE:
        experiment = samples[f"beside {name}"]
        of_steps = numpy.array(experiment["seconds"]) / numpy.maximum(experiment["calls"], 1)
        seconds[name] = middle(of_steps)
    more_bytes = BESIDE["large"] - BESIDE["small"]
    per_byte = max(seconds["large"] - seconds["small"], SMALLEST) / more_bytes
    call = max(seconds["small"] - per_byte * BESIDE["small"], SMALLEST)
    return call, per_byte
