r"""05: how well does the model of simulate.py predict what stages 02 to 05 take here?

calibrate.py measures what the model has to know, without any rung: a step that sends nothing,
all-reduces beside no compute, compute beside all-reduces. These experiments take turns with the
rungs. Then the model plays a step of each rung, and a table puts it beside what was measured.

    make 05_bucketed/predict NPROC=2                                    (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/predict/predict.py

A second table says when data parallelism stops scaling, and measures nothing: simulate.py plays a
step of a large model on up to 1,024 ranks, which share a global batch that stays the same.

    make 05_bucketed/predict ARGS="--extrapolate 10,100,400"
    make 05_bucketed/predict ARGS="--extrapolate 400 --size 10b --tflops 350"

What it assumes, beyond simulate.py's list, was never checked on hardware: a network of its own
card, so that neither side slows the other; no Python, no copies; one call at a time, as NCCL does;
a flat ring (NCCL takes trees for small tensors on many ranks); attention scores cost nothing.

Source: simulate.py names it; for --extrapolate Stanford CS336, assignment 2 (2026), "data parallel
calculations".
"""

import math
import sys
from bisect import bisect_left
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent.parent)]

import calibrate  # noqa: E402
from bucketed import LanguageModel  # noqa: E402
from simulate import Network, Step, simulate  # noqa: E402

from common import report, setup, timing  # noqa: E402
from common.setup import say  # noqa: E402

ROWS = [("02", None), ("03", None), ("04", None)]
ROWS += [("05", size) for size in (1.0, 10.0, 25.0, 100.0, math.inf)]  # MB


def label(rung: str, bucket_size_mb: float | None) -> str:
    return rung if bucket_size_mb is None else f"{rung}, {bucket_size_mb:g} MB"


def measure(args, device: torch.device) -> dict:
    """The experiments and the rungs in turn: an entry of "models" of the JSON."""
    described = report.describe(LanguageModel, args, replicas=3)
    batch_shape = described["batch_size"], described["context_length"]
    training = calibrate.Training(args, batch_shape, device)
    rungs = {}
    for row in ROWS:
        rungs[label(*row)] = partial(training.step, calibrate.wrap(training.model, *row))
    candidates = calibrate.with_experiments(rungs, training)
    samples = timing.measure(candidates, args.steps, args.warmup)
    return {
        "model": described,
        "gradient_bytes": training.gradient_bytes,
        "experiments": {name: samples[name] for name in samples if name not in rungs},
        "rows": [{"name": name, **samples[name]} for name in rungs],
    }


def predict(entry: dict, ranks: int) -> tuple[Step, Network]:
    """Add to an entry of "models" what the model says: of the step, of the network, of each row."""
    step = calibrate.step_of(entry["experiments"], entry["gradient_bytes"])
    network = calibrate.network_of(entry["experiments"], step, ranks)
    entry |= {"step": asdict(step), "network": asdict(network)}
    entry["seconds_alone"] = step.seconds_alone
    for row, rung_and_size in zip(entry["rows"], ROWS, strict=True):
        row["measured_seconds"] = calibrate.middle(row["step_seconds"])
        row["predicted_seconds"] = simulate(step, network, *rung_and_size)
        row["error"] = row["predicted_seconds"] / row["measured_seconds"] - 1
    return step, network


def print_parameters(step: Step, network: Network) -> None:
    """What calibrate.py found; the JSON has all of it."""
    say(f"no sync: {1000 * step.seconds_alone:.1f} ms")
    call = f"a call {1e6 * network.call_alone:.0f} µs, one more {1e6 * network.call:.0f} µs"
    say(f"all-reduce: {network.bandwidth / 1e9:.2f} GB/s, {call}")
    compute, call = network.call_speeds
    large = f"compute {network.compute_speed:.2f} and bytes {network.transfer_speed:.2f}"
    small = f"compute {compute:.2f} and small calls {call:.2f}"
    say(f"speed beside each other ÷ alone: {large}; {small}")


def print_rows(rows: list[dict], seconds_alone: float) -> None:
    """The table of one model, and which bucket size is best."""
    table = []
    for row in rows:
        both = row["predicted_seconds"], row["measured_seconds"]
        cells = [row["name"], *(f"{1000 * seconds:.1f}" for seconds in both)]
        cells += [f"{seconds / seconds_alone:.3f}" for seconds in both]
        table.append([*cells, f"{100 * row['error']:+.1f} %"])
    header = ["step", "predicted, ms", "measured, ms", "÷ no sync, predicted", "measured", "error"]
    report.print_table(header, table)
    buckets = rows[3:]
    predicted = min(buckets, key=lambda row: row["predicted_seconds"])
    measured = min(buckets, key=lambda row: row["measured_seconds"])
    slower = predicted["measured_seconds"] / measured["measured_seconds"] - 1
    named = f"predicted {predicted['name'][4:]}, measured {measured['name'][4:]}"
    say(f"best bucket: {named}; the predicted one is {100 * slower:.1f} % slower")


def say_where_it_goes(step: Step, network: Network) -> None:
    """Why a step of 05 takes longer than no sync: switch the causes off, one after the other."""
    apart = replace(network, compute_speed=1.0, transfer_speed=1.0, call_speeds=None)
    without_python = replace(step, hook=0.0, launch=0.0)
    without_copies = replace(without_python, copy_bandwidth=math.inf)
    left = simulate(step, network, "05", 25.0)
    above = 1000 * (left - step.seconds_alone)
    shares = []
    for cause, without_it in (
        ("each slows the other", simulate(step, apart, "05", 25.0)),
        ("Python", simulate(without_python, apart, "05", 25.0)),
        ("copies", simulate(without_copies, apart, "05", 25.0)),
        ("waiting for what cannot hide", step.seconds_alone),
    ):
        shares.append(f"{cause} {1000 * (left - without_it):.1f}")
        left = without_it
    say(f"05, 25 MB: {above:.1f} ms above no sync: {', '.join(shares)}")


def say_errors(result: dict) -> None:
    """The last lines: the mean error, and the largest."""
    errors = {}
    for size, entry in result["models"].items():
        errors |= {f"{size}: {row['name']}": row["error"] for row in entry["rows"]}
    worst = max(errors, key=lambda name: abs(errors[name]))
    mean = sum(map(abs, errors.values())) / len(errors)
    largest = f"the largest {100 * errors[worst]:+.1f} % ({worst})"
    say(f"\nmean error {100 * mean:.1f} % of {len(errors)} rows; {largest}")
    say("Measured: the mean of the middle half of all steps; no sync: a step that sends nothing.")


# ==================================================================================================
# Below this line: the second table, and main.

EXTRAPOLATED = [("02", None), ("03", None), ("04", None), ("05", 25.0), ("05", 400.0)]
RANKS = [2, 8, 64, 512, 1024]
MOST_RANKS = 2**16
GLOBAL_BATCH = 2**19  # tokens of all ranks in a step
LATENCY = 20e-6  # seconds from rank to rank
CALL = 10e-6  # seconds of fixed cost of an all-reduce
UPDATE = 1e-11  # seconds of the optimizer for each parameter
KEPT = 0.9  # "it scales": the step without communication is at least this part of the step


def build_step(model, tokens: float, operations_per_second: float) -> Step:
    """A step of a transformer whose weights are on the meta device, with `tokens` per rank.

    A weight with rows and columns costs 2 operations per token and element in forward and 4 in
    backward; the embedding none.
    """
    backward = 0.0
    parameters = 0
    gradients = []
    for name, parameter in reversed(list(model.named_parameters())):
        parameters += parameter.numel()
        if parameter.dim() == 2 and name != "token_embedding.weight":
            backward += 4 * tokens * parameter.numel() / operations_per_second
        gradients.append((float(parameter.nbytes), backward))
    return Step(backward / 2, backward, UPDATE * parameters, gradients)


def closed_form(bandwidth: float, operations_per_second: float) -> float:
    """The number of ranks up to which backward is as long as the ring's transfer, or longer."""
    return 1 + GLOBAL_BATCH * bandwidth / (2 * operations_per_second)


def extrapolate(args) -> list[dict]:
    """Print the second table, once for each network: "networks" of the JSON."""
    size = args.size if args.size in setup.SIZES else "xl"
    with torch.device("meta"):
        model = LanguageModel(*setup.SIZES[size][:5])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{size} model, {parameters / 1e6:.0f} million parameters")
    say(f"global batch {GLOBAL_BATCH} tokens; a rank: {args.tflops:g} TFLOP/s")
    entries = [on_network(model, gbit, 1e12 * args.tflops) for gbit in args.extrapolate]
    say("\nThe global batch is the same for all numbers of ranks. Simulated, never measured.")
    return entries


def on_network(model, gbit: float, operations_per_second: float) -> dict:
    """Print and return the table of one network."""
    bandwidth = gbit * 1e9 / 8

    def efficiency(row, ranks: int) -> float:
        """The step without communication ÷ the step of the rung."""
        step = build_step(model, GLOBAL_BATCH / ranks, operations_per_second)
        network = Network(ranks, LATENCY, bandwidth, call=CALL, calls_at_once=1)
        return step.seconds_alone / simulate(step, network, *row)

    def too_small(row, ranks: int) -> bool:
        return efficiency(row, ranks) < KEPT

    rows = []
    table = []
    for row in EXTRAPOLATED:
        name = label(*row)
        setup.progress(f"{gbit:g} Gbit/s: {name}")
        efficiencies = [efficiency(row, ranks) for ranks in RANKS]
        numbers = range(2, MOST_RANKS + 1)
        most = 1 + bisect_left(numbers, True, key=partial(too_small, row))
        rows.append({"name": name, "efficiencies": efficiencies, "most_ranks": most})
        cells = [f"{100 * value:.1f} %" for value in efficiencies]
        table.append([name, *cells, f"{most}" if most < MOST_RANKS else f"≥ {most}"])
    say(f"\n{gbit:g} Gbit/s, {1e6 * LATENCY:g} µs from rank to rank")
    header = ["no sync ÷ step", *(f"{ranks} ranks" for ranks in RANKS)]
    report.print_table([*header, f"≥ {100 * KEPT:.0f} % up to"], table)
    limit = closed_form(bandwidth, operations_per_second)
    say(f"closed form: all can hide up to N = {math.floor(limit)}")
    return {"gbit": gbit, "ranks": RANKS, "rows": rows, "closed_form": limit}


def main():
    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, steps=12)
    parser.set_defaults(size="mini", warmup=2)  # these two, one after the other
    add = parser.add_argument
    number = setup.checked(float, lambda number: 0 < number < 1e18, "a number above 0, below 1e18")
    instead = "only the second table, for these networks; --size is xl then, if not given"
    add("--extrapolate", type=setup.list_of(number), metavar="Gbit/s,…", help=instead)
    add("--tflops", type=number, default=7.0, help="of a rank in the second table")
    args = parser.parse_args()

    with setup.process_group(args) as device:
        result = report.begin("05_bucketed/predict", args, device)
        if args.extrapolate:
            result["networks"] = extrapolate(args)
        else:
            calibrate.refuse_one_rank()
            result["models"] = {}
            for size in args.size.split(","):
                say()
                args.size = size
                entry = measure(args, device)
                result["models"][size] = entry
                step, network = predict(entry, result["world_size"])
                print_parameters(step, network)
                print_rows(entry["rows"], step.seconds_alone)
                say_where_it_goes(step, network)
            say_errors(result)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
