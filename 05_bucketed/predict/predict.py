r"""05: how long does a step of 02 to 05 take? Predicted from three measurements, and measured.

What an all-reduce costs alone (o for the call, 1/w for each byte), when each gradient is there in a
step that sends nothing, and what the optimizer takes. From these `simulate` plays a step, call
after call. No step that communicates goes in; those that the table compares are measured beside.

    make 05_bucketed/predict NPROC=2                                    (see also ARGS="--help")
    make 05_bucketed/predict NETWORK=1gbit,1ms
    torchrun --standalone --nproc-per-node 2 05_bucketed/predict/predict.py

When does data parallelism stop scaling? The same loop with up to 65,536 ranks, which measures
nothing:

    make 05_bucketed/predict ARGS="--extrapolate 10,100,400"

Source: Li et al., "PyTorch Distributed", VLDB 2020; for --extrapolate Stanford CS336, assignment 2
(2026), "data parallel calculations".
"""

import math
import sys
from bisect import bisect_left
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT), *(str(ROOT / stage) for stage in STAGES)]

from bucketed import BucketedDDP, LanguageModel, fill_buckets, train_step  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from naive_ddp import NaiveDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402

from common import report, setup, timing  # noqa: E402
from common.setup import say  # noqa: E402


def simulate(
    calls: list, backward_ends: float, overlap: bool, call_seconds, bytes_per_second, at_once=2
) -> float:
    """When all gradients are averaged, in seconds from the begin of a step.

    `calls`: (bytes, when the gradients are there) of each all-reduce, in launch order. With
    `overlap` it is launched then; otherwise after backward, when the one before it has arrived.
    `at_once` of them are under way (gloo has two threads). They send their bytes in that order, one
    after another; `call_seconds`, o, pass beside those of others.
    """
    places = [0.0] * at_once  # when each is free for another call
    wire_is_free = 0.0
    arrived = backward_ends
    for size, ready in calls:
        launched = ready if overlap else arrived
        begins = max(launched, places.pop(0))
        wire_is_free = max(wire_is_free, begins) + size / bytes_per_second
        arrived = wire_is_free + call_seconds
        places.append(arrived)
    return max(arrived, backward_ends)


def calls_of(gradients: list[nn.Parameter], ready: list[float], bucket_size_mb: float | None):
    """What `simulate` takes, of gradients from the last to the first and buckets of this size."""
    moments = dict(zip(gradients, ready, strict=True))
    calls = []
    for bucket in fill_buckets(gradients, bucket_size_mb):
        size = sum(parameter.nbytes for parameter in bucket)
        calls.append((size, max(moments[parameter] for parameter in bucket)))
    return calls


ONE_EACH = 1e-9  # MB: too small for two gradients
WRAPPERS = {"02": NaiveDDP, "03": FlatDDP, "04": OverlapDDP}
WAYS = {"02": (ONE_EACH, False), "03": (None, False), "04": (ONE_EACH, True)}  # for `predict`
for size in (1, 5, 10, 25):
    WRAPPERS[f"05, {size} MB"] = partial(BucketedDDP, bucket_size_mb=size)
    WAYS[f"05, {size} MB"] = (size, True)


def measure(args, device: torch.device, wrappers: dict) -> tuple[list[nn.Parameter], dict]:
    """Steps of `no communication` and of the wrappers in turn, and what an all-reduce costs alone.

    All train one model: of its wrappers only the one whose forward runs acts. Returns its
    parameters from the last to the first, and an object for the JSON.
    """
    described = report.describe(LanguageModel, args, replicas=2)
    shape = setup.SIZES[args.size][:5]
    batch_shape = described["batch_size"], described["context_length"]
    torch.manual_seed(args.seed + dist.get_rank())
    batch = torch.randint(shape[-1], (2, *batch_shape), device=device)
    torch.manual_seed(args.seed)
    with device:
        model = LanguageModel(*shape).to(getattr(torch, args.dtype))
    gradients = list(model.parameters())[::-1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = timing.Stopwatch(device)
    watch.mark_last_gradient(gradients[-1])  # torch's DDP waits within backward

    def step(wrapped: nn.Module) -> dict:
        return train_step(wrapped, optimizer, watch, *batch)[1]

    def step_alone() -> dict:
        """One that sends nothing; also says when backward ends and when each gradient is there."""
        hooks = [p.register_post_accumulate_grad_hook(watch.mark) for p in gradients]
        times = step(model)
        for hook in hooks:
            hook.remove()
        times["backward_ends"] = watch.seconds("forward starts", "backward ends")
        times["ready"] = [watch.seconds("forward starts", p) for p in gradients]
        return times

    steps = {"no communication": step_alone}
    steps |= {name: partial(step, wrap(model)) for name, wrap in wrappers.items()}
    return gradients, {"model": described, **timing.benchmark(steps, args, device)}


def predict(gradients: list[nn.Parameter], result: dict, ways: dict) -> dict[str, float]:
    """Seconds of a step of each of `ways`, name: (bucket size in MB, does it overlap?).

    `result`: of `measure`. Only `no communication` and what an all-reduce costs go in.
    """
    alone = result["candidates"][0]
    # A call waits for the last rank. All begin a step together, so their times compare.
    ready = numpy.median(numpy.max(alone["ready"], axis=0), axis=0).tolist()
    backward_ends = float(numpy.median(numpy.max(alone["backward_ends"], axis=0)))
    optimizer = report.percentiles(alone["optimizer_seconds"])[0]
    costs = result["all_reduce"]
    predicted = {}
    for name, (bucket_size_mb, overlap) in ways.items():
        calls = calls_of(gradients, ready, bucket_size_mb)
        predicted[name] = simulate(calls, backward_ends, overlap, **costs) + optimizer
    times = [f"{1000 * seconds:.1f} ms" for seconds in (ready[0], backward_ends, optimizer)]
    say("no communication: first gradient after {}, all after {}, optimizer {}".format(*times))
    o, w = 1000 * costs["call_seconds"], costs["bytes_per_second"] / 1e9
    say(f"all-reduce: o = {o:.2f} ms, w = {w:.3f} GB/s")
    return predicted


def print_predicted(result: dict) -> None:
    """Each step beside what was measured."""
    rows = []
    errors = {}
    for candidate in result["candidates"][1:]:
        name = candidate["name"]
        predicted = result["predicted"][name]
        measured = report.percentiles(candidate["step_seconds"])[0]
        errors[name] = 100 * (predicted / measured - 1)
        cells = [f"{1000 * predicted:.1f}", f"{1000 * measured:.1f}", f"{errors[name]:+.1f} %"]
        rows.append([name, str(candidate["collectives_per_step"]), *cells])
    report.print_table(["step, ms", "all-reduces", "predicted", "measured", "error"], rows)
    worst = max(errors, key=lambda name: abs(errors[name]))
    say(f"Measured: p50, steps of all ranks; largest error: {errors[worst]:+.1f} % ({worst})")


# ==================================================================================================
# Below this line: many ranks, and main.

RANKS = [2, 8, 64, 512, 1024]
MORE = range(2, 2**16 + 1)
GLOBAL_BATCH = 2**19  # tokens of all ranks in a step
LATENCY = 20e-6  # seconds from rank to rank
CALL = 10e-6  # seconds of fixed cost of an all-reduce
UPDATE = 1e-11  # seconds of the optimizer for each parameter
KEPT = 0.9  # "it scales": the step without communication is at least this part of the step
SCALED = {name: WAYS[name] for name in ("02", "03", "04", "05, 25 MB")}
SCALED["05, 400 MB"] = (400, True)


def backward_times(model: nn.Module, tokens: float, operations_per_second: float) -> list[float]:
    """When each gradient is there, from the last parameter to the first.

    A matrix costs 2 operations per token and element in forward, 4 in backward, the embedding none.
    """
    operations = []
    for name, parameter in reversed(list(model.named_parameters())):
        is_matrix = parameter.dim() == 2 and name != "token_embedding.weight"
        operations.append(4 * tokens * parameter.numel() if is_matrix else 0)
    ends = numpy.cumsum(operations) / operations_per_second
    return (ends[-1] / 2 + ends).tolist()


def efficiency(model: nn.Module, way: tuple, gbit: float, tflops: float, ranks: int) -> float:
    """The step without communication ÷ the step, on a flat ring, one call at a time."""
    ready = backward_times(model, GLOBAL_BATCH / ranks, 1e12 * tflops)
    gradients = list(model.parameters())[::-1]
    bandwidth = gbit * 1e9 / 8 * ranks / (2 * (ranks - 1))  # a rank sends 2(n-1)/n of the bytes
    call = CALL + 2 * (ranks - 1) * LATENCY
    bucket_size_mb, overlap = way
    calls = calls_of(gradients, ready, bucket_size_mb)
    averaged = simulate(calls, ready[-1], overlap, call, bandwidth, at_once=1)
    update = UPDATE * sum(parameter.numel() for parameter in gradients)
    return (ready[-1] + update) / (averaged + update)


def extrapolate(args) -> list[dict]:
    """Print a table for each network: "simulated" of the JSON."""
    with torch.device("meta"):
        model = LanguageModel(*setup.SIZES[args.size][:5])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{args.size} model, {parameters / 1e6:.0f} million parameters")
    say(f"global batch {GLOBAL_BATCH} tokens; a rank: {args.tflops:g} TFLOP/s")
    header = ["no communication ÷ step", *(f"{ranks} ranks" for ranks in RANKS)]
    entries = []
    for gbit in args.extrapolate:
        rows = []
        for name, way in SCALED.items():
            setup.progress(f"{gbit:g} Gbit/s: {name}")
            of_ranks = partial(efficiency, model, way, gbit, args.tflops)
            most = 1 + bisect_left(MORE, True, key=lambda ranks: of_ranks(ranks) < KEPT)
            kept = [of_ranks(ranks) for ranks in RANKS]
            rows.append([name, *(f"{100 * value:.1f} %" for value in kept), str(most)])
            entries.append({"gbit": gbit, "name": name, "efficiencies": kept, "most_ranks": most})
        say(f"\n{gbit:g} Gbit/s, {1e6 * LATENCY:g} µs from rank to rank")
        report.print_table([*header, f"≥ {100 * KEPT:.0f} % up to"], rows)
        # As long as backward takes as long as the ring's transfer, or longer.
        all_hide = 1 + GLOBAL_BATCH * gbit * 1e9 / 8 / (2 * 1e12 * args.tflops)
        say(f"closed form: all can hide up to N = {math.floor(all_hide)}")
    say("\nThe global batch is the same for all numbers of ranks. Simulated, never measured.")
    return entries


def main():
    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, steps=6)
    parser.set_defaults(warmup=2, size=None)
    add = parser.add_argument
    number = setup.checked(float, lambda number: 0 < number < 1e18, "a number above 0, below 1e18")
    instead = "simulate many ranks on these networks; --size is xl then, if not given"
    add("--extrapolate", type=setup.list_of(number), metavar="Gbit/s,…", help=instead)
    add("--tflops", type=number, default=7.0, help="of a rank with --extrapolate")
    args = parser.parse_args()
    args.size = args.size or ("xl" if args.extrapolate else "mini")
    with setup.process_group(args) as device:
        result = report.begin("05_bucketed/predict", args, device)
        if args.extrapolate:
            result["simulated"] = extrapolate(args)
        else:
            gradients, measured = measure(args, device, WRAPPERS)
            result |= measured | {"predicted": predict(gradients, measured, WAYS)}
            print_predicted(result)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
