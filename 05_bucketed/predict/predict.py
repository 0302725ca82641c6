r"""05: how well does the model of simulate.py predict what stages 02 to 05 take here?

calibrate.py measures what the model has to know, without any rung: a step that sends nothing,
all-reduces beside no compute, compute beside all-reduces. These experiments take turns with the
rungs. Then the model plays a step of each rung, and a table puts it beside what was measured.

    make 05_bucketed/predict NPROC=2                                    (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/predict.py --plot results/predict.png

Source: simulate.py names it.
"""

import math
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

BUCKET_SIZES_MB = [1.0, 10.0, 25.0, 100.0, math.inf]
ROWS = [("02", None), ("03", None), ("04", None), *(("05", size) for size in BUCKET_SIZES_MB)]
PARTS = ("forward", "backward", "optimizer")
COLORS = {"02": "#CC79A7", "03": "#E69F00", "04": "#009E73", "05": "#0072B2"}


def label(rung: str, bucket_size_mb: float | None) -> str:
    return rung if bucket_size_mb is None else f"{rung}, {bucket_size_mb:g} MB"


def measure(args, wrappers: dict, device: torch.device) -> dict:
    """The experiments and the rungs in turn: an entry of "models" of the JSON."""
    import bucketed
    import calibrate

    from common import report, timing

    described = report.describe(bucketed.LanguageModel, bucketed.SIZES, args, replicas=3)
    batch_shape = described["batch_size"], described["context_length"]
    model, optimizer, compute = calibrate.build(args, batch_shape, device)

    def rung(wrapped):
        """A step of the model, which all rungs share: only the one whose forward runs acts."""
        watch = timing.Stopwatch(device)

        def step():
            compute(watch, wrapped)
            wrapped.finish_gradient_synchronization()
            watch.mark("synchronized")
            optimizer.step()
            optimizer.zero_grad()
            watch.mark("end")
            exposed = watch.seconds("backward", "synchronized")
            return {"step_seconds": watch.seconds("start", "end"), "exposed_comm_seconds": exposed}

        return step

    rungs = {}
    for number, size in ROWS:
        options = {} if size is None else {"bucket_size_mb": size}
        rungs[label(number, size)] = rung(wrappers[number](model, **options))
    candidates = calibrate.with_experiments(rungs, model, optimizer, compute, device)
    samples = timing.measure(candidates, args.steps, args.warmup)
    return {
        "model": described,
        "gradient_bytes": [parameter.nbytes for parameter in reversed(list(model.parameters()))],
        "experiments": {name: samples[name] for name in samples if name not in rungs},
        "rows": [{"name": name, **samples[name]} for name in rungs],
    }


def predict(of_size: dict, world_size: int) -> None:
    """Add to an entry of "models" what the model says: "step", "network", and to each row."""
    import calibrate
    from simulate import simulate

    known = of_size["experiments"], of_size["gradient_bytes"], world_size
    step, network = calibrate.step_and_network(*known)
    of_size |= {"step": asdict(step), "network": asdict(network)}
    for row, (rung, size) in zip(of_size["rows"], ROWS, strict=True):
        predicted = simulate(step, network, rung, size or 25.0)
        row["measured_seconds"] = calibrate.middle(row["step_seconds"])
        row["predicted_seconds"] = predicted.step_seconds
        row["predicted_exposed_seconds"] = predicted.exposed_seconds
        row["error"] = row["predicted_seconds"] / row["measured_seconds"] - 1


# ==================================================================================================
# Below this line: the table, the picture, main.


def print_parameters(of_size: dict) -> None:
    """What calibrate.py found, in two lines."""
    from common.setup import say

    step, network = of_size["step"], of_size["network"]
    parts = [f"{part} {1000 * step[part]:.1f} ms" for part in PARTS]
    say(f"a step alone: {', '.join(parts)}")
    say(f"a pass over the gradients' memory: {step['copy_bandwidth'] / 1e9:.1f} GB/s")
    costs = {"a call": network["call"] + 2 * (network["ranks"] - 1) * network["hop"]}
    costs |= {"one more in flight": network["call"], "its launch": step["launch"]}
    costs |= {"a gradient's hook": step["hook"]}
    shown = [f"{name} {1e6 * seconds:.0f} µs" for name, seconds in costs.items()]
    say(f"all-reduce: {network['bandwidth'] / 1e9:.2f} GB/s, {', '.join(shown)}")
    compute, call = network["call_speeds"]
    large = f"compute {network['compute_speed']:.2f} and bytes {network['transfer_speed']:.2f}"
    small = f"compute {compute:.2f} and small calls {call:.2f}"
    say(f"speed beside each other ÷ alone: {large}; {small}")


def print_rows(of_size: dict) -> None:
    """The table of one model, and which bucket size is best."""
    from common import report
    from common.setup import say

    floor = sum(of_size["step"][part] for part in PARTS)
    table = []
    for row in of_size["rows"]:
        seconds = row["predicted_seconds"], row["measured_seconds"]
        cells = [f"{1000 * value:.1f}" for value in seconds]
        cells += [f"{value / floor:.3f}" for value in seconds]
        table.append([row["name"], *cells, f"{100 * row['error']:+.1f} %"])
    header = ["step", "predicted, ms", "measured, ms", "÷ alone, predicted", "measured", "error"]
    report.print_table(header, table)
    buckets = of_size["rows"][-len(BUCKET_SIZES_MB) :]
    predicted = min(buckets, key=lambda row: row["predicted_seconds"])
    measured = min(buckets, key=lambda row: row["measured_seconds"])
    away = abs(buckets.index(predicted) - buckets.index(measured))
    line = f"best bucket: predicted {predicted['name'][4:]}, measured {measured['name'][4:]}"
    if away > 0:
        slower = predicted["measured_seconds"] / measured["measured_seconds"] - 1
        noise = "below" if middle_halves_meet(predicted, measured) else "above"
        line += f", {away} away and {100 * slower:.1f} % slower, {noise} the noise"
    say(line)


def say_where_it_goes(of_size: dict, rung: str, bucket_size_mb: float) -> None:
    """Why a step takes longer than alone: switch the causes off, one after the other."""
    from simulate import Network, Step, simulate

    from common.setup import say

    step, network = Step(**of_size["step"]), Network(**of_size["network"])
    free = {"compute_speed": 1.0, "transfer_speed": 1.0, "call_speeds": None}
    stages = [(step, network), (step, replace(network, **free))]
    stages.append((replace(step, hook=0.0, launch=0.0), stages[-1][1]))
    stages.append((replace(stages[-1][0], copy_bandwidth=math.inf), stages[-1][1]))
    seconds = [simulate(*stage, rung, bucket_size_mb).step_seconds for stage in stages]
    seconds.append(sum(of_size["step"][part] for part in PARTS))
    causes = ["each slows the other", "Python", "copies", "waiting for what cannot hide"]
    shares = []
    for cause, (before, after) in zip(causes, pairwise(seconds), strict=True):
        shares.append(f"{cause} {1000 * (before - after):.1f}")
    name = label(rung, bucket_size_mb)
    say(f"{name}: {1000 * (seconds[0] - seconds[-1]):.1f} ms above alone: {', '.join(shares)}")


def middle_halves_meet(row: dict, other: dict) -> bool:
    """Do the middle halves of two rows' steps overlap?"""
    import numpy

    low, high = numpy.percentile(row["step_seconds"], (25, 75))
    other_low, other_high = numpy.percentile(other["step_seconds"], (25, 75))
    return bool(low <= other_high and other_low <= high)


def print_errors(result: dict) -> None:
    """The last lines: the mean error, and the largest."""
    from common.setup import say

    errors = {}
    for size, of_size in result["models"].items():
        errors |= {f"{size}: {row['name']}": row["error"] for row in of_size["rows"]}
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
    for number, (size, of_size) in enumerate(result["models"].items()):
        floor = sum(of_size["step"][part] for part in PARTS)
        for row in of_size["rows"]:
            point = row["predicted_seconds"] / floor, row["measured_seconds"] / floor
            largest = max(largest, *point)
            color, marker = COLORS[row["name"][:2]], "o^sDvP*X"[number % 8]
            axes.plot(*point, marker, color=color, markersize=9, markerfacecolor="none", mew=2)
        axes.plot([], [], marker, color="black", markerfacecolor="none", mew=2, label=size)
    for rung, color in COLORS.items():
        axes.plot([], [], "s", color=color, label=f"stage {rung}")
    ends = [0.95, 1.05 * largest]
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="0.88")
    axes.plot(ends, ends, color="black", linewidth=1, label="measured = predicted, ±10 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ticks = [tick for tick in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20) if tick <= ends[1]]
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
    folder = Path(__file__).resolve().parent
    root = folder.parent
    neighbours = [root / name for name in ("02_naive_ddp", "03_flat_ddp", "04_overlap_ddp")]
    sys.path[:0] = [str(path) for path in (folder, root, *neighbours)]
    try:
        import calibrate  # noqa: F401
        import simulate  # noqa: F401
        from bucketed import BucketedDDP
        from flat_ddp import FlatDDP
        from naive_ddp import NaiveDDP
        from overlap_ddp import OverlapDDP

        from common import report, setup
        from common.ladder.rungs import read_arguments
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/ and the scripts of 02 to 05"
        sys.exit(f"error: {error}: copy {needed} beside this script")

    parser = setup.Parser(__doc__)
    parser.add_argument("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    args = read_arguments(parser, "tiny,deep", steps=12, warmup=2)
    wrappers = {"02": NaiveDDP, "03": FlatDDP, "04": OverlapDDP, "05": BucketedDDP}

    with setup.process_group(args) as device:
        if dist.get_world_size() == 1:
            nproc = "torchrun's argument --nproc-per-node (NPROC of make)"
            setup.fail(f"{nproc}: '1' rank sends nothing; allowed are 2 and more")
        result = report.begin("05_bucketed/predict", args, device)
        result["models"] = {}
        for size in args.sizes:
            setup.say()
            args.size = size
            result["models"][size] = measure(args, wrappers, device)
            predict(result["models"][size], result["world_size"])
            print_parameters(result["models"][size])
            print_rows(result["models"][size])
            say_where_it_goes(result["models"][size], "05", 25.0)
        print_errors(result)
        if args.plot and dist.get_rank() == 0:
            draw(result, args.plot)
            setup.say(f"written: {args.plot}")
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
