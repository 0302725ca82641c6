r"""05: how well does the model of simulate.py predict what stages 02 to 05 take here?

calibrate.py measures what the model has to know, without any rung: a step that sends nothing,
all-reduces beside no compute, compute beside all-reduces. These experiments take turns with the
rungs. Then the model plays a step of each rung, and a table puts it beside what was measured.

    make 05_bucketed/predict NPROC=2                                    (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/predict/predict.py

Source: simulate.py names it.
"""

import math
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

BUCKET_SIZES_MB = [1.0, 10.0, 25.0, 100.0, math.inf]
ROWS = [("02", None), ("03", None), ("04", None), *(("05", size) for size in BUCKET_SIZES_MB)]


def label(rung: str, bucket_size_mb: float | None) -> str:
    return rung if bucket_size_mb is None else f"{rung}, {bucket_size_mb:g} MB"


def measure(args, device: torch.device) -> dict:
    """The experiments and the rungs in turn: an entry of "models" of the JSON."""
    import calibrate
    from bucketed import LanguageModel

    from common import report, timing

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
        "gradient_bytes": [parameter.nbytes for parameter in training.parameters],
        "experiments": {name: samples[name] for name in samples if name not in rungs},
        "rows": [{"name": name, **samples[name]} for name in rungs],
    }


def predict(entry: dict, world_size: int) -> None:
    """Add to an entry of "models" what the model says: of the step, of the network, of each row."""
    import calibrate
    from simulate import simulate

    experiments, gradient_bytes = entry["experiments"], entry["gradient_bytes"]
    step, network = calibrate.step_and_network(experiments, gradient_bytes, world_size)
    entry["step"] = asdict(step)
    entry["network"] = asdict(network)
    entry["seconds_alone"] = step.seconds_alone
    for row, (rung, bucket_size_mb) in zip(entry["rows"], ROWS, strict=True):
        predicted = simulate(step, network, rung, bucket_size_mb or 25.0)
        row["measured_seconds"] = calibrate.middle(row["step_seconds"])
        row["predicted_seconds"] = predicted.step_seconds
        row["error"] = row["predicted_seconds"] / row["measured_seconds"] - 1


# ==================================================================================================
# Below this line: the table, the picture, main.

COLORS = {"02": "#CC79A7", "03": "#E69F00", "04": "#009E73", "05": "#0072B2"}
TICKS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20)


def print_parameters(entry: dict) -> None:
    """What calibrate.py found, in four lines."""
    from simulate import Network

    from common.setup import say

    step = entry["step"]
    network = Network(**entry["network"])
    parts = [f"{part} {1000 * step[part]:.1f} ms" for part in ("forward", "backward", "optimizer")]
    say(f"a step alone: {', '.join(parts)}")
    say(f"a pass over the gradients' memory: {step['copy_bandwidth'] / 1e9:.1f} GB/s")
    costs = {
        "a call": network.call_alone(),
        "one more in flight": network.call,
        "its launch": step["launch"],
        "a gradient's hook": step["hook"],
    }
    shown = [f"{name} {1e6 * seconds:.0f} µs" for name, seconds in costs.items()]
    say(f"all-reduce: {network.bandwidth / 1e9:.2f} GB/s, {', '.join(shown)}")
    compute, call = network.call_speeds
    large = f"compute {network.compute_speed:.2f} and bytes {network.transfer_speed:.2f}"
    small = f"compute {compute:.2f} and small calls {call:.2f}"
    say(f"speed beside each other ÷ alone: {large}; {small}")


def print_rows(entry: dict) -> None:
    """The table of one model, and which bucket size is best."""
    from common import report
    from common.setup import say

    floor = entry["seconds_alone"]
    table = []
    for row in entry["rows"]:
        both = row["predicted_seconds"], row["measured_seconds"]
        cells = [row["name"]]
        cells += [f"{1000 * seconds:.1f}" for seconds in both]
        cells += [f"{seconds / floor:.3f}" for seconds in both]
        table.append([*cells, f"{100 * row['error']:+.1f} %"])
    header = ["step", "predicted, ms", "measured, ms", "÷ alone, predicted", "measured", "error"]
    report.print_table(header, table)
    say(best_bucket(entry["rows"][-len(BUCKET_SIZES_MB) :]))


def best_bucket(rows: list[dict]) -> str:
    """Which of the rows is the quickest, predicted and measured; if they differ, by how much."""
    predicted = min(rows, key=lambda row: row["predicted_seconds"])
    measured = min(rows, key=lambda row: row["measured_seconds"])
    said = f"best bucket: predicted {predicted['name'][4:]}, measured {measured['name'][4:]}"
    sizes_between = abs(rows.index(predicted) - rows.index(measured))
    if sizes_between == 0:
        return said
    slower = predicted["measured_seconds"] / measured["measured_seconds"] - 1
    noise = "below" if middle_halves_meet(predicted, measured) else "above"
    return f"{said}, {sizes_between} away and {100 * slower:.1f} % slower, {noise} the noise"


def middle_halves_meet(row: dict, other: dict) -> bool:
    """Do the middle halves of two rows' steps overlap?"""
    import numpy

    low, high = numpy.percentile(row["step_seconds"], (25, 75))
    other_low, other_high = numpy.percentile(other["step_seconds"], (25, 75))
    return bool(low <= other_high and other_low <= high)


def say_where_it_goes(entry: dict) -> None:
    """Why a step of 05 takes longer than alone: switch the causes off, one after the other."""
    from simulate import Network, Step, simulate

    from common.setup import say

    step = Step(**entry["step"])
    network = Network(**entry["network"])
    apart = replace(network, compute_speed=1.0, transfer_speed=1.0, call_speeds=None)
    without_python = replace(step, hook=0.0, launch=0.0)
    without_copies = replace(without_python, copy_bandwidth=math.inf)
    with_all = simulate(step, network, "05", 25.0).step_seconds
    left = with_all
    shares = []
    for cause, without_it in (
        ("each slows the other", simulate(step, apart, "05", 25.0).step_seconds),
        ("Python", simulate(without_python, apart, "05", 25.0).step_seconds),
        ("copies", simulate(without_copies, apart, "05", 25.0).step_seconds),
        ("waiting for what cannot hide", entry["seconds_alone"]),
    ):
        shares.append(f"{cause} {1000 * (left - without_it):.1f}")
        left = without_it
    above = 1000 * (with_all - entry["seconds_alone"])
    say(f"05, 25 MB: {above:.1f} ms above alone: {', '.join(shares)}")


def print_errors(result: dict) -> None:
    """The last lines: the mean error, and the largest."""
    from common.setup import say

    errors = {}
    for size, entry in result["models"].items():
        for row in entry["rows"]:
            errors[f"{size}: {row['name']}"] = row["error"]
    worst = max(errors, key=lambda name: abs(errors[name]))
    result["mean_abs_error"] = sum(map(abs, errors.values())) / len(errors)
    result["max_abs_error"] = abs(errors[worst])
    mean = f"mean error {100 * result['mean_abs_error']:.1f} % of {len(errors)} rows"
    say(f"\n{mean}; the largest {100 * errors[worst]:+.1f} % ({worst})")
    say("Measured: the mean of the middle half of all steps; ÷ alone: the step that sends nothing.")


def draw(result: dict, path: Path) -> None:
    """Measured over predicted, in steps that send nothing, with a band of ±10 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), dpi=120, layout="constrained")
    axes = figure.subplots()
    largest = 1.0
    for marker, (size, entry) in zip("o^", result["models"].items(), strict=False):
        look = {"marker": marker, "linestyle": "none", "markerfacecolor": "none"}
        for row in entry["rows"]:
            predicted = row["predicted_seconds"] / entry["seconds_alone"]
            measured = row["measured_seconds"] / entry["seconds_alone"]
            largest = max(largest, predicted, measured)
            color = COLORS[row["name"][:2]]
            axes.plot(predicted, measured, color=color, markersize=9, markeredgewidth=2, **look)
        axes.plot([], [], color="black", markeredgewidth=2, label=size, **look)
    for rung, color in COLORS.items():
        axes.plot([], [], "s", color=color, label=f"stage {rung}")
    ends = [0.95, 1.05 * largest]
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="0.88")
    axes.plot(ends, ends, color="black", linewidth=1, label="measured = predicted, ±10 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ticks = [tick for tick in TICKS if tick <= ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.set(xlabel="predicted step ÷ step alone", ylabel="measured step ÷ step alone")
    where = "{world_size} ranks, {backend} on {device}".format(**result)
    axes.set_title(f"A step of each rung and bucket size, {where}", fontsize=11)
    axes.legend(loc="upper left", fontsize=9)
    figure.savefig(path, format="png")


def main():
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        import calibrate

        from common import report, setup
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/, the rest of predict/ and the scripts of 02 to 05"
        sys.exit(f"error: {error}: copy {needed} beside this script")

    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, steps=12)
    parser.set_defaults(size="tiny,deep", warmup=2)  # these two, one after the other
    setup.add_plot_arguments(parser, "predict.png")
    args = parser.parse_args()

    with setup.process_group(args) as device:
        calibrate.refuse_one_rank()
        result = report.begin("05_bucketed/predict", args, device)
        result["models"] = {}
        for size in args.size.split(","):
            setup.say()
            args.size = size
            entry = measure(args, device)
            result["models"][size] = entry
            predict(entry, result["world_size"])
            print_parameters(entry)
            print_rows(entry)
            say_where_it_goes(entry)
        print_errors(result)
        if args.plot and dist.get_rank() == 0:
            draw(result, args.plot)
            setup.say(f"written: {args.plot}")
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
