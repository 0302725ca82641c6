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

import time
from collections.abc import Callable

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F

MB = 2**20
SMALL_CALLS = [1024, 16 * 1024, 64 * 1024, 256 * 1024, MB] * 13  # bytes
LARGE_CALL = 25 * MB
BESIDE = {"small": 64 * 1024, "large": 4 * MB}  # bytes of a call beside compute


def build(args, batch_shape: tuple[int, int], device: torch.device):
    """The model of bucketed.py, its optimizer, and compute(watch, model): forward and backward.

    `compute` marks "start", "forward" and "backward" at the end of each.
    """
    import bucketed

    shape = bucketed.SIZES[args.size][:5]
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(shape[-1], (2, *batch_shape), device=device)
    torch.manual_seed(args.seed)
    with device:
        model = bucketed.LanguageModel(*shape).to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def compute(watch, wrapped=model):
        watch.mark("start")
        loss = F.cross_entropy(wrapped(tokens).flatten(0, 1).float(), targets.flatten())
        watch.mark("forward")
        loss.backward()
        watch.mark("backward")

    return model, optimizer, compute


def step_alone(parameters, optimizer, compute, watch) -> Callable[[], dict]:
    def alone():
        compute_with_hooks(parameters, watch.mark, compute, watch)
        optimizer.step()
        optimizer.zero_grad()
        times = {"forward": watch.seconds("start", "forward")}
        times["backward"] = watch.seconds("forward", "backward")
        times["ready"] = [watch.seconds("forward", parameter) for parameter in parameters]
        return times

    return alone


def compute_with_hooks(parameters, hook, compute, watch) -> None:
    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]
    compute(watch)
    for handle in handles:
        handle.remove()


def python_of_hooks(parameters, optimizer, compute, watch) -> Callable[[], dict]:
    """What a hook of 04 and 05 does, with all-reduces of a single rank, which send nothing."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]

    def hooks():
        times = {"scale": 0.0, "launch": 0.0}
        works = []

        def launch(parameter):
            start = time.perf_counter()
            parameter.grad.view(-1)[:1].mul_(1 / len(groups))
            scaled = time.perf_counter()
            works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
            times["scale"] += scaled - start
            times["launch"] += time.perf_counter() - scaled

        compute_with_hooks(parameters, launch, compute, watch)
        start = time.perf_counter()
        wait(works)
        times["launch"] += time.perf_counter() - start
        optimizer.zero_grad()
        return {name: seconds / len(parameters) for name, seconds in times.items()}

    return hooks


def calls(sizes: list[int], at_once: bool, watch, device) -> Callable[[], dict]:
    """All-reduces of these sizes in bytes, beside no compute."""
    tensors = [torch.zeros(size // 4, device=device) for size in sizes]

    def run():
        watch.mark("start")
        works = [dist.all_reduce(tensor, async_op=at_once) for tensor in tensors]
        if at_once:
            wait(works)
        watch.mark("end")
        return {"seconds": watch.seconds("start", "end")}

    return run


def beside(size: int, parameters, optimizer, compute, watch, device) -> Callable[[], dict]:
    """Forward and backward beside a queue of all-reduces that lasts until their end."""
    buffers = [torch.zeros(size // 4, device=device) for _ in range(8)]
    queue = 100

    def run():
        nonlocal queue
        works = []
        for number in range(queue):
            works.append(dist.all_reduce(buffers[number % len(buffers)], async_op=True))
        before = sum(work.is_completed() for work in works)
        compute(watch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        done = sum(work.is_completed() for work in works) - before
        wait(works)
        watch.mark("waited")
        optimizer.step()
        watch.mark("over")
        copies = three_passes([parameter.grad for parameter in parameters], watch)
        optimizer.zero_grad()
        next_queue = torch.tensor(1.5 * done + 8, device=device)
        dist.all_reduce(next_queue, dist.ReduceOp.MAX)  # the same on every rank
        queue = int(next_queue)
        times = {"seconds": watch.seconds("start", "backward"), "calls": done, "copies": copies}
        return times | {"optimizer": watch.seconds("waited", "over")}

    return run


def three_passes(gradients: list[torch.Tensor], watch) -> float:
    """Seconds of three passes over the gradients' memory: pack, scale, unpack."""
    watch.mark("gradients")
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    flat.mul_(0.5)
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))
    watch.mark("copied")
    return watch.seconds("gradients", "copied")


def wait(works: list) -> None:
    for work in works:
        work.wait()


def with_experiments(
    rungs: dict, model, optimizer, compute, device, every: int = 1
) -> dict[str, Callable]:
    """Candidates for timing.measure: the experiments, and `rungs` (name -> step) among them.

    The small calls come again after every so many rungs.
    """
    from common.timing import Stopwatch

    watch = Stopwatch(device)
    parameters = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    step = parameters, optimizer, compute, watch
    candidates = {"alone": step_alone(*step), "hooks": python_of_hooks(*step)}
    candidates["large"] = calls([LARGE_CALL], False, watch, device)
    for name, size in BESIDE.items():
        candidates[f"beside {name}"] = beside(size, *step, device)
    blocking = calls(SMALL_CALLS, False, watch, device)
    in_flight = calls(SMALL_CALLS, True, watch, device)
    for number, (name, rung) in enumerate(rungs.items()):
        candidates |= {name: rung}
        if number % every == 0:  # often, because their latency scatters by a factor of three
            candidates[f"blocking, after {name}"] = blocking
            candidates[f"in flight, after {name}"] = in_flight
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


def step_and_network(samples: dict, gradient_bytes: list[int], ranks: int):
    """The (Step, Network) that the experiments say. No sample of a rung goes in.

    `samples`: {experiment: {quantity: [rank][step]}}, as timing.measure returns it;
    `gradient_bytes`: of the parameters from the last to the first.
    """
    step = step_of(samples, gradient_bytes)
    return step, network_of(samples, step.forward + step.backward, ranks)


def step_of(samples: dict, gradient_bytes: list[int]):
    from simulate import Step

    backward = typical(samples, "alone", "backward")
    moments = numpy.median(numpy.array(samples["alone"]["ready"]), axis=(0, 1))  # by gradient
    moments *= backward / max(moments.max(), backward)  # none after the end
    copies = typical(samples, "beside large", "copies")
    return Step(
        forward=typical(samples, "alone", "forward"),
        backward=backward,
        optimizer=typical(samples, "beside large", "optimizer"),
        gradients=list(zip(gradient_bytes, moments.tolist(), strict=True)),
        copy_bandwidth=3 * sum(gradient_bytes) / copies,
        hook=typical(samples, "hooks", "scale"),
        launch=typical(samples, "hooks", "launch"),
    )


def network_of(samples: dict, compute_seconds: float, ranks: int):
    from simulate import Network

    tiny = 1e-9  # seconds: no cost comes out below it, whatever the noise
    number, total = len(SMALL_CALLS), sum(SMALL_CALLS)
    # A call takes alpha + per_byte · bytes; of several at once each takes `call` instead of alpha.
    one = typical(samples, "blocking") / number
    per_byte = max(typical(samples, "large") - one, tiny) / (LARGE_CALL - total / number)
    alpha = max(one - per_byte * total / number, tiny)
    call = (typical(samples, "in flight") - alpha - per_byte * total) / (number - 1)
    call = min(max(call, tiny), alpha)
    # The same beside compute, and the speed of compute: a call of a size spends a part of its time
    # on its fixed cost, the rest on its bytes, and so does what is lost by compute.
    seconds, speeds = {}, {}
    for name in BESIDE:
        of_name = samples[f"beside {name}"]
        per_call = numpy.array(of_name["seconds"]) / numpy.maximum(of_name["calls"], 1)
        seconds[name] = middle(per_call)
        speeds[name] = compute_seconds / typical(samples, f"beside {name}")
    between = BESIDE["large"] - BESIDE["small"]
    per_byte_beside = max(seconds["large"] - seconds["small"], tiny) / between
    call_beside = max(seconds["small"] - per_byte_beside * BESIDE["small"], tiny)
    on_calls = [call_beside / (call_beside + per_byte_beside * size) for size in BESIDE.values()]
    matrix = [[part, 1 - part] for part in on_calls]
    beside_call, beside_bytes = numpy.linalg.solve(matrix, list(speeds.values())).clip(0.05, 1)
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
